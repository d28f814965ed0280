"""The block drafter: its network against the equations, its cache, answers, and what it drafts."""

import copy
import itertools
import math
import random
from dataclasses import replace
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from transformers import (
    AutoConfig,
)

from answers import answer
from cases import refuses, spread
from drafters import DRAFTED
from features import Pair, attended, held, normed, page_size, random_tree, rotated, rounds, words
from kernels import best_set, every_set, load
from models import VOCAB, spread_out, tiny
from quickbeam import LLM
from quickbeam.drafters.block import BlockDrafter, NativeBlocks, follow
from quickbeam.drafters.block_config import BlockConfig
from quickbeam.drafters.block_model import BlockNetwork
from quickbeam.drafters.passes import NativePasses, TorchPasses
from quickbeam.drafters.shortlist.layout import Layout
from quickbeam.drafters.shortlist.shortlist import Artefact, Shortlist
from quickbeam.methods.base import NoDraft
from quickbeam.models.native import library
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams

D, MASK = 32, 7
SELECTOR = ("predecessor_codebook", "successor_codebook", "hidden_projection")
SIZES = {"block_size": 4, "mask_token": MASK, "markov_rank": 6}
DSPARK = BlockConfig(D, 48, 4, 2, 8, 2, (1, 2), D, VOCAB, **SIZES)
KINDS = {
    "dspark": DSPARK,
    "dflash": replace(DSPARK, from_anchor=False, markov_rank=0, aux_layers=(2,)),
    "causal": replace(DSPARK, causal=True, markov_rank=0, aux_layers=(2, 2)),
    "confident": replace(DSPARK, confidence=True, block_size=3),
    "own head": replace(DSPARK, draft_vocab_size=60, confidence=True),
    "scaled": replace(DSPARK, embedding_scale=1.5, output_multiplier=0.625, softcap=3.0),
    "gemma": replace(DSPARK, gemma=True, embedding_scale=D**0.5, softcap=5.0),
    "gemma keys": replace(DSPARK, gemma=True, values_are_keys=True, markov_rank=0),
    "own mask": replace(DSPARK, own_mask=True, embedding_scale=1.5),
    "selector": replace(DSPARK, top_k=40),
    "dflash2": replace(DSPARK, from_anchor=False, top_k=40, conv_taps=2, conv_group=4),
    # one shorter than the block; one that is not causal
    "windows": replace(DSPARK, causal=None, windows=(3, None)),
    "wide windows": replace(DSPARK, windows=(4, 4), from_anchor=False, markov_rank=0),
}
pages = page_size(16)


