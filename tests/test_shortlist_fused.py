"""The Triton kernel of selected rows against the reference: on CUDA where there is one, in Triton's
interpreter (a process of its own) otherwise."""

import os
import sys

import pytest
import torch

from cases import refuses
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.router import Router, RouterConfig
from quickbeam.drafters.shortlist.shortlist import Shortlist
from quickbeam.drafters.shortlist.torch_head import product_on, selected_product
from scripts import captured
from test_shortlist import spread

triton = pytest.importorskip("triton")
fused = pytest.importorskip("quickbeam.drafters.shortlist.fused")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CUDA = torch.cuda.is_available() and not INTERPRETED
DEVICE = torch.device("cuda" if CUDA else "cpu")
runs_kernels = pytest.mark.skipif(
    not (INTERPRETED or CUDA), reason="needs CUDA; see the test with the interpreter"
)


@pytest.mark.skipif(INTERPRETED, reason="is in it already")
def test_all_of_this_holds_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    kept = {name: value for name, value in os.environ.items() if "PYTEST_XDIST" not in name}
    done = captured(command, env=kept | {"TRITON_INTERPRET": "1"})
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout + done.stderr


def drawn(n, d, vocab, count, sequences, dtype=torch.float32):
    """Rows, a head, and rows of it that are selected for each sequence, some of them none."""
    torch.manual_seed(0)
    h, weight = torch.randn(n, d).to(dtype), torch.randn(vocab, d).to(dtype)
    selected = torch.randint(-1, vocab, (sequences, count))
    selected[0, count // 2 :] = -1
    sequence = torch.randint(sequences, (n,))
    return [one.to(DEVICE) for one in (h, weight, selected, sequence)]


@runs_kernels
@pytest.mark.parametrize(
    ("n", "d", "vocab", "count", "sequences"),
    [
        (1, 64, 128, 64, 1),
        (3, 72, 290, 101, 2),  # columns that don't fill a tile, a tail of d
        (70, 16, 100, 150, 3),  # more rows than a tile
        (5, 33, 50, 7, 9),  # a sequence without rows
        (1, 1, 3, 1, 1),
    ],
)
def test_the_kernel_gives_what_the_reference_does(n, d, vocab, count, sequences):
    given = drawn(n, d, vocab, count, sequences)
    assert product_on(DEVICE) is fused.selected_product
    got = fused.selected_product(*given)
    torch.testing.assert_close(got, selected_product(*given), rtol=1e-4, atol=1e-4)
    h, weight, selected, sequence = given
    others = fused.selected_product(h, weight, selected, (sequence + 1) % sequences)
    assert sequences == 1 or not torch.allclose(got, others)  # another sequence's rows are seen


@runs_kernels
def test_a_shortlist_takes_it_by_itself_and_puts_the_frequent_tokens_beside():
    torch.manual_seed(0)
    weight, h = torch.randn(290, 24, device=DEVICE), torch.randn(3, 24, device=DEVICE)
    layout = Layout(torch.randperm(290), 40, 50, 290)
    router = Router(RouterConfig(2, 2, 2, layout.clusters))
    shared = Shortlist(weight, layout, None, router=router, chosen=2, window=9)
    one, three = (layout.scored(torch.tensor([i]))[layout.frequent :].tolist() for i in (1, 3))
    ids = [*one[:2], *three[:3], int(layout.order[0])]
    state = shared.begin(ids)
    scores = state.score(h, torch.tensor([1, 4], device=DEVICE))
    right = torch.full((3, 290), -torch.inf)
    for token in [*layout.scored(torch.tensor([1, 4])).tolist(), *ids]:
        right[:, token] = h.cpu() @ weight[token].cpu()
    torch.testing.assert_close(spread(scores, 290), right, rtol=1e-4, atol=1e-4)
    assert state.scored == int((right[0] > -torch.inf).sum())


@runs_kernels
def test_a_strided_input_and_no_rows_are_fine():
    h, weight, selected, sequence = drawn(4, 16, 60, 20, 2)
    strided, plain = h[::2, ::2], h[::2, ::2].contiguous()
    given = weight[:, :8].contiguous(), selected, sequence[::2]
    both = [fused.selected_product(rows, *given) for rows in (strided, plain)]
    assert torch.equal(*both)
    assert fused.selected_product(h[:0], weight, selected, sequence[:0]).shape == (0, 20)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_summed_in_single(dtype):
    given = drawn(3, 512, 60, 30, 2, dtype)
    if dtype is torch.bfloat16 and not CUDA:
        refuses("bfloat16", fused.selected_product, *given)
        return
    logits = fused.selected_product(*given)
    assert logits.dtype is dtype
    h, weight, *more = given
    exact, eps = selected_product(h.float(), weight.float(), *more), torch.finfo(dtype).eps
    torch.testing.assert_close(logits.float(), exact.to(dtype).float(), rtol=eps, atol=1e-3)


@pytest.mark.skipif(not CUDA, reason="needs CUDA")
def test_a_captured_call_follows_what_it_is_given():
    given = drawn(3, 64, 290, 100, 2)
    fused.selected_product(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = fused.selected_product(*given)
    given[2].copy_(given[2].flip(0, 1))
    graph.replay()
    torch.testing.assert_close(logits, selected_product(*given), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(INTERPRETED, reason="nothing is compiled in the interpreter")
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_the_kernel_compiles_for_cuda_without_one(dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    tile = {"N": 16, "S": 64, "D": 64}
    signature = dict.fromkeys(fused.selected_logits.arg_names, "i32")
    signature |= dict.fromkeys(("selected", "sequence"), "*i64") | dict.fromkeys(tile, "constexpr")
    signature |= dict.fromkeys(("h", "weight", "out"), f"*{dtype}")
    source = ASTSource(fused.selected_logits, signature, tile)
    gpu, options = GPUTarget("cuda", 80, 32), {"enable_fp_fusion": True}
    made = triton.compile(source, target=gpu, options=options)
    assert "mma" in made.asm["ptx"] or dtype == "fp32"
