"""The fused kernel against the reference: on CUDA where there is one, in Triton's interpreter (a
process of its own) otherwise."""

import os
import sys

import pytest
import torch

from cases import refuses
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Shortlist
from scripts import captured
from test_shortlist import spread

triton = pytest.importorskip("triton")
FusedHead = pytest.importorskip("quickbeam.drafters.shortlist.fused").FusedHead
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = "cuda" if CUDA else "cpu"
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or CUDA), reason="needs CUDA; see the test with the interpreter"
)


def expected(weight, h, layout, clusters):
    out = torch.full((len(h), layout.vocab), -torch.inf)
    for token in layout.scored(torch.tensor(clusters, dtype=torch.int64)).tolist():
        out[:, token] = h.float() @ weight[token].float()
    return out


@pytest.mark.skipif(INTERPRETED, reason="is in it already")
def test_all_of_this_holds_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    kept = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
    done = captured(command, env=kept | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


@runs_kernels
@pytest.mark.parametrize(
    ("n", "d", "vocab", "frequent", "size", "clusters"),
    [
        (1, 64, 128, 32, 32, [0, 2]),
        (3, 72, 290, 101, 50, [1, 3]),  # a frequent block that doesn't end with a slot, a tail of d
        (2, 33, 290, 0, 50, [0, 5]),  # no frequent ones, the last cluster
        (70, 16, 100, 7, 10, [0, 1, 9]),  # more rows than a tile, the last cluster short
        (2, 16, 60, 60, 60, []),  # FR-Spec: frequent ones alone
        (5, 24, 200, 20, 100, []),  # nothing chosen, the block wider than a tile
        (1, 1, 3, 1, 1, [1]),
    ],
)
def test_the_kernel_gives_what_the_reference_does(n, d, vocab, frequent, size, clusters):
    torch.manual_seed(0)
    weight, h = torch.randn(vocab, d, device=DEVICE), torch.randn(n, d, device=DEVICE)
    layout = Layout(torch.randperm(vocab), frequent, size, vocab)
    most = min(4, layout.clusters)
    made = FusedHead(weight, layout, most)
    chosen = torch.tensor(clusters, dtype=torch.int64, device=DEVICE)
    scores = made(h, chosen)
    assert scores.logits.shape == (n, (-(-frequent // size) + most) * size)
    assert scores.tokens.device == scores.logits.device == h.device
    right = expected(weight.cpu(), h.cpu(), layout, clusters)
    torch.testing.assert_close(spread(scores, vocab), right, rtol=1e-4, atol=1e-4)
    assert not scores.tokens[scores.logits[0] == -torch.inf].any()
    padded = made(h, torch.nn.functional.pad(chosen, (0, most - len(clusters)), value=-1))
    assert torch.equal(padded.logits, scores.logits) and torch.equal(padded.tokens, scores.tokens)


@runs_kernels
def test_a_shortlist_takes_it_by_itself_and_puts_the_context_beside():
    torch.manual_seed(0)
    weight, h = torch.randn(290, 24, device=DEVICE), torch.randn(3, 24, device=DEVICE)
    layout = Layout(torch.randperm(290), 40, 50, 290)
    router = Router(RouterConfig(2, 2, 2, layout.clusters))
    shared = Shortlist(weight, layout, None, router=router, chosen=2, window=9)
    assert isinstance(shared.fused, FusedHead)
    one, three = (layout.scored(torch.tensor([i]))[layout.frequent :].tolist() for i in (1, 3))
    ids = [*one[:2], *three[:3], int(layout.order[0])]
    state = shared.begin(ids)
    scores = state.score(h, torch.tensor([1, 4], device=DEVICE))
    right = expected(weight.cpu(), h.cpu(), layout, [1, 4])
    for token in ids:
        right[:, token] = h.cpu() @ weight[token].cpu()
    torch.testing.assert_close(spread(scores, 290), right, rtol=1e-4, atol=1e-4)
    assert state.scored == int((right[0] > -torch.inf).sum())


@runs_kernels
def test_a_strided_input_and_no_rows_are_fine():
    weight, layout = torch.randn(60, 8, device=DEVICE), Layout(torch.randperm(60), 10, 20, 60)
    made = FusedHead(weight, layout, layout.clusters)
    wide, chosen = torch.randn(4, 16, device=DEVICE), torch.tensor([2], device=DEVICE)
    strided, plain = (made(h, chosen).logits for h in (wide[::2, ::2], wide[::2, ::2].contiguous()))
    torch.testing.assert_close(strided, plain)
    assert made(wide[:0, :8], chosen).logits.shape == (0, 80)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype):
    torch.manual_seed(0)
    weight = torch.randn(60, 512, device=DEVICE).to(dtype)
    h = torch.randn(3, 512, device=DEVICE).to(dtype)
    layout = Layout(torch.randperm(60), 10, 20, 60)
    if dtype is torch.bfloat16 and not CUDA:
        refuses("bfloat16", FusedHead, weight, layout, layout.clusters)
        return
    scores = FusedHead(weight, layout, layout.clusters)(h, torch.tensor([1], device=DEVICE))
    assert scores.logits.dtype is dtype
    exact, eps = expected(weight.cpu(), h.cpu(), layout, [1]), torch.finfo(dtype).eps
    torch.testing.assert_close(spread(scores, 60), exact.to(dtype).float(), rtol=eps, atol=1e-3)


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_a_captured_call_follows_the_clusters_it_is_given():
    torch.manual_seed(0)
    weight, h = torch.randn(290, 64, device=DEVICE), torch.randn(3, 64, device=DEVICE)
    layout = Layout(torch.randperm(290), 40, 50, 290)
    made = FusedHead(weight, layout, 3)
    chosen = torch.tensor([0, 1, 2], device=DEVICE)
    made(h, chosen)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = made(h, chosen)
    chosen.copy_(torch.tensor([1, 4, -1]))
    graph.replay()
    right = expected(weight.cpu(), h.cpu(), layout, [1, 4])
    torch.testing.assert_close(spread(scores, 290), right, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles_for_cuda_without_one(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from quickbeam.drafters.shortlist.fused import block_logits

    tile = {"N": 16, "S": 64, "D": 64}
    signature = dict.fromkeys(block_logits.arg_names, "i32") | {"chosen": "*i64"}
    signature |= dict.fromkeys(tile, "constexpr")
    signature |= dict.fromkeys(("h", "weight", "out"), f"*{dtype}")
    source = ASTSource(block_logits, signature, tile)
    gpu, options = GPUTarget("cuda", 80, 32), {"enable_fp_fusion": True}
    made = triton.compile(source, target=gpu, options=options)
    assert "mma" in made.asm["ptx"] or dtype == "fp32"
