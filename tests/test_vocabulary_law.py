"""Sampled answers have the model's probs, whatever part of the vocabulary a feature drafter scores
and whatever tree it fills.

pytest tests/test_vocabulary_probs.py
"""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from answers import request
from cases import few
from drafters import DRAFTED
from quickbeam.drafters import feature
from quickbeam.drafters.base import HeadUse
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.vocabulary import make_shortlist
from quickbeam.engine.engine import Engine
from quickbeam.models.opening import make_model
from quickbeam.params import SamplingParams
from test_vocabulary import artefact
from toy import chi_square, exact_probs

TOKENS, PROMPT = 4, [0]
TOGETHER = 20  # answers, of which each draws as if it was alone (test_many.py)
CASES = [(name, "full") for name in DRAFTED] + [
    ("dyspec", "frequency"),
    ("dyspec", "frequency+context"),
    ("dyspec", "context"),
    ("dyspec", "clusters"),
    ("dyspec", "router"),
    ("specinfer", "router"),
    ("eagle2", "frequency"),
]
ALWAYS = [
    ("sequoia", "full", 1.0),
    ("dyspec", "frequency", 1.0),
    ("dyspec", "frequency+context", 1.0),
    ("dyspec", "context", 0.6),
    ("dyspec", "clusters", 1.0),
    ("dyspec", "router", 0.6),
    ("eagle2", "frequency", 0.6),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    artefact(TOKENS, 16, frequent=1, cluster=1).save(folder := tmp_path_factory.mktemp("probs"))
    return folder


@pytest.mark.parametrize(
    ("name", "vocab", "temperature"),
    few([(*case, heat) for case in CASES for heat in (0.6, 1.0)], ALWAYS),
)
def test_sampled_answers_have_the_models_probs(folder, name, vocab, temperature, monkeypatch):
    monkeypatch.setattr(feature, "OFFERED", 1)
    torch.manual_seed(0)
    sizes = dict(
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=TOKENS, hidden_size=16, intermediate_size=16, initializer_range=0.4, **sizes
        )
    ).eval()
    distributions: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def probs(ids):
        if tuple(ids) not in distributions:
            distributions[tuple(ids)] = (
                model(torch.tensor([list(ids)])).logits[0, -1] / temperature
            ).softmax(-1)
        return distributions[tuple(ids)]

    expected = exact_probs(probs, TOKENS, 3)
    target = make_model(model)
    config = EagleConfig(
        16, 16, heads=2, kv_heads=1, head_dim=8, layers=(1, 2), target_size=16, vocab_size=TOKENS
    )
    torch.manual_seed(1)
    drafter = eagle_drafter(EagleHead(config, target.embedding, target.head), target)
    drafter.folder = folder
    shortlist = make_shortlist(drafter, target, vocab, {"full": None, "context": 2}.get(vocab, 3))
    engine, counts, head = Engine(target), Counter[tuple[int, ...]](), HeadUse()
    accepted = 0
    for start in range(0, 600, TOGETHER):
        sequences = []
        for seed in range(start, start + TOGETHER):
            params = SamplingParams(
                max_tokens=3, temperature=temperature, seed=seed, ignore_eos=True
            )
            sequences.append(
                engine.add(
                    request(
                        target,
                        DRAFTED[name](drafter),
                        params,
                        PROMPT,
                        budget=5,
                        shortlist=shortlist,
                    )
                )
            )
        while not all(sequence.over for sequence in sequences):
            engine.step()
        for sequence in sequences:
            assert sequence.error is None and sequence.statistics.head is not None
            counts[tuple(sequence.output.token_ids)] += 1
            accepted += sequence.statistics.sources["drafter"].accepted
            head = head.plus(sequence.statistics.head)
    assert chi_square(counts, expected) > 1e-4 and accepted > 100
    assert vocab == "full" or 0 < head.tokens < TOKENS * head.calls