class Toy(Pair):
    """A tiny target, and a block drafter with random weights. `native`: whether the kernels may run
    the drafter; `native_target`: the target. `more`: of `BlockDrafter`."""

    def __init__(self, config, dtype=torch.float32, native=True, native_target=True, **more):
        self.model = tiny("llama", seed=3).to(dtype).float()
        target = copy.deepcopy(self.model).to(dtype)
        self.target = make_model(target, native=native_target, chunk=6)
        torch.manual_seed(0)
        self.network = BlockNetwork(config, self.target.embedding, self.target.head)
        spread_out(self.network, 2, 0.3)
        self.network.requires_grad_(False)
        for name, weight in self.network.named_parameters():
            if "base_kernel" in name:
                weight.normal_(0, 0.7)
            elif "kernel_projection" in name or "successor" in name:  # added to others
                weight.mul_(0.1 if "successor" in name else 0.3)
        for name, scalar in self.network.named_buffers():
            if "scalar" in name:
                scalar.fill_(0.7)
            elif "mask" in name:
                scalar.normal_()
        if config.draft_vocab_size:
            listed = torch.randperm(VOCAB)[: config.draft_vocab_size].sort().values
            self.network.d2t.copy_(listed - torch.arange(len(listed)))
        more = {"within": math.inf, **more}
        kernels = library.kernels() if native else None
        self.config = config
        self.drafter = BlockDrafter(self.network, self.target, kernels, **more)

    @torch.no_grad()
    def expected(self, ids, tree, nodes, temperature=1.0):
        c, weight = self.config, {k: v.float() for k, v in self.network.state_dict().items()}

        def norm(name, x):
            return normed(weight[f"{name}.weight"], x, c.eps)

        anchor, size = len(ids) - 1, c.block_size
        taps = torch.cat(self.taps(ids[:-1], c.aux_layers), -1)
        context = norm("hidden_norm", taps @ weight["fc.weight"].T)
        x = self.model.get_input_embeddings()(torch.tensor([ids[-1], *[MASK] * (size - 1)]))
        if c.own_mask:
            x = torch.cat([x[:1], weight["mask_embedding"].expand(size - 1, -1)])
        x = x * c.embedding_scale

        def convolve(name, which, h, by):
            if not c.conv_taps:
                return h
            base = weight[f"{name}_conv.base_kernel"][which]
            shared = (by @ weight[f"{name}_conv.kernel_projection.weight"].T).view(size, 2, 2, -1)
            out = torch.zeros_like(h)
            for row, behind in itertools.product(range(size), range(c.conv_taps)):
                if behind <= row:
                    each = shared[row, which, behind].repeat_interleave(c.conv_group)
                    out[row] += (base[behind] + each) * h[row - behind]
            return out

        rows = torch.arange(anchor + size)
        for i in range(c.depth):
            name = f"layers.{i}.self_attn"

            def heads(part, x, name=name):
                return (x @ weight[f"{name}.{part}_proj.weight"].T).view(len(x), -1, c.head_dim)

            by = norm(f"layers.{i}.input_layernorm", x)
            h = convolve(f"layers.{i}.attention", 0, by, by)
            both = torch.cat([context, h])
            q = rotated(norm(f"{name}.q_norm", heads("q", h)), rows[anchor:])
            k = rotated(norm(f"{name}.k_norm", heads("k", both)), rows)
            behind = rows[anchor:, None] - rows  # positions that a key is behind a row
            window = c.windows[i] if c.windows else None
            seen = behind.abs() < (window or len(rows))
            if c.causal or (c.causal is None and window):
                seen &= behind >= 0
            v = heads("k" if c.values_are_keys else "v", both)
            if c.gemma:  # whose scores are not scaled
                q, v = q * c.head_dim**0.5, normed(None, v, c.eps)
            out = attended(q, k, v, seen) @ weight[f"{name}.o_proj.weight"].T
            if c.gemma:
                out = norm(f"layers.{i}.post_attention_layernorm", out)
            x, mlp = x + convolve(f"layers.{i}.attention", 1, out, by), f"layers.{i}.mlp"
            by = norm(
                f"layers.{i}.{'pre_feedforward' if c.gemma else 'post_attention'}_layernorm", x
            )
            h = convolve(mlp, 0, by, by)
            gate, up = (h @ weight[f"{mlp}.{part}_proj.weight"].T for part in ("gate", "up"))
            gate = F.gelu(gate, approximate="tanh") if c.gemma else F.silu(gate)
            out = (gate * up) @ weight[f"{mlp}.down_proj.weight"].T
            if c.gemma:
                out = norm(f"layers.{i}.post_feedforward_layernorm", out)
            x = x + convolve(mlp, 1, out, by)
            x = x * weight.get(f"layers.{i}.layer_scalar", 1.0)
        own_head, tokens = weight.get("lm_head.weight"), self.network.tokens
        head = self.model.get_output_embeddings().weight if own_head is None else own_head
        x, probs = norm("norm", x), torch.zeros(len(nodes), VOCAB)
        u = x @ head.T * c.output_multiplier
        u = (u / c.softcap).tanh() * c.softcap if c.softcap else u
        for row, node in enumerate(nodes):
            k = tree.depth[node] + (not c.from_anchor)
            if k < size:
                z = u[k]
                if c.top_k:
                    of = {one: weight[f"candidate_selector.{one}.weight"] for one in SELECTOR}
                    e = of["predecessor_codebook"][tree.token[node]]
                    e = e * (of["hidden_projection"] @ x[k])
                    z = z + of["successor_codebook"] @ e
                    z = z.masked_fill(u[k] < u[k].topk(c.top_k).values[-1], -math.inf)
                elif c.markov_rank:
                    e = weight["markov_head.markov_w1.weight"][tree.token[node]]
                    z = z + weight["markov_head.markov_w2.weight"] @ e
                probs[row, slice(None) if tokens is None else tokens] = (z / temperature).softmax(
                    -1
                )
        return probs


