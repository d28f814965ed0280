"""The head on parts of the vocabulary: each way gives the logits of the rows asked for.

pytest tests/test_shortlist_head.py
"""

from __future__ import annotations

import logging
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import examples
from quickbeam.drafters.shortlist import head
from quickbeam.drafters.shortlist.head import BlockHead, Scores
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.errors import InvalidInput


def spread(scores: Scores, vocab: int) -> torch.Tensor:
    """`[n, vocab]` logits by token, -inf where it has no column; fails where a token has two that
    count."""
    out = torch.full((len(scores.logits), vocab), -torch.inf)
    finite = scores.logits > -torch.inf
    assert bool((finite == finite[:1]).all())
    tokens = scores.tokens[finite[0]]
    assert len(tokens.unique()) == len(tokens)
    out[:, tokens] = scores.logits[:, finite[0]].float().cpu()
    return out


def expected(
    weight: torch.Tensor, h: torch.Tensor, layout: Layout, clusters: list[int]
) -> torch.Tensor:
    out = torch.full((len(h), layout.vocab), -torch.inf)
    for token in [
        *layout.order[: layout.frequent].tolist(),
        *(t for c in clusters for t in layout.tokens(c).tolist()),
    ]:
        out[:, token] = h.float() @ weight[token].float()
    return out


@st.composite
def heads(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor, Layout, list[int]]:
    vocab, size, d, n = (
        draw(st.integers(1, 90)),
        draw(st.integers(1, 20)),
        draw(st.integers(1, 40)),
        draw(st.integers(1, 5)),
    )
    torch.manual_seed(draw(st.integers(0, 99)))
    order = torch.randperm(vocab)[: draw(st.integers(0, vocab))]
    layout = Layout(order, draw(st.integers(0, len(order))), size, vocab)
    clusters = (
        sorted(draw(st.sets(st.sampled_from(range(layout.clusters))))) if layout.clusters else []
    )
    return torch.randn(vocab, d), torch.randn(n, d), layout, clusters


@examples(60, derandomize=True)
@given(heads())
def test_a_head_scores_the_frequent_block_and_the_chosen_clusters(case: tuple) -> None:
    weight, h, layout, clusters = case
    before = weight.clone()
    scores = BlockHead(weight, layout, backend="plain")(
        h, torch.tensor(clusters, dtype=torch.int64)
    )
    torch.testing.assert_close(
        spread(scores, layout.vocab), expected(weight, h, layout, clusters), rtol=1e-4, atol=1e-5
    )
    assert (
        scores.logits.shape == (len(h), len(scores.tokens)) and scores.tokens.dtype is torch.int64
    )
    assert torch.equal(weight, before)


def test_padding_behind_the_clusters_counts_for_nothing() -> None:
    torch.manual_seed(0)
    weight, h, layout = (
        torch.randn(60, 8),
        torch.randn(2, 8),
        Layout(torch.randperm(60), 10, 20, 60),
    )
    made = BlockHead(weight, layout, backend="plain")
    bare, padded = made(h, torch.tensor([1])), made(h, torch.tensor([1, -1, -1]))
    assert torch.equal(spread(bare, 60), spread(padded, 60))


def test_a_head_is_made_for_so_many_clusters() -> None:
    weight, layout = torch.randn(60, 8), Layout(torch.randperm(60), 10, 20, 60)
    made = BlockHead(weight, layout, most=2)
    assert BlockHead(weight, layout).most == 3 and made.most == 2
    made(weight[:1], torch.tensor([0, 2]))
    with pytest.raises(ValueError, match="3 clusters: this head was made for 2"):
        made(weight[:1], torch.tensor([0, 1, 2]))


def test_a_cpu_takes_the_plain_head_and_others_are_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weight, layout = torch.randn(60, 8), Layout(torch.randperm(60), 10, 20, 60)
    assert BlockHead(weight, layout).backend == "plain"
    with pytest.raises(InvalidInput, match=r"unknown backend 'fast'.*plain, native, triton"):
        BlockHead(weight, layout, backend="fast")
    with pytest.raises(InvalidInput, match=r"\[60, d\]"):
        BlockHead(weight[:59], layout)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(head.importlib.util, "find_spec", lambda name: object())
    with pytest.raises(InvalidInput, match="'triton' needs CUDA"):
        BlockHead(weight, layout, backend="triton")


def test_without_triton_cuda_falls_back_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(head.importlib.util, "find_spec", lambda name: None)
    with caplog.at_level(logging.INFO, logger=head.__name__):
        assert head._choose(None, "cuda") == "plain"
    assert "triton" in caplog.text
    with pytest.raises(InvalidInput, match="needs the package triton"):
        head._choose("triton", "cuda")
    monkeypatch.setattr(head.importlib.util, "find_spec", lambda name: object())
    assert head._choose(None, "cuda") == "triton" and head._choose(None, "mps") == "plain"


def test_triton_is_not_imported_where_it_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)  # an import would fail
    for backend in ("plain", None):
        BlockHead(torch.randn(6, 8), Layout(torch.arange(6), 2, 2, 6), backend=backend)(
            torch.randn(1, 8), torch.tensor([1])
        )
