"""Inference mode is entered where it is not on, and only there."""

from __future__ import annotations

import pytest
import torch

from quickbeam.models.inference import inference


@inference
def twice(x: torch.Tensor) -> torch.Tensor:
    """Doubles."""
    assert torch.is_inference_mode_enabled()
    return 2 * x


def test_it_is_on_inside_and_off_after(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(2, requires_grad=True)
    assert twice(x).is_inference() and not torch.is_inference_mode_enabled()
    assert (twice.__name__, twice.__doc__) == ("twice", "Doubles.")
    with pytest.raises(TypeError):
        twice(None, None)
    assert not torch.is_inference_mode_enabled()
    with torch.inference_mode():
        monkeypatch.setattr(torch, "inference_mode", None)  # entering it again would fail
        assert twice(x).tolist() == [2, 2]
