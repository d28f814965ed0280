"""A feature drafter at work: its distributions are those of its equations run plainly, whatever
was grown, accepted and begun anew."""

from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cases import before, examples, refuses
from features import KINDS, RANDOM, WIDE, Pair, head_of, page_size, random_requests, words
from models import VOCAB, tiny
from quickbeam.drafters import feature, unrolled
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.unrolled import UnrolledAttention, unroll
from quickbeam.models.opening import make_model
from quickbeam.train.shards import ConversationTokens, collate
from quickbeam.tree import TokenTree

pages = page_size(2)


@pytest.fixture(scope="module")
def pairs():
    return {kind: Pair(kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
@examples(15)
@given(rng=RANDOM, temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]))
def test_distributions_are_those_of_the_equations(pairs, kind, rng, temperature):
    ids = words(rng, rng.randint(2, 20))
    text = pairs[kind].begin(ids[:-1], ids[-1], temperature)
    for _ in range(5):
        for tree, ready in random_requests(rng, text.context.ids[-1], alone=True):
            if ready:
                text.check(tree, ready)
        path = tree.path(rng.randrange(len(tree)))
        text.go_on(tree, path, rng.choice([rng.randrange(VOCAB), *tree.children[path[-1]]]))
        if rng.random() < 0.3:  # another request
            size = rng.choice([2, 4, 6])
            chunks = rng.randint(0, text.shared(size))
            begun = text.context.ids[: chunks * size]
            other = text.follow([*begun, *words(rng, rng.randint(2, 6))], chunks, size)
            text.release()
            text = other


def counted(monkeypatch, chunk):
    """A pair that reads so many rows a pass, and the rows of each sequence in its passes."""
    pair, passes = Pair("attention"), list[list[int]]()
    count = lambda batch, *_: passes.append([part.rows for part in batch.parts])  # noqa: E731
    for name in ("run", "write_keys"):
        before(monkeypatch, pair.drafter.passes, name, count)
    monkeypatch.setattr(feature, "CHUNK", chunk)
    return pair, passes


def test_nothing_is_read_twice(monkeypatch):
    pair, passes = counted(monkeypatch, 5)
    prompt = list(range(10, 22))
    text, tree = pair.begin(prompt, 50), TokenTree(50)
    text.check(tree, [0])
    a, b = tree.add(0, 1, "x"), tree.add(0, 2, "x")
    text.check(tree, [a, b])
    assert [sum(rows) for rows in passes] == [5, 5, 2, 2]
    text.go_on(tree, [0, b], 7)
    # the draft's row is not the target's
    assert text.state.chunk_pages(0, 12) is not None and text.state.chunk_pages(0, 14) is None
    text.follow([*prompt, 50, 2, 7, 7, 8], 1, 12).check(TokenTree(8), [0])
    assert passes[4:] == [[5]]  # row 11 anew, then those of 50, 2, 7, 7
    text.follow([*prompt[:6], 3, 3, 4], 1, 6).check(TokenTree(4), [0])
    assert passes[5:] == [[3]]  # row 5 holds the embedding of the next token, which is another one
    text.check(TokenTree(7), [0])
    assert passes[6:] == [[2]]
    text.release()
    assert text.shared(2) == 0


def test_prompts_are_read_as_they_come(monkeypatch):
    """All but the last row, as distributions start from that one."""
    pair, passes = counted(monkeypatch, 8)
    texts = [pair.begin(list(range(n)), 50) for n in (3, 12, 1)]
    pair.drafter.read([text.state for text in texts], 3)
    assert passes == [[8], [3]] and [text.state.cache.length for text in texts] == [0, 11, 0]
    pair.drafter.read([text.state for text in texts])
    assert passes[2:] == [[2]] and [text.state.cache.length for text in texts] == [2, 11, 0]
    pair.drafter.read([text.state for text in texts])
    assert len(passes) == 3  # nothing is left
    for text in texts:
        text.check(TokenTree(50), [0])
    assert passes[3:] == [[1], [1], [1]]


@pytest.mark.parametrize("kind", ["attention", "own-head", "input", "ours"])
def test_training_unrolls_what_drafting_computes(kind, monkeypatch):
    """Pass k of training-time test at row i is the drafter's row k below the root i + 1."""
    monkeypatch.setattr(unrolled, "CPU_ROWS", 5)
    pair, depths = Pair(kind), 4
    ids = torch.randint(VOCAB, (12,), generator=torch.Generator().manual_seed(1)).tolist()
    hidden = torch.cat(pair.begin(ids, 0).hidden)
    tokens, answer = torch.tensor(ids).int(), torch.ones(12, dtype=torch.bool)
    batch = collate([ConversationTokens(tokens, answer, 1.0)])._replace(hidden=hidden[None])
    trained = [
        pair.network.head(pair.network.feature(out[0])).softmax(-1)
        for _, out in unroll(pair.network, batch.tokens, batch.hidden, depths)
    ]
    text = pair.begin(ids[:1], ids[1])
    named = pair.network.tokens if pair.config.own_head else slice(None)
    for i in range(10):
        tree = TokenTree(ids[i + 1])
        for depth in range(min(depths, 10 - i)):
            probs = text.distributions(tree, [depth])[0][named]
            torch.testing.assert_close(probs, trained[depth][i], atol=1e-5, rtol=1e-4)
            tree.add(depth, ids[i + depth + 2], "x")
        text.go_on(tree, [0], ids[i + 2])