def among(probs, kept):
    """The distributions of the tokens that are kept, which sum to 1 or are 0."""
    probs = probs * kept
    return probs / probs.sum(-1, keepdim=True).clamp(min=1e-9)


@pytest.fixture(scope="module")
def toys():
    return {kind: Toy(config) for kind, config in KINDS.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_are_those_of_the_equations(toys, kind):
    assert max(toys[kind].distances((8, 1), 4)) < 1e-4


@pytest.mark.parametrize(("kind", "name"), spread(list(KINDS), list(DRAFTED)))
def test_answers_are_plain_decodings(toys, kind, name):
    toy, rng = toys[kind], random.Random(f"{name} {kind}")
    for temperature, budget in ((0.0, 2), (0.0, 9), (0.8, 9)):
        prompt = words(rng, rng.randint(1, 12))
        given = dict(temperature=temperature, seed=rng.randrange(99), ignore_eos=True)
        params = SamplingParams(max_tokens=25, **given)
        with held(toy.drafter, toy.expected):
            drafted = answer(toy.target, DRAFTED[name](toy.drafter), params, prompt, budget=budget)
        plain = answer(toy.target, NoDraft(), params, prompt)
        assert drafted.output.token_ids == plain.output.token_ids
        assert drafted.statistics.drafter_calls > 0


@pytest.mark.parametrize("kind", KINDS)
def test_one_call_serves_many_sequences(toys, kind):
    toy, rng = toys[kind], random.Random(kind)
    texts = [
        toy.begin(words(rng, length), rng.randrange(VOCAB), rng.choice([0.0, 0.7]))
        for length in (2, 8, 16)
    ]
    trees = [random_tree(rng, text.context.ids[-1], 9) for text in texts]
    texts[0].check(trees[0], [0])
    asked = zip(texts, trees, (range(1, 9), range(9), [0]), strict=True)
    with held(toy.drafter, toy.expected):
        toy.drafter.answer([text.request(tree, nodes) for text, tree, nodes in asked])


def test_what_another_sequence_read_is_taken_over(toys):
    toy, rng = toys["dspark"], random.Random(1)
    ids = words(rng, 41)
    text = toy.begin(ids[:-1], ids[-1])
    hidden, tree = torch.cat(text.hidden), random_tree(rng, ids[-1], 8)
    first, second = toy.drafter.begin(ids), toy.drafter.begin(ids)
    first.append_hidden(hidden[:30])
    toy.drafter.read([first])
    assert first.cache.length == 30 and first.waiting == 0 and first.chunk_pages(2, 16) is None
    first.append_hidden(hidden[30:36])
    assert first.unread_hidden(5, 6).equal(hidden[30:36]) and first.unread_hidden(6, 6) is None
    second.attach([first.chunk_pages(0, 16)], 16, [hidden[15:16], hidden[16:32]])
    assert second.cache.length == 16 and second.waiting == 16
    second.append_hidden(hidden[32:])
    text.context.states["drafter"] = second
    text.check(tree, list(range(8)))
    used = toy.drafter.pool.used
    for state in (first, second):
        state.release()
    assert toy.drafter.pool.used < used or used == 0
    text.context.states["drafter"] = toy.drafter.begin(ids)
    refuses("hidden states of 0 tokens for 40", text.distributions, tree, [0], error=ValueError)


def test_scores_of_few_candidates_are_the_equations_among_them():
    toy, rng, few = Toy(KINDS["confident"], within=1.0), random.Random(2), 0
    ids = words(rng, 9)
    text, tree = toy.begin(ids[:-1], ids[-1]), random_tree(rng, ids[-1], 9)
    for nodes in rounds(tree):
        probs = toy.drafter.answer([text.request(tree, nodes)])[0]
        kept = probs.dense() > 0
        few = max(few, int(kept.sum(-1).max()))
        expected = among(toy.expected(ids, tree, nodes), kept)
        torch.testing.assert_close(probs.dense(), expected, atol=1e-5, rtol=1e-3)
        assert [0 < sure < 1 for sure in probs.confidence] == [True] * len(nodes)
    assert 0 < few < VOCAB
    near = Toy(KINDS["dflash"], within=1.0)  # the likeliest are among them
    probs = near.begin(ids[:-1], ids[-1]).distributions(tree, [0])[0]
    expected = near.expected(ids, tree, [0])[0]
    assert bool((probs[expected > expected.max() / math.e + 1e-6] > 0).all())
    assert 0 < int((probs > 0).sum()) < VOCAB


@pytest.mark.parametrize("kind", ["confident", "selector", "scaled"])
def test_the_blocks_of_a_call_have_candidates_of_their_own(kind):
    toy, rng = Toy(KINDS[kind], within=1.0), random.Random(kind)
    texts = [toy.begin(words(rng, length), rng.randrange(VOCAB)) for length in (2, 8, 16)]
    trees = [random_tree(rng, text.context.ids[-1], 9) for text in texts]
    requests = [text.request(tree, range(9)) for text, tree in zip(texts, trees, strict=True)]
    together = toy.drafter.answer(requests)
    supports = set()
    for request, probs in zip(requests, together, strict=True):
        (alone,) = toy.drafter.answer([request])
        assert torch.equal(probs.dense() > 0, alone.dense() > 0)
        torch.testing.assert_close(probs.dense(), alone.dense(), atol=1e-5, rtol=1e-3)
        supports.add(tuple((alone.dense() > 0).any(0).tolist()))
    assert len(supports) == len(texts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shortlist_is_scored_once_a_tree(dtype):
    toy, rng = Toy(DSPARK, dtype=dtype), random.Random(2)
    ids = words(rng, 20)
    tree, layout = random_tree(rng, ids[-1], 9), Layout.by_frequency(torch.arange(VOCAB), 30, VOCAB)
    weight = toy.model.get_output_embeddings().weight.detach().to(dtype)
    both, held = list[torch.Tensor](), torch.tensor([t < 30 or t in ids for t in range(VOCAB)])
    for shortlist in (None, Shortlist(weight, layout, library.kernels(), window=50)):
        text = toy.begin(ids[:-1], ids[-1], shortlist=shortlist)
        both.append(torch.cat([text.distributions(tree, nodes) for nodes in rounds(tree)]))
        assert text.state.used.calls == 1
    whole, part = both
    offered = part.sum(0) > 0  # and the last logits' favourites, which are all equal here
    assert bool(offered[held].all()) and 30 < int(offered.sum()) < VOCAB
    torch.testing.assert_close(part, among(whole, offered), atol=1e-4, rtol=1e-2)
    assert text.state.used.tokens == int(offered.sum())


def candidates(logits, names, within):
    """The columns that are likely in some row, and their tokens."""
    floors = logits.amax(-1, keepdim=True) - within
    columns = (~(logits < floors)).any(0).nonzero()[:, 0]
    return logits[:, columns], columns if names is None else names[columns]


@every_set
@pytest.mark.parametrize("rank", [0, 6, 64])
def test_the_kernels_find_candidates_and_what_follows_them_as_pytorch_does(isa, rank):
    config = replace(DSPARK, markov_rank=rank)
    network = Toy(config, dtype=torch.bfloat16, native=False).network
    before, after = network.markov()
    passes = SimpleNamespace(pool=SimpleNamespace(kernels=load(isa)))
    wide = 4 * torch.randn(4, VOCAB + 20, generator=torch.Generator().manual_seed(rank))
    for count, names in ((VOCAB, None), (VOCAB - 3, torch.randperm(VOCAB)[:-3]), (5, None)):
        for within in (2.0, 7.0, math.inf):
            native = NativeBlocks(network, passes, within, None)
            logits = wide[:, 3 : count + 3]  # rows that don't lie side by side
            scores, tokens = candidates(logits, names, within)
            assert all(map(torch.equal, native.likely(logits, names), (scores, tokens)))
            state = SimpleNamespace(gates=None, scores=scores, tokens=tokens)
            places = [(0, 5), (3, VOCAB - 1), (3, 0)]
            depths, previous = torch.tensor(places).unbind(-1)
            right = follow(scores[depths], before[previous], after[tokens].float(), None)
            torch.testing.assert_close(native.follow(state, places), right, atol=1e-5, rtol=1e-5)
    wide[1, 17] = math.nan  # shows in its row, whatever the others'
    kept, tokens = NativeBlocks(network, passes, 0.0, None).likely(wide, None)
    assert kept[1, tokens.tolist().index(17)].isnan() and 4 <= len(tokens) < 20


@best_set
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernels_are_as_near_to_the_equations_as_pytorchs_operators(isa, kind):
    load(isa)
    config, half = KINDS[kind], torch.bfloat16
    plain = Toy(config, dtype=half, native=False)
    assert isinstance(plain.drafter.passes, TorchPasses)
    usual = mean(plain.distances())
    for weights, more in ((BFLOAT16, 1e-3), (None, 0.02)):  # 8 bits add little
        toy = Toy(config, dtype=half, weights=weights)
        assert isinstance(toy.drafter.passes, NativePasses)
        assert mean(toy.distances()) <= 1.25 * usual + more
    weight = toy.network.layers[1].self_attn["o_proj"].weight
    weight.copy_(weight.flip(0).clone())
    assert mean(toy.distances()) > 3 * usual  # another network is seen


@best_set
@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_the_same_with_both_and_calls_together_with_calls_alone(isa, kind):
    load(isa)
    rng, answers = random.Random(kind), list[list[int]]()
    prompt = words(rng, 9)
    params = SamplingParams(max_tokens=25, temperature=0.7, seed=1, ignore_eos=True)
    for native in (False, True):
        toy = Toy(KINDS[kind], dtype=torch.bfloat16, native=native)
        for method in (DRAFTED["dyspec"](toy.drafter), NoDraft()):
            answers.append(answer(toy.target, method, params, prompt, budget=9).output.token_ids)
    assert answers[0] == answers[1] == answers[2] == answers[3]
    calls, alone = [], []
    for length in (3, 9, 70):
        ids = words(rng, length)
        tree = random_tree(rng, ids[-1], 9)
        for of in (calls, alone):
            of.append(toy.begin(ids[:-1], ids[-1]).request(tree, range(9)))
    for one, probs in zip(alone, toy.drafter.answer(calls), strict=True):
        assert torch.equal(toy.drafter.answer([one])[0].dense(), probs.dense())


@pytest.mark.parametrize(
    ("method", "dtype"), [("dyspec", "float32"), ("auto", "float32"), ("auto", "bfloat16")]
)
def test_a_folder_drafts_for_a_model(toy_folder, tmp_path, method, dtype):
    config = AutoConfig.from_pretrained(toy_folder)
    size, vocab, count = config.hidden_size, config.vocab_size, config.num_hidden_layers
    block = replace(
        DSPARK, hidden_size=size, target_size=size, vocab_size=vocab, aux_layers=(1, count)
    )
    block = replace(block, causal=None, windows=(5, None))
    torch.manual_seed(0)
    BlockNetwork(block).save(tmp_path)
    order = torch.randperm(vocab)  # as training leaves it beside the drafter; `auto` takes it
    Artefact(Layout(order, vocab, 1, vocab), order).save(tmp_path)
    with LLM(toy_folder, method, dtype=dtype, drafter=str(tmp_path), budget=6) as llm:
        for temperature in (0.0, 0.8):
            params = SamplingParams(max_tokens=20, temperature=temperature, seed=1, ignore_eos=True)
            given = llm.generate(["abc", "some words"], params)
            plain = llm.generate(["abc", "some words"], params, method="ar")
            assert [one.token_ids for one in given] == [one.token_ids for one in plain]
            assert any(one.statistics.sources["drafter"].drafted for one in given)
            head = given[0].statistics.head
            assert head is not None and (head.tokens < head.calls * vocab / 2) is (method == "auto")
