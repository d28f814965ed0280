"""Answers that follow a grammar.

It says what may be asked for, and which tokens may come next at any node of a draft tree.
"""

from __future__ import annotations

from quickbeam.grammar.spec import Grammar

__all__ = ["Grammar"]
