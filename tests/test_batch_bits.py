"""Bit-identity of batches: what a sequence's rows give depends neither on the others of the pass
nor on how its memory came to be."""

import random
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from features import random_tree
from models import CONFIGS, VOCAB, tiny
from quickbeam.models.base import Batch, Chain, Draft
from quickbeam.models.cache.kv import SequenceCache
from quickbeam.models.native import library
from quickbeam.models.native.pages import PagedStore, PagePool
from quickbeam.models.opening import make_model

pytestmark = pytest.mark.usefixtures("threads")
needs_kernels = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")
CHUNK = 16  # tokens of a prompt that a pass reads
WIDEST = 128  # rows that a part has at most, and more


@dataclass
class Text:
    cache: SequenceCache
    ids: list[int] = field(default_factory=list)


class World:
    """Sequences that live side by side in one model's memory. Each pass is compared with the same
    rows alone, in another model that computes their text anew; `wrong` counts those that differ,
    `done` what happened between."""

    def __init__(self, model, other, seed):
        self.model, self.other, self.rng = model, other, random.Random(seed)
        self.texts: list[Text] = []
        self.shared: list[tuple[Any, list[int]]] = []  # chunks with what they hold
        self.wrong = self.compared = 0
        self.done = Counter[str]()

    def below(self, high):
        return self.rng.randrange(high)

    def tokens(self, count):
        return [self.below(VOCAB) for _ in range(count)]

    def anew(self, text):
        cache = self.other.pool.new()
        if text.ids:
            self.other.forward(Batch([Chain(cache, text.ids, False)]))
            cache.commit(range(len(text.ids)))
        return cache

    def part(self, text):
        if self.rng.random() < (0.4 if text.cache.length else 0.9):
            return Chain(text.cache, self.tokens(self.rng.choice([1, 7, 40, 90])))
        size = self.rng.choice([1, 2, 6, 18, 41])
        return Draft(text.cache, random_tree(self.rng, self.below(VOCAB), size))

    def passes(self):
        longest = (self.model.context_length or 0) - WIDEST
        room = [text for text in self.texts if text.cache.length < longest]
        texts = self.rng.sample(room, min(len(room), 1 + self.below(4)))
        if not texts:
            return
        parts = [self.part(text) for text in texts]
        for text, part in zip(texts, parts, strict=True):
            text.cache.reserve(text.cache.length + part.rows + 1)
        for text, part, got in zip(texts, parts, self.model.forward(Batch(parts)), strict=True):
            cache = self.anew(text)
            (alone,) = self.other.forward(Batch([part._replace(cache=cache)]))
            self.compare(got, alone)
            cache.release()
            if isinstance(part, Chain):
                path, tokens = list(range(part.rows)), list(part.tokens)
            else:
                path = part.tree.path(self.below(len(part.tree)))
                tokens = [part.tree.token[node] for node in path]
            text.cache.commit(path)
            text.ids += tokens

    def compare(self, got, alone):
        assert got.logits.shape == alone.logits.shape and len(got.logits)
        differ = (got.logits != alone.logits).any(1) | ~got.logits.isfinite().all(1)
        self.wrong += int(differ.sum()) + (got.best != alone.best)
        if got.hidden is not None and alone.hidden is not None:
            self.wrong += int((got.hidden != alone.hidden).any(1).sum())
        self.compared += len(differ)

    def new(self):
        if len(self.texts) < 6:
            self.texts.append(Text(self.model.pool.new()))

    def fork(self):
        if self.texts and len(self.texts) < 6:
            text = self.rng.choice(self.texts)
            self.texts.append(Text(text.cache.fork(), list(text.ids)))
            self.done["fork"] += bool(text.ids)

    def truncate(self):
        if self.texts:
            text = self.rng.choice(self.texts)
            length = self.below(text.cache.length + 1)
            self.done["truncate"] += 0 < length < len(text.ids)
            del text.ids[length:]
            text.cache.truncate(length)

    def release(self):
        """Often, what nobody else holds is spoiled first."""
        if self.texts:
            text = self.texts.pop(self.below(len(self.texts)))
            if self.rng.random() < 0.7:
                for page in text.cache.pages:
                    if page.users == 1:
                        page.data.fill_(torch.nan)
                        self.done["spoil"] += 1
            text.cache.release()

    def share(self):
        """Hold a beginning beyond its sequence's life; now and then, let go of one."""
        size = self.model.granularity
        if self.shared and self.rng.random() < 0.2:
            chunks, _ = self.shared.pop(self.below(len(self.shared)))
            for chunk in chunks:
                self.model.pool.unpin(chunk)
        known = [(text, len(text.ids) // size) for text in self.texts]
        if known := [(text, count) for text, count in known if count]:
            text, count = self.rng.choice(known)
            chunks = [text.cache.chunk_pages(i, size) for i in range(count)]
            for chunk in chunks:
                self.model.pool.pin(chunk)
            self.shared.append((chunks, text.ids[: count * size]))

    def attach(self):
        if self.shared and len(self.texts) < 6:
            chunks, ids = self.rng.choice(self.shared)
            text = Text(self.model.pool.new(), list(ids))
            text.cache.attach(chunks, self.model.granularity)
            self.done["attach"] += 1
            self.texts.append(text)

    @torch.inference_mode()
    def live(self, steps):
        for _ in range(steps):
            every = [self.passes, self.new, self.share]
            every += [self.fork, self.truncate, self.release, self.attach]
            self.rng.choices(every, (9, 3, 3, 2, 2, 2, 2))[0]()

    @torch.inference_mode()
    def end(self):
        while self.texts:
            self.release()
        for chunks, _ in self.shared:
            for chunk in chunks:
                self.model.pool.unpin(chunk)
        assert self.model.pool.used == self.other.pool.used == 0


def models(name):
    pair = tuple(make_model(tiny(name, torch.bfloat16), chunk=CHUNK) for _ in range(2))
    for model in pair:
        assert model.exact
        model.set_aux_layers([1, 3])
    return pair[0], pair[1]


def wrong_rows(model, other, seeds, steps):
    wrong, done = 0, Counter[str]()
    for seed in seeds:
        world = World(model, other, seed)
        world.live(steps)
        world.end()
        assert world.compared > steps / 2
        wrong, done = wrong + world.wrong, done + world.done
    assert {*+done} >= {"fork", "truncate", "attach", "spoil"}  # that happened
    return wrong


@needs_kernels
@pytest.mark.parametrize(
    ("seeds", "steps"), [(range(2), 120), pytest.param(range(1, 8), 400, marks=pytest.mark.long)]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_side_by_side_have_the_bits_of_the_same_rows_alone(name, seeds, steps):
    assert wrong_rows(*models(name), seeds, steps) == 0


def all_but_the_last(self):
    pages = enumerate(self.pages)
    return [i for i, page in pages if page.users > 1 and i * self.page >= self.length]


def early(self, page):
    page.users -= 1
    if not page.users:
        self.used -= 1
    self._free_pages.append(page)


@needs_kernels
@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [
        (PagedStore, "_pages_to_copy", lambda self: []),  # writes a page that others hold
        (PagedStore, "_pages_to_copy", all_but_the_last),
        (PagePool, "release", early),  # gives a page away that others hold
    ],
    ids=["never copied", "the last not copied", "given away early"],
)
def test_memory_that_is_shared_wrongly_is_seen(owner, name, wrong, monkeypatch):
    pair = models("llama")
    worlds = [World(*pair, seed) for seed in range(4)]
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, wrong)
        for world in worlds:
            world.live(100)
    assert sum(world.wrong for world in worlds) > 5
