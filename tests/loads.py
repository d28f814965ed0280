"""Loads of a step, for tests of the budget."""

from __future__ import annotations

from quickbeam.engine.budget import Load

ME, METHOD = "a sequence", "a method"


def alone(context: int = 0, **load: int) -> Load:
    return Load({ME: context}, **load)


def crowd(others: int, nodes: int = 1) -> Load:
    """Me and others, each of whose trees had so many nodes."""
    return Load({ME: 0} | dict.fromkeys(range(others), 0), dict.fromkeys(range(others), nodes))
