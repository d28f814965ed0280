"""A feature drafter in the engine: greedy answers are plain decoding's, conversations go on.

pytest tests/test_feature_engine.py
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from features import KINDS, WIDE, Pair, context_of
from models import VOCAB
from quickbeam import LLM, hub
from quickbeam.draft import eagle
from quickbeam.draft.eagle import EagleDrafter
from quickbeam.draft.eagle_model import EagleHead
from quickbeam.engine.loop import Generation
from quickbeam.engine.output import Output
from quickbeam.errors import InvalidInput
from quickbeam.sampling import SamplingParams
from quickbeam.target.kv_cache import KVStore
from quickbeam.target.target import Target
from quickbeam.tree import TokenTree
from quickbeam.trees import DRAFTED
from quickbeam.trees.base import NoDraft, TreePolicy


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    return {kind: Pair(kind) for kind in KINDS}


class Letters:
    """A tokenizer whose tokens are characters."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def answer(target: Target, policy: TreePolicy, params: SamplingParams, prompt: list[int], budget: int = 7, keep: int = 0) -> Generation:
    generation = Generation(target, policy, Output(Letters(), params), prompt, params, budget, keep)
    for _ in generation:
        pass
    return generation


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", DRAFTED)
def test_greedy_answers_are_plain_decodings_and_seeds_repeat(pairs: dict[str, Pair], name: str, kind: str) -> None:
    target, drafter, rng = pairs[kind].target, pairs[kind].drafter, random.Random(f"{name} {kind}")
    for budget in (1, 2, 7, 24):
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        params = SamplingParams(max_tokens=rng.randint(1, 30), repetition_penalty=rng.choice([1.0, 1.3]), ignore_eos=True)
        drafted = answer(target, DRAFTED[name](drafter), params, prompt, budget)
        assert drafted.output.token_ids == answer(target, NoDraft(), params, prompt).output.token_ids

    def tell(seed: int) -> tuple[list[int], int]:
        params = SamplingParams(max_tokens=20, temperature=1.0, seed=seed, ignore_eos=True)
        drafter.forget()
        generation = answer(target, DRAFTED[name](drafter), params, [3, 3])
        return generation.output.token_ids, generation.statistics.sources["drafter"].drafted

    assert tell(1) == tell(1) != tell(2) and tell(1)[1] > 0


