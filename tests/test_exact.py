"""Bit-identity: in bfloat16 on a CPU, a tree's logits are those of one token at a time, to the last
bit.

pytest tests/test_exact.py
"""

from __future__ import annotations

import pytest
import torch

from cases import few
from models import CONFIGS, VOCAB, tiny
from quickbeam.errors import InvalidInput
from quickbeam.models import attention, bit_exact
from quickbeam.models.attention import SPLIT
from quickbeam.models.bit_exact import attention_is_order_free, examine, rows_alike
from quickbeam.models.kv_cache import LayerShape
from quickbeam.models.kv_store import KVPool
from quickbeam.models.linear import WIDEST, FastLinear
from quickbeam.models.loading import load_model
from quickbeam.models.model import EXACT_NODES, Model
from quickbeam.models.target import Target
from quickbeam.tree import TokenTree

# What attention may look like; the other layouts differ in what is around it.
ATTENTIONS = [
    "llama",
    "mistral-window",
    "qwen3",
    "qwen2-window",
    "gemma2-softcap-window",
    "gemma3-window",
    "gpt-neox",
    "gpt2",
]
in_order = attention_is_order_free(64)
pytestmark = pytest.mark.skipif(
    not in_order and not attention_is_order_free(64, wide=True),
    reason="this machine's bfloat16 kernels give different bits; quickbeam says so and doesn't "
    "promise it",
)


