"""What a source file does, whatever its comments and docstrings say."""

from __future__ import annotations

import ast
from pathlib import Path


def code(path: Path) -> bytes:
    """Return a file's contents, or for Python its syntax tree without docstrings.

    The tree is text that is the same in all versions of Python. A file that is no valid Python
    counts by its contents. Raises `OSError` if the file can't be read.
    """
    raw = path.read_bytes()
    if path.suffix != ".py":
        return raw
    try:
        tree = ast.parse(raw)
    except (SyntaxError, ValueError):
        return raw
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and ast.get_docstring(node) is not None
        ):
            del node.body[0]
    return _written(tree).encode()


def _written(node: object) -> str:
    """A syntax tree as one line of text.

    `ast.dump` writes empty fields in some versions of Python only. Here they are left out in all
    versions.
    """
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={_written(value)}"
            for name, value in ast.iter_fields(node)
            if value is not None and value != []
        )
        return f"{type(node).__name__}({', '.join(fields)})"
    if isinstance(node, list):
        return f"[{', '.join(_written(one) for one in node)}]"
    return repr(node)
