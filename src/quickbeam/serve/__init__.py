"""An OpenAI-compatible server.

This module imports nothing heavy: the packages that the server needs come with the extra `serve`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quickbeam.serve.app import create_app

__all__ = ["create_app"]


def __getattr__(name: str) -> Any:
    if name != "create_app":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from quickbeam.serve.app import create_app

    return create_app
