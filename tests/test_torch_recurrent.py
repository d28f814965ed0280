"""Recurrent layers by PyTorch's operators: nodes give what their paths do, up to rounding."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from answers import answer
from cases import few
from models import VOCAB, tiny
from quickbeam.drafters.draft_model import LMDrafter
from quickbeam.engine.engine import Engine
from quickbeam.methods.auto import Auto
from quickbeam.methods.base import NoDraft
from quickbeam.models.opening import make_model
from quickbeam.models.torch import rows as of_rows
from quickbeam.models.torch.model import TorchModel
from quickbeam.models.torch.states import TorchStates
from quickbeam.params import SamplingParams
from test_families import CONFIGS
from test_recurrent import IDS, KINDS, PAGE, wrong_rows

every_kind = pytest.mark.parametrize("kind", few(KINDS, ["lfm2", "qwen3_5"]))
NAMES = "bamba falcon_h1 granite_hybrid granite_hybrid-moe lfm2_moe qwen3_5-moe qwen3_next"


def made(kind, **options):
    model = make_model(tiny("", torch.float32, config=KINDS[kind]), native=False, **options)
    assert isinstance(model, TorchModel) and model.pool.state_pages
    return model


@every_kind
def test_nodes_follow_their_paths(kind):
    assert wrong_rows(made(kind), steps=3, nodes=7, far=1e-4) == 0


SLOT, COMMIT, LIST_TREE = TorchStates.slot, TorchStates.commit, of_rows.list_tree


def list_neighbours(states, parents, base, first, out):
    """As if the row before a node's were its parent's, for convolutions alone."""
    LIST_TREE(states, parents, base, first, out)
    out.history[1:, -1] = first + np.arange(len(out.history) - 1)


MISTAKES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "state of the root": (TorchStates, "slot", lambda s, node: SLOT(s, min(node, 0))),
    "state of the root committed": (
        TorchStates,
        "commit",
        lambda s, path, n: COMMIT(s, path if isinstance(path, range) else path[:1], n),
    ),
    "tokens of the row before": (of_rows, "list_tree", list_neighbours),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake, monkeypatch):
    model = made("lfm2")
    monkeypatch.setattr(*MISTAKES[mistake])
    assert wrong_rows(model, steps=3, nodes=7, far=1e-2) > 0


@every_kind
def test_answers_are_those_of_transformers(kind):
    plain = tiny("", torch.float32, config=KINDS[kind])
    prompts, model = [IDS[:100], IDS[40:43]], made(kind, chunk=PAGE)
    settings = dict(max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0)
    whole = [plain.generate(torch.tensor([prompt]), **settings)[0].tolist() for prompt in prompts]
    right = [ids[-24:] for ids in whole]
    drafter = LMDrafter(make_model(tiny("", torch.float32, seed=1, config=KINDS[kind])), VOCAB)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    for method in (NoDraft(), Auto(drafter)):
        engine = Engine(model)
        for prompt, reply in zip(prompts, right, strict=True):
            assert answer(model, method, params, prompt, engine=engine).output.token_ids == reply
        # the state behind the first whole page was kept
        again = answer(model, method, params, prompts[0], engine=engine)
        assert again.statistics.cached_tokens == PAGE and again.output.token_ids == right[0]
        engine.prefixes.clear()
        assert model.pool.used == 0


@pytest.mark.parametrize("family", few(NAMES.split(), ["granite_hybrid-moe", "qwen3_next"]))
def test_families_give_the_logits_of_transformers(family):
    """`TorchModel` compares them, in chunks and trees, and refuses others."""
    model = make_model(tiny("", torch.float32, config=CONFIGS[family]), native=False)
    assert model.pool.state_pages