@pytest.mark.parametrize("later", [None, [[7], [2]], [[8, 0, 3, 5, 6], [1, 9, 4, 2, 3]]])
@pytest.mark.parametrize("window", [None, 1, 3, 6])
@pytest.mark.parametrize("rows", [4, 64])
def test_a_row_sees_the_first_pass_up_to_it_and_of_later_passes_itself(
    later, window, rows, monkeypatch
):
    """Of its text with its drafts, the last `window` positions, in outputs and gradients.

    `later`: the rows that later passes have, by conversation.
    """
    monkeypatch.setattr(unrolled, "CPU_ROWS", rows)
    passes, b, n, heads, size = 3, 2, 10, 4, 8
    selected = torch.arange(n).expand(b, -1) if later is None else torch.tensor(later)
    attention = UnrolledAttention(window, selected)
    drawn = torch.randn(passes, 3, b, n, heads, size).requires_grad_()
    outputs, expected = list[torch.Tensor](), list[torch.Tensor]()
    for last in range(passes):
        of_pass = torch.arange(n).expand(b, -1) if last == 0 else selected
        q, k, v = drawn[last][:, torch.arange(b)[:, None], of_pass]
        outputs.append(attention(q, k[:, :, :2], v[:, :, :2]))
        wanted = torch.zeros_like(outputs[-1])
        for conversation, place in product(range(b), range(of_pass.shape[1])):
            row = int(of_pass[conversation, place])
            # the pass, and the row of it, of each position
            positions = [(0, i) for i in range(row + 1)]
            positions += [(number, row) for number in range(1, last + 1)]
            seen = positions[-window:] if window else positions
            for head in range(heads):
                keys, values = (
                    torch.stack(
                        [drawn[number, of, conversation, i, head // 2] for number, i in seen]
                    )
                    for of in (1, 2)
                )
                query = drawn[last, 0, conversation, row, head]
                weights = (keys @ query * size**-0.5).softmax(-1)
                columns = slice(head * size, (head + 1) * size)
                wanted[conversation, place, columns] = weights @ values
        expected.append(wanted)
    out, wanted = torch.cat(outputs, 1), torch.cat(expected, 1)
    torch.testing.assert_close(out, wanted)
    pull = torch.randn_like(out)
    gradients = [torch.autograd.grad((x * pull).sum(), drawn)[0] for x in (out, wanted)]
    torch.testing.assert_close(*gradients)


def test_nodes_are_asked_for_from_the_root_down_and_hidden_states_must_fit(pairs):
    text, tree = pairs["attention"].begin([1], 2), TokenTree(2)
    tree.add(tree.add(0, 5, "x"), 6, "x")
    refuses("ask for its root first", text.distributions, tree, [1], error=ValueError)
    probs = text.distributions(tree, [0])
    refuses("their parents first", text.distributions, tree, [2], error=ValueError)
    refuses("their parents first", text.distributions, tree, [1, 2], error=ValueError)
    refuses("alone", text.distributions, tree, [0, 1], error=ValueError)
    text.check(tree, [0])
    text.check(tree, [1])
    refuses("ask for its root first", text.distributions, TokenTree(2), [1], error=ValueError)
    again = text.distributions(TokenTree(2), [0])  # a second tree on the same text
    assert torch.equal(again, probs)
    text.context.extend([3])
    with pytest.raises(ValueError, match="hidden states of 0 tokens for 1 not read yet"):
        text.distributions(TokenTree(3), [0])


def test_bad_weights_propose_nothing_and_a_tiny_temperature_leaves_one_token(caplog):
    pair = Pair("attention")
    probs = pair.begin([1], 2, 1e-40).distributions(TokenTree(2), [0])[0]
    assert probs.max() == 1 and probs.count_nonzero() == 1 and not caplog.records
    pair.drafter.passes.layers.norm.weight.fill_(float("nan"))
    text, tree = pair.begin([1], 2), TokenTree(2)
    assert torch.equal(text.distributions(tree, [0]), torch.zeros(1, VOCAB))
    assert "not finite (NaN)" in caplog.text
    tree.add(0, 5, "x")
    assert torch.equal(text.distributions(tree, [1]), torch.zeros(1, VOCAB))


def test_bfloat16_does_not_round_the_rotary_angles():
    model = tiny("llama", torch.bfloat16)
    drafter = eagle_drafter(head_of(WIDE, model), make_model(model), None)
    angle = 3000 / 10000.0 ** (torch.arange(4) / 4)
    (angles,) = drafter.passes.layers.angles_at(torch.tensor(3000)).values()
    torch.testing.assert_close(angles, (angle.cos(), angle.sin()))
