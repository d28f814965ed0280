"""Which combinations of parameters every change is tested with, and what a call refuses."""

import itertools
import os

import pytest
from hypothesis import settings

from quickbeam.errors import InvalidInput

THOROUGH = os.environ.get("QUICKBEAM_TESTS") == "all"  # as `make test-all` sets it
SHARE = 0.4  # of a property's examples that `make test` tries
LEAST = 12
FULL = OSError(28, "No space left on device")


def spread(*values):
    """All combinations; `make test` runs a few in which each value occurs, the rest is `long`."""
    kept = [
        tuple(some[(i + i // len(some) * at) % len(some)] for at, some in enumerate(values))
        for i in range(max(map(len, values)) if all(values) else 0)
    ]
    return few(itertools.product(*values), kept)


def few(every, kept):
    """All of them; those that are not `kept` are `long`."""
    cases = [case if isinstance(case, tuple) else (case,) for case in every]
    kept = [case if isinstance(case, tuple) else (case,) for case in kept]
    assert all(case in cases for case in kept), kept
    return [pytest.param(*case, marks=() if case in kept else pytest.mark.long) for case in cases]


def examples(most, **more):
    """So many with `make test-all`, a part with `make test`. `more`: hypothesis' own settings."""
    return settings(
        max_examples=most if THOROUGH else min(most, max(LEAST, round(most * SHARE))), **more
    )


def raising(error):
    def call(*_, **__):
        raise error

    return call


def before(patch, owner, name, note):
    """Have `note` called with what each call of `owner.name` is given, before it."""
    call = getattr(owner, name)

    def noted(*given, **more):
        note(*given, **more)
        return call(*given, **more)

    patch.setattr(owner, name, noted)


def refuses(words, call, *given, error=InvalidInput, **options):
    """Hold a call to end with an error whose message has these words (an expression)."""
    with pytest.raises(error, match=words):
        call(*given, **options)
