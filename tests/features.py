"""A feature drafter at a tiny target, and the same two as they are written down."""

import contextlib
import copy
import itertools
import random
import types
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from models import VOCAB, spread_out, tiny
from quickbeam.drafters.base import Context, DraftRequest
from quickbeam.drafters.eagle import EagleState, eagle_drafter
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.models.native import library
from quickbeam.models.opening import make_model
from quickbeam.models.torch.pages import RowPool
from quickbeam.tree import TokenTree
from target import Target

WIDE = EagleConfig(32, 48, 4, 2, 8, layers=(1, 2, 4), target_size=32, vocab_size=VOCAB)
RANDOM = st.integers(0, 2**32).map(random.Random)
KINDS: dict[str, tuple[str, bool, EagleConfig]] = {  # of target, whether native, of drafter
    "attention": ("llama", True, WIDE),
    "own-head": (
        *("mistral-window", True),
        replace(WIDE, layers=(4, 1), draft_vocab_size=20, window=3),
    ),
    "input": ("llama", True, replace(WIDE, layers=(4,), join="input", final_norm=False)),
    "plain": ("gpt2", False, WIDE),
    "ours": ("llama", True, replace(WIDE, layers=(1, 3, 4), feature_norms=True)),
}


def head_of(config, model):
    """An untrained drafter that is sure of its wrong guesses."""
    torch.manual_seed(0)
    modules = model.get_input_embeddings(), model.get_output_embeddings()
    network = EagleHead(config, *modules).requires_grad_(False)
    # without norms outputs grow, and rounding with them
    spread_out(network, 3 if config.join == "attention" else 1.75, 0.3)
    if config.own_head:
        network.tokens.copy_(torch.randperm(VOCAB)[: config.draft_vocab_size])
    return network


