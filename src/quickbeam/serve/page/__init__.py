"""The page that the server shows at `/`: one HTML file, and the Content-Security-Policy that lets
it run and nothing else."""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files

INLINE = r"<{0}>(.*?)</{0}>"  # the file's style and script elements carry no attributes


@cache
def page() -> tuple[bytes, str]:
    """The HTML, in UTF-8, and the value of its Content-Security-Policy header. Scripts and styles
    run only as they are in the file (by their hashes); connections go to this server only; nothing
    else is loaded, and no other site may frame the page."""
    html = files(__name__).joinpath("index.html").read_text(encoding="utf-8")
    rules = {
        "default-src": "'none'",
        "script-src": _hashes("script", html),
        "style-src": _hashes("style", html),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    return html.encode(), "; ".join(f"{name} {value}" for name, value in rules.items())


def _hashes(element: str, html: str) -> str:
    """The CSP sources of what all elements of this kind hold."""
    contents = re.findall(INLINE.format(element), html, re.DOTALL)
    return " ".join(
        f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" for content in contents
    )
