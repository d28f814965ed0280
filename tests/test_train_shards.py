"""Text for training on disk: files give back what was put in, prompts are read, batches hold every
conversation once."""

import json
import os
import random

import pytest
import torch
from safetensors.torch import save_file

from cases import FULL, raising, refuses
from models import VOCAB
from quickbeam.errors import QuickbeamError
from quickbeam.train import shards
from quickbeam.train.shards import ConversationTokens, Shards, ShardWriter, split, token_counts


def conversation(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (3 + seed % 5,), generator=generator, dtype=torch.int32)
    return ConversationTokens(tokens, tokens % 2 == 0, seed / 8)


def write(folder, *seeds):
    writer = ShardWriter(folder)
    for seed in seeds:
        writer.add(conversation(seed))
    writer.flush()
    writer.flush()


def same(stored, seeds):
    pairs = list(zip(stored, map(conversation, seeds), strict=True))
    texts = all(torch.equal(*both) for a, b in pairs for both in zip(a[:2], b[:2], strict=True))
    return texts and all(a.temperature == b.temperature for a, b in pairs)


def test_shards_give_back_what_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "SHARD", 12)
    refuses("holds no text", Shards, tmp_path)
    write(tmp_path, *range(7))
    write(tmp_path, 7, 8)  # adds to the first
    stored, files = Shards(tmp_path), sorted(path.name for path in tmp_path.iterdir())
    made = [conversation(seed) for seed in range(9)]
    assert len(files) > 3 and files[:2] == [f"text-0000{i}.safetensors" for i in (0, 1)]
    assert same(stored, list(range(9))) and len(stored) == 9
    assert stored.tokens == sum(len(c.tokens) for c in made)
    every = torch.cat([c.tokens for c in made]).long()
    assert torch.equal(token_counts(list(stored), VOCAB), torch.bincount(every, minlength=VOCAB))


@pytest.mark.parametrize("damage", ["cut", "other tensors"])
def test_a_broken_file_is_named_and_its_place_taken_by_no_other(tmp_path, damage):
    for seed in range(3):
        write(tmp_path, seed)
    broken = tmp_path / "text-00001.safetensors"
    if damage == "cut":
        broken.write_bytes(broken.read_bytes()[:-9])
    else:
        save_file({"length": torch.tensor([3]), "temperature": torch.tensor([0.0])}, broken)
    refuses(r"text-00001\.safetensors is not a shard of text .*: delete it", Shards, tmp_path)
    broken.unlink()
    write(tmp_path, 3)
    assert same(Shards(tmp_path), [0, 2, 3])


def test_a_full_disk_loses_nothing(tmp_path, monkeypatch):
    writer = ShardWriter(tmp_path)
    writer.add(conversation(1))
    with monkeypatch.context() as patch, pytest.raises(QuickbeamError, match="make room"):
        patch.setattr(os, "replace", raising(FULL))
        writer.flush()
    assert not list(tmp_path.glob("*"))
    writer.add(conversation(2))
    writer.flush()
    assert same(Shards(tmp_path), [1, 2])


def test_prompts_have_three_forms(tmp_path):
    path = tmp_path / "prompts.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "ü"}]
    records = [{"prompt": "a"}, {"turns": ["b", "c"]}, {"messages": messages}, {"messages": []}]
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.write_text("\n\n".join(lines), encoding="utf-8")
    first, second = ([{"role": "user", "content": one}] for one in "ab")
    assert shards.read_prompts(path) == [first, second, messages]
    bad = ["{", "[]", "5", '"messages"', '{"turns": []}', '{"messages": [{"role": "user"}]}']
    for line in (*bad, '{"messages": ["a"]}', '{"text": "a"}'):
        path.write_text(f'{{"prompt": "a"}}\n{line}\n')
        refuses(r"line 2: .*want", shards.read_prompts, path)
    path.write_text("\n")
    refuses("holds no prompts", shards.read_prompts, path)
    path.write_bytes(b"\xff")
    for unreadable in (path, tmp_path / "missing"):
        refuses("can't be read", shards.read_prompts, unreadable)


def test_batches_hold_every_index_once_and_about_as_many_tokens_as_asked():
    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    lengths = [rng.randint(1, 300) for _ in range(400)]
    batches = shards.spread_lengths(lengths, 1000, generator)
    assert sorted(i for batch in batches for i in batch) == list(range(400))
    sizes = [max(lengths[i] for i in batch) * len(batch) for batch in batches]
    # the longest has 300 tokens
    assert max(sizes) <= 1150 and sum(sizes) < 1.3 * sum(lengths)
    assert 900 < sum(sizes) / len(sizes) < 1050
    order = [min(lengths[i] for i in batch) for batch in batches]
    assert order != sorted(order) and batches != shards.spread_lengths(lengths, 1000, generator)
    # one longer than a batch is a batch
    assert shards.spread_lengths([50, 7], 10, generator) in ([[0], [1]], [[1], [0]])


def test_one_conversation_in_twenty_five_is_held_out_and_a_single_one_is_too_little(tmp_path):
    write(tmp_path, 0)
    refuses(r"a single conversation.*--tokens", split, Shards(tmp_path))
    write(tmp_path, 1)
    assert split(Shards(tmp_path)) == ([0], [1])
    write(tmp_path, *range(2, 105))
    train, held = split(Shards(tmp_path))
    assert held == [24, 49, 74, 99] and sorted(train + held) == list(range(105))