def normed(weight, x, eps):
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def rotated(x, positions):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] / 10000.0 ** (torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def attended(query, key, value, visible=None):
    """`[n, heads * d]` of `[n, heads, d]` over `[m, kv_heads, d]`, which are `visible` `[n, m]`."""
    rows = (x.transpose(0, 1) for x in (query, key, value))
    out = F.scaled_dot_product_attention(*rows, attn_mask=visible, enable_gqa=True)
    return out.transpose(0, 1).flatten(1)


def causal(query, key, value, window=None):
    """The same of the last n of m rows, each of which sees the rows up to itself, or the last
    `window` of them."""
    n, m = len(query), len(key)
    visible = torch.ones(n, m, dtype=torch.bool).tril(m - n)
    visible = visible.triu(m - n + 1 - window) if window else visible
    return attended(query, key, value, visible)


class Pair:
    """A drafter at its target, and the same two as they are written down, in float32. `dtype`: of
    the drafter and its target, whose weights both pairs then have; `native`: None takes the
    kind's; `weights`: of the drafter."""

    def __init__(self, kind, dtype=torch.float32, native=None, weights=None):
        layout, usual, self.config = KINDS[kind]
        native = usual if native is None else native
        self.model = tiny(layout, seed=3).to(dtype).float()
        self.network = head_of(self.config, self.model).to(dtype).float()
        # pages of the kernels are longer than the beginnings that tests share in float32
        kernels = native and dtype is torch.bfloat16
        self.target = make_model(copy.deepcopy(self.model).to(dtype), native=kernels, chunk=6)
        network = EagleHead(self.config, self.target.embedding, self.target.head)
        network.load_state_dict(self.network.state_dict())
        self.drafter = eagle_drafter(
            network, self.target, library.kernels() if native else None, weights
        )

    @torch.inference_mode()
    def layer(self, hidden, tokens):
        c, n = self.config, len(hidden)
        weight = {name: value for name, value in self.network.named_parameters()}

        def norm(name, x):
            return normed(weight[f"{name}.weight"], x, c.eps)

        embedded = self.model.get_input_embeddings()(torch.tensor(list(tokens)))
        if c.join == "attention":
            x = torch.cat([norm("input_norm", embedded), norm("hidden_norm", hidden)], -1)
        else:
            x = hidden = torch.cat([embedded, hidden], -1) @ weight["fc.weight"].T
        sizes = [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim]
        parts = weight["qkv.weight"].split(sizes)
        q, k, v = ((x @ part.T).view(n, -1, c.head_dim) for part in parts)
        q, k = (rotated(x, torch.arange(n)) for x in (q, k))
        x = hidden + causal(q, k, v, c.window) @ weight["out.weight"].T
        gate, up = (norm("mlp_norm", x) @ weight["gate_up.weight"].T).chunk(2, -1)
        return x + (gate * gate.sigmoid() * up) @ weight["down.weight"].T

    @torch.inference_mode()
    def taps(self, ids, layers):
        """Hidden states `[n, d]` after each of these layers, of transformers' own pass."""
        asked = dict(output_hidden_states=True, use_cache=False)
        states = self.model(torch.tensor([ids]), **asked).hidden_states
        return [states[layer][0] for layer in layers]

    @torch.inference_mode()
    def expected(self, ids, tree, nodes, temperature):
        """The distributions after `nodes`, each path on its own."""
        # of 3 layers: what comes after the last is after the norm
        parts = self.taps(ids[:-1], [min(layer, 3) for layer in self.config.layers])
        if self.config.feature_norms:
            norms = self.network.feature_norms
            both = zip(norms, parts, strict=True)
            parts = [normed(norm.weight, part, self.config.eps) for norm, part in both]
        certain = torch.cat(parts, -1)
        if self.config.join == "attention":
            certain = certain @ self.network.fc.weight.T
        distributions = []
        for node in nodes:
            tokens, hidden = ids[1:], certain
            out = self.layer(hidden, tokens)
            for below in tree.path(node)[1:]:
                tokens, hidden = [*tokens, tree.token[below]], torch.cat([hidden, out[-1:]])
                out = self.layer(hidden, tokens)
            logits = self.network.head(self.network.feature(out[-1])) / temperature
            probs = torch.zeros(VOCAB)
            probs[self.network.tokens if self.config.own_head else slice(None)] = logits.softmax(-1)
            distributions.append(probs)
        return torch.stack(distributions)

    def distances(self, lengths=(1, 7, 30, 66), steps=3, vocab=VOCAB, compared=lambda *both: both):
        """Total variations from the equations, over trees in answers. `compared`: what counts."""
        rng, far = random.Random(5), []
        for length in lengths:
            text = self.begin([rng.randrange(vocab) for _ in range(length)], rng.randrange(vocab))
            for _ in range(steps):
                tree = random_tree(rng, text.context.ids[-1], 7, vocab)
                for nodes in rounds(tree):
                    right = self.expected(text.context.ids, tree, nodes, 1.0)
                    probs, right = compared(text.distributions(tree, nodes), right)
                    far += ((probs - right).abs().sum(-1) / 2).tolist()
                text.go_on(tree, tree.path(rng.randrange(len(tree))), rng.randrange(vocab))
            text.release()
        return far

    def begin(self, prompt, token, temperature=1.0, shortlist=None):
        text = Text(self, [*prompt, token], temperature, shortlist)
        text.read(prompt)
        return text


class Text:
    """A pair's sequence, whose last token is the next root. `hidden`: the states of all others."""

    def __init__(self, pair, ids, temperature, shortlist):
        self.pair, self.target = pair, Target(pair.target)
        self.context = context_of(ids, temperature)
        self.context.cache = self.target.store
        listed = None if shortlist is None else shortlist.begin(ids)
        self.state: EagleState = pair.drafter.begin(ids, listed)
        self.context.states[pair.drafter.name] = self.state
        self.hidden: list[torch.Tensor] = []

    def read(self, prompt, keep=0):
        self.target.prefill(prompt, keep)
        self._read_hidden()

    def _read_hidden(self):
        hidden = self.target.take_hidden()
        self.hidden += hidden.split(1)
        self.state.append_hidden(hidden)

    def request(self, tree, nodes):
        return DraftRequest(self.context, tree, nodes)

    def distributions(self, tree, nodes):
        """`[len(nodes), vocab]`, from a call for this text alone."""
        return self.pair.drafter.answer([self.request(tree, nodes)])[0].dense()

    def check(self, tree, nodes):
        probs, heat = self.distributions(tree, nodes), self.context.draft_temperature
        right = self.pair.expected(self.context.ids, tree, nodes, heat)
        torch.testing.assert_close(probs, right, atol=1e-5, rtol=1e-3)

    def go_on(self, tree, path, last):
        self.target.verify(tree)
        self.target.commit(tree, path)
        self._read_hidden()
        self.context.extend([*(tree.token[node] for node in path[1:]), last])

    def shared(self, tokens):
        chunk = 0
        while self.state.chunk_pages(chunk, tokens) is not None:
            chunk += 1
        return chunk

    def follow(self, ids, chunks, tokens):
        other, kept = Text(self.pair, ids, self.context.temperature, None), chunks * tokens
        if chunks:
            both = self.target.store, self.state
            shared = [[of.chunk_pages(chunk, tokens) for chunk in range(chunks)] for of in both]
            other.target.store.attach(shared[0], tokens)
            other.target.ids, other.hidden = ids[:kept], self.hidden[:kept]
            other.state.attach(shared[1], tokens, [self.hidden[kept - 1]])
        other.read(ids[:-1], kept)
        return other

    def release(self):
        self.state.release()
        self.target.store.release()


def words(rng, count):
    return [rng.randrange(VOCAB) for _ in range(count)]


def random_tree(rng, root, nodes, vocab=VOCAB):
    tree = TokenTree(root)
    while len(tree) < nodes:
        parent, token = rng.randrange(max(0, len(tree) - 6), len(tree)), rng.randrange(vocab)
        if tree.child(parent, token) is None:
            tree.add(parent, token, "random")
    return tree


def page_size(page):
    """A fixture for modules: beginnings are shared in whole pages of so many rows."""

    @pytest.fixture(autouse=True, scope="module")
    def smaller():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(RowPool, "page", page)
            yield

    return smaller


def interrupt(patch, owner, name, when, late=True):
    calls, run = itertools.count(1), getattr(owner, name)

    def interrupted(*args):
        this = next(calls) == when
        if this and not late:
            raise KeyboardInterrupt
        out = run(*args)
        if this:
            raise KeyboardInterrupt
        return out

    patch.setattr(owner, name, interrupted)


def held(drafter, expected):
    """Hold what a drafter answers from now on to `expected(ids, tree, nodes, temperature)`."""
    patch, answer = pytest.MonkeyPatch(), drafter.answer

    def checked(requests):
        answers = answer(requests)
        for one, probs in zip(requests, answers, strict=True):
            ids, heat = one.context.ids, one.context.draft_temperature
            right = expected(ids, one.tree, one.nodes, heat)
            torch.testing.assert_close(probs.dense(), right, atol=1e-5, rtol=1e-3)
        return answers

    patch.setattr(drafter, "answer", checked)
    return contextlib.closing(types.SimpleNamespace(close=patch.undo))


def random_requests(rng, root, alone):
    """A tree that grows at random, and what is asked for in each round: any nodes whose parents
    were. `alone`: the root by itself, and a parent in an earlier round."""
    tree, asked = TokenTree(root), list[int]()
    for _ in range(rng.randint(1, 4)):
        ready = list[int]()
        for node in range(len(tree)) if rng.random() < 0.9 else ():
            known = asked if alone else [*asked, *ready]
            likely = node == 0 or (tree.parent[node] in known and rng.random() < 0.7)
            if node not in asked and likely:
                ready.append(node)
        yield tree, ready
        asked += ready
        for _ in range(rng.randint(1, 4)):
            parent, token = rng.randrange(len(tree)), rng.randrange(VOCAB)
            if tree.child(parent, token) is None:
                tree.add(parent, token, "random")


def rounds(tree):
    return [
        [node for node in range(len(tree)) if tree.depth[node] == depth]
        for depth in range(max(tree.depth) + 1)
    ]


def context_of(ids, temperature=1.0):
    return Context(list(ids), torch.zeros(VOCAB), temperature)