def test_an_interrupt_in_the_drafter_leaves_it_fit_for_the_next_request(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, params, prompt = Pair("attention"), SamplingParams(max_tokens=12, ignore_eos=True), list(range(20))
    target, drafter = pair.target, pair.drafter
    monkeypatch.setattr(eagle, "CHUNK", 6)
    fresh = answer(target, DRAFTED["greedy"](drafter), params, prompt)
    whole, run = fresh.output.token_ids, drafter._run
    for when, late in itertools.product(range(1, 9), (False, True)):
        calls = itertools.count(1)

        def interrupted(*args: Any, calls: Iterator[int] = calls, when: int = when, late: bool = late) -> torch.Tensor:
            this = next(calls) == when
            if this and not late:
                raise KeyboardInterrupt
            out = run(*args)
            if this:
                raise KeyboardInterrupt
            return out

        drafter.forget()
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(drafter, "_run", interrupted)
            answer(target, DRAFTED["greedy"](drafter), params, prompt)
        again = answer(target, DRAFTED["greedy"](drafter), params, prompt, keep=drafter.reusable(prompt, min(len(target.ids), 20)))
        assert (again.output.token_ids, again.statistics.steps) == (whole, fresh.statistics.steps)


def test_an_interrupt_while_rewinding_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    pair, store = Pair("attention"), KVStore.truncate
    pair.begin([5, 6, 7, 8], 9)
    pair.drafter.laws(context_of([5, 6, 7, 8, 9]), TokenTree(9), [0])

    def interrupted(self: KVStore, length: int) -> None:
        store(self, length)
        if self is pair.drafter.store:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(KVStore, "truncate", interrupted)
        pair.begin([5, 6, 7, 8], 3)  # read anew
    pair.begin([5, 6, 7, 8], 4, keep=pair.drafter.reusable([5, 6, 7, 8], 4))
    pair.check(context_of([5, 6, 7, 8, 4]), TokenTree(4), [0])


# Through `LLM`


@pytest.fixture(scope="module")
def head_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    EagleHead(replace(WIDE, layers=(1, 2, 3), vocab_size=257)).save(folder := tmp_path_factory.mktemp("head"), torch.float32)
    return folder


def test_a_saved_head_is_a_drafter_and_another_models_is_refused(toy_folder: str, head_folder: Path, tmp_path: Path) -> None:
    llm, params = LLM(toy_folder, "dyspec", dtype="float32", drafter=str(head_folder)), SamplingParams(max_tokens=20, ignore_eos=True)
    drafted = llm.generate("abc abc", params)
    assert isinstance(llm.prepare("dyspec"), EagleDrafter) and drafted.statistics.sources["drafter"].drafted > 0
    assert drafted.token_ids == llm.generate("abc abc", params, method="ar").token_ids
    EagleHead(replace(WIDE, hidden_size=16, target_size=16, layers=(1, 2, 3), vocab_size=257)).save(tmp_path)
    with pytest.raises(InvalidInput, match=r"hidden states 16 wide, the target's are 32: it was made for another model"):
        LLM(toy_folder, "dyspec", dtype="float32", drafter=str(tmp_path))
    EagleHead(replace(WIDE, vocab_size=257)).save(tmp_path)
    with pytest.raises(InvalidInput, match=r"hidden states after layers \[1, 2, 4\]: the model has 1 to 2"):
        LLM(toy_folder, "dyspec", dtype="float32", drafter=str(tmp_path))


def test_conversations_go_on_as_fresh_ones_whatever_the_methods(
    toy_folder: str, head_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, params = LLM(toy_folder, dtype="float32", drafter=str(head_folder)), SamplingParams(max_tokens=16, ignore_eos=True)
    kept, prefill = list[int](), Target.prefill
    monkeypatch.setattr(Target, "prefill", lambda self, ids, keep=0: (kept.append(keep), prefill(self, ids, keep))[1])
    said, laws = list[torch.Tensor](), EagleDrafter.compact
    monkeypatch.setattr(EagleDrafter, "compact", lambda self, *args: (said.append((found := laws(self, *args)).dense()), found)[1])
    for methods in (["dyspec"] * 3, ["ar", "dyspec", "logitspec", "dyspec"], ["dyspec", "eagle2", "ar", "chain"]):
        llm.reset()
        messages: list[dict[str, str]] = []
        turns = []
        for turn, method in enumerate(methods):
            messages = [*messages, {"role": "user", "content": f"and what of {turn}"}]
            said.clear()
            llm._policies.clear()  # what trees are grown depends on what was learned before
            turns.append((messages, method, llm.chat(messages, params, method=method), list(said), kept[-1]))
            messages = [*messages, {"role": "assistant", "content": turns[-1][2].text}]
        assert methods[0] == "ar" or all(keep > 10 for *_, keep in turns[1:])
        assert turns[-1][-1] > 10
        for messages, method, completion, drafted, _ in turns:
            llm.reset()
            said.clear()
            llm._policies.clear()
            again = llm.chat(messages, params, method=method)
            assert kept[-1] == 0 and (again.token_ids, again.statistics.steps) == (completion.token_ids, completion.statistics.steps)
            assert len(said) == len(drafted) and all(torch.allclose(a, b, atol=1e-5) for a, b in zip(said, drafted, strict=True))


@pytest.mark.slow
def test_the_shipped_drafter_drafts_for_the_default_model(smollm2: Path) -> None:
    llm = LLM()
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    messages = [{"role": "user", "content": "Why do leaves fall in autumn?"}]
    plain = llm.chat(messages, params, method="ar")
    for method in ("dyspec", "dyspec-threshold", "chain", "specinfer", "sequoia", "eagle2"):
        answer = llm.chat(messages, params, method=method)
        assert answer.token_ids == plain.token_ids and answer.statistics.mean_accepted_tokens > 1.4
    card = (Path(hub.shipped_drafter(None) or "") / "README.md").read_text()
    assert "quickbeam train drafter" in card and "| 1 |" in card
