"""What training owes a GPU: few launches."""

from copy import deepcopy

import pytest
import torch

from quickbeam.train import muon
from quickbeam.train.muon import Muon


@pytest.mark.parametrize("dtype, tolerance", [("float32", 1e-5), ("bfloat16", 0.05)])
def test_muon_makes_the_steps_of_pytorchs(dtype, tolerance, monkeypatch):
    monkeypatch.setattr(muon, "fast_bfloat16", lambda device: dtype == "bfloat16")
    if dtype == "float32":  # PyTorch's computes in bfloat16 alone
        monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.float)
    generator = torch.Generator().manual_seed(0)
    shapes = [(8, 8), (12, 8), (8, 8), (8, 12), (8, 20)]

    def random():
        return [torch.randn(shape, generator=generator) for shape in shapes]

    begin, gradients = random(), [random() for _ in range(6)]
    ours, theirs = ([torch.nn.Parameter(p.clone()) for p in begin] for _ in range(2))
    plain = torch.optim.Muon(theirs, lr=0.1, weight_decay=0, adjust_lr_fn="match_rms_adamw")
    batched = Muon(ours, 0.1)
    for number, step in enumerate(gradients):
        for one, other, gradient in zip(ours, theirs, step, strict=True):
            one.grad, other.grad = gradient.clone(), gradient.clone()
        batched.step()
        plain.step()
        for one, other, p in zip(ours, theirs, begin, strict=True):
            assert (one - other).norm() < tolerance * (other - p).norm()
        if number == 2:  # a checkpoint that PyTorch's wrote is read
            batched = Muon(ours, 0.1)
            batched.load_state_dict(deepcopy(plain.state_dict()))