def one_at_a_time(target: Target, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """`[len(tokens), vocab]` logits after each of `tokens`, verified alone."""
    target.reset()
    target.prefill(prompt)
    rows = []
    for token in tokens:
        tree = TokenTree(token)
        rows.append(target.verify(tree)[0].clone())
        target.commit(tree, [0])
    return torch.stack(rows)


def rows_that_differ(
    target: Target, prompt: list[int], tokens: list[int], expected: torch.Tensor, seed: int
) -> int:
    """Verify `tokens` in trees where each has random siblings stored before and after it, nephews
    included; count rows with other bits."""
    generator = torch.Generator().manual_seed(seed)

    def below(high: int) -> int:
        return int(torch.randint(high, (1,), generator=generator))

    target.reset()
    target.prefill(prompt)
    done = wrong = 0
    while done < len(tokens):
        tree, path = TokenTree(tokens[done]), [0]
        deepest, most = min(below(9), target.depth_limit(), len(tokens) - done - 1), below(40)
        for token in tokens[done + 1 : done + 1 + deepest]:
            parent = path[-1]
            for _ in range(below(4) if len(tree) < most else 0):
                other = below(VOCAB)
                if other != token and tree.child(parent, other) is None:
                    tree.add(tree.add(parent, other, "noise"), below(VOCAB), "noise")
            path.append(tree.add(parent, token, "text"))
        logits = target.verify(tree)
        wrong += sum(
            not torch.equal(logits[node], expected[done + i]) for i, node in enumerate(path)
        )
        target.commit(tree, path)
        done += len(path)
    return wrong


@pytest.mark.parametrize("way", ["eager", "auto"])
@pytest.mark.parametrize("name", few([name for name in CONFIGS if "sinks" not in name], ATTENTIONS))
def test_every_layout_gives_the_same_bits_across_a_cut(
    name: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUICKBEAM_KERNELS", way)
    target = Target(tiny(name, torch.bfloat16, wide=True), exact=True)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (SPLIT + 60,), generator=generator).tolist()
    prompt, tokens = ids[: SPLIT - 30], ids[SPLIT - 30 :]
    expected = one_at_a_time(target, prompt, tokens)
    assert [rows_that_differ(target, prompt, tokens, expected, seed) for seed in range(3)] == [
        0,
        0,
        0,
    ]


@pytest.mark.parametrize(
    ("begins", "count", "seeds"),
    [
        ((SPLIT - 10,), 20, 1),
        pytest.param((37, 2 * SPLIT - 20, 1100), 40, 3, marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("way", ["eager", "auto"])
def test_the_embedded_model_gives_the_same_bits(
    smollm2,
    way: str,
    begins: tuple[int, ...],
    count: int,
    seeds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("QUICKBEAM_KERNELS", way)
    model, tokenizer = load_model(str(smollm2), torch.bfloat16, torch.device("cpu"))
    target = Target(model, exact=True)
    text = (
        "In the beginning there was a small model that answered slowly, so its friends drafted "
        "ahead and it only had to agree. "
    ) * 50
    ids = tokenizer(text)["input_ids"]
    for begin in begins:
        prompt, tokens = ids[:begin], ids[begin : begin + count]
        expected = one_at_a_time(target, prompt, tokens)
        assert [
            rows_that_differ(target, prompt, tokens, expected, seed) for seed in range(seeds)
        ] == [0] * seeds


def test_the_usual_attention_does_not_keep_the_bits(
    smollm2, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the exact path is for: the same comparison without it sees differences."""
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    model, _ = load_model(str(smollm2), torch.bfloat16, torch.device("cpu"))
    target = Target(model, exact=False)
    ids = torch.randint(VOCAB, (1116,), generator=torch.Generator().manual_seed(0)).tolist()
    expected = one_at_a_time(target, ids[:1100], ids[1100:])
    assert any(
        rows_that_differ(target, ids[:1100], ids[1100:], expected, seed) for seed in range(3)
    )


def test_sums_in_float64_have_no_order() -> None:
    """The way of machines whose kernels don't add in order, on any machine."""
    assert attention_is_order_free(64, wide=True) and attention_is_order_free(32, wide=True)


@pytest.mark.skipif(not in_order, reason="this machine's bfloat16 kernels don't add in order")
def test_the_probe_sees_an_attention_that_depends_on_storage(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tokens stored in their plain order, or sums cut by the kernels: neither may pass the
    probe."""

    def in_plain_order(*args, **kwargs):
        return KVPool(*args, **{**kwargs, "pairwise": False})

    with monkeypatch.context() as patch:
        patch.setattr(bit_exact, "KVPool", in_plain_order)
        assert not attention_is_order_free.__wrapped__(64)
    monkeypatch.setattr(attention, "SPLIT", 1 << 20)
    assert not attention_is_order_free.__wrapped__(64)


def compute_otherwise(monkeypatch: pytest.MonkeyPatch, from_rows: int, upto_rows: int) -> None:
    """Make linear products compute something else for some numbers of rows, whether or not this
    machine packs them."""

    def otherwise(inner):
        def product(self, x: torch.Tensor) -> torch.Tensor:
            return inner(self, x) + float(from_rows <= x.numel() // self.in_features <= upto_rows)

        return product

    for kind, name in ((FastLinear, "_product"), (torch.nn.Linear, "forward")):
        monkeypatch.setattr(kind, name, otherwise(getattr(kind, name)))


@pytest.mark.parametrize(
    ("rows", "least", "most"),
    [
        ((0, 0), 1, WIDEST),
        ((1, 1), 2, WIDEST),
        ((8, 16), 0, 0),
        ((33, 128), 1, 32),
        ((20, 128), 1, 16),
    ],
)
def test_products_whose_rows_depend_on_their_number_are_seen(
    rows, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute_otherwise(monkeypatch, *rows)
    monkeypatch.setattr(bit_exact, "rows_alike", rows_alike.__wrapped__)
    linear = FastLinear(torch.nn.Linear(64, 32, dtype=torch.bfloat16))
    promise = examine([LayerShape(2, 64, 64)], [linear])
    assert promise.broken == (() if least else ("products of 64 inputs and 32 outputs",))
    if not least:
        return
    x = torch.randn(WIDEST, 64).bfloat16()
    pairs = torch.cat([linear(x[i : i + 2]) for i in range(0, WIDEST, 2)])
    widths = [n for n in (1, 2, 15, 17, 33, 50, 64, 127, WIDEST) if n <= 64 or most < WIDEST]
    assert all(
        torch.equal(linear(x[:n]), pairs[:n]) and torch.equal(linear(x[None, :n]), pairs[None, :n])
        for n in widths
    )
    assert linear.min_rows == least and linear.max_rows <= most


def test_products_that_are_not_known_break_the_promise() -> None:
    experts = torch.nn.Module()
    experts.weight = torch.nn.Parameter(torch.zeros(2, 3, 4))
    assert examine([], [experts]).broken == (
        "the experts of Module (a row's bits depend on how many rows an expert gets)",
    )


def test_trees_too_wide_for_the_promise_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKBEAM_KERNELS", "eager")
    target = Target(tiny("llama", torch.bfloat16, wide=True), exact=True)
    target.prefill([1, 2, 3])
    tree = TokenTree(0)
    for node in range(EXACT_NODES):
        tree.add(node, 1, "long")
    with pytest.raises(InvalidInput, match=f"at most {EXACT_NODES}"):
        target.verify(tree)


def test_the_probe_sees_rows_whose_bits_change() -> None:
    class Wrong:
        """A model that gives other bits where a pass has many rows."""

        def __init__(self, model):
            self.model = model

        def __getattr__(self, name):
            return getattr(self.model, name)

        def forward(self, batch):
            passed = self.model.forward(batch)
            return [
                one._replace(
                    logits=one.logits
                    + (one.logits.abs().max() / 64 if one.logits.shape[0] > 40 else 0)
                )
                for one in passed
            ]

    model = Model(tiny("llama", torch.bfloat16, wide=True), exact=True)
    for nodes in (4, 64):
        assert bit_exact.same_bits(model, nodes=nodes)
        assert bit_exact.same_bits(Wrong(model), nodes=nodes) == (nodes == 4)
