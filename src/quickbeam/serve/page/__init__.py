"""The page that the server shows at `/`: one HTML file and its Content-Security-Policy.

The policy lets the page run as it is in the file, and lets nothing else run.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

INLINE = r"<{0}>(.*?)</{0}>"  # style and script elements of the file have no attributes


@cache
def page() -> tuple[bytes, str]:
    """Return the HTML, in UTF-8, and the value of its Content-Security-Policy header.

    The policy admits scripts and styles by their hashes, so they run only as they are in the file.
    The page may connect to this server only. Nothing else is loaded but `data:` images, and no site
    may frame the page.
    """
    html = files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    rules = (
        f"default-src 'none'; script-src {_hashes('script', html)}; "
        f"style-src {_hashes('style', html)}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return html.encode(), rules


def _hashes(element: str, html: str) -> str:
    """Return CSP sources (hashes) for the contents of all elements of this kind."""
    contents = re.findall(INLINE.format(element), html, re.DOTALL)
    return " ".join(
        f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" for content in contents
    )
