"""Configurations that lie: whatever a field holds, an error of ours or a model.

pytest tests/test_configs.py
"""

import copy
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from checkpoints import configure
from models import tiny
from quickbeam import LLM
from quickbeam.cli.app import app
from quickbeam.errors import InvalidInput
from quickbeam.models.angles import hold
from quickbeam.models.base import Batch, Chain
from quickbeam.models.checkpoint import Checkpoint, read_config
from quickbeam.models.families import stack_of
from quickbeam.models.families.fields import KINDS
from quickbeam.models.families.reading import NotDescribed
from quickbeam.models.native import library
from quickbeam.models.native_model import NativeModel
from test_families import CONFIGS, made

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")

MISSING: Any = object()
HUGE, NAN = 1 << 40, float("nan")
WRONG = ("x", None, [], [1], {}, {"a": 1}, -1, 0, 3, 1 << 31, 1.5, True, NAN, 1e308, "8", MISSING)


def places(fields: dict[str, Any], at: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The way to each field, those of rotary angles included."""
    for name, value in fields.items():
        if name != "transformers_version":
            yield (*at, name)
        if isinstance(value, dict) and (at or name == "rope_parameters"):
            yield from places(value, (*at, name))


def changed(fields: dict[str, Any], at: tuple[str, ...], value: Any) -> dict[str, Any]:
    found = inner = copy.deepcopy(fields)
    for name in at[:-1]:
        inner = inner[name]
    if value is MISSING:
        del inner[at[-1]]
    else:
        inner[at[-1]] = copy.deepcopy(value)
    return found


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_field_gives_an_architecture_or_an_error(name: str, tmp_path: Path) -> None:
    """Each field that families read holds one of the wrong values, in turns."""
    CONFIGS[name].save_pretrained(tmp_path)
    file, values = tmp_path / "config.json", itertools.cycle(WRONG)
    fields = json.loads(file.read_text(encoding="utf-8"))
    next(itertools.islice(values, len(name), None))  # others for each family
    refused = 0
    read = [at for at in places(fields) if at[0] in KINDS]
    for at, value in zip(read, values, strict=False):
        file.write_text(json.dumps(changed(fields, at, value)), encoding="utf-8")
        try:
            config = read_config(tmp_path)
            hold(config)
            stack_of(config, torch.bfloat16)
        except (InvalidInput, NotDescribed):
            refused += 1
    assert refused > len(read) / 3


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
@pytest.mark.parametrize("name", CONFIGS)
def test_wrong_fields_beside_weights(name: str, tmp_path: Path) -> None:
    """Every field with some wrong values: a model that answers, or an error of ours."""
    made(name).save_pretrained(tmp_path)
    file, values = tmp_path / "config.json", itertools.cycle(WRONG)
    fields = json.loads(file.read_text(encoding="utf-8"))
    next(itertools.islice(values, len(name), None))  # others for each family
    for at, value in zip([*places(fields)] * 5, values, strict=False):
        file.write_text(json.dumps(changed(fields, at, value)), encoding="utf-8")
        try:
            checkpoint = Checkpoint(tmp_path, None)
        except (InvalidInput, NotDescribed):  # the latter would be run by transformers
            continue
        model = NativeModel(checkpoint, checkpoint.stack)
        model.forward(Batch([Chain(model.pool.new(), list(range(3, 20)), 17)]))


@pytest.mark.parametrize(
    ("at", "value", "accepted"),
    [
        ("num_hidden_layers", "3", "a whole number from 1 to 4096"),
        ("num_hidden_layers", 1 << 31, "a whole number from 1 to 4096"),
        ("num_attention_heads", -4, "a whole number"),
        ("num_key_value_heads", 3, "4 heads of queries, 3 of keys"),
        ("head_dim", 8.5, "a whole number"),
        ("rms_norm_eps", "small", "a number from 0"),
        ("layer_types", ["full_attention"], "one for each of 6 layers"),
        ("layer_types", "full_attention", "a list"),
        ("rope_parameters", [], "an object"),
        ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "an object with sliding"),
        ("attention_bias", {}, "true or false"),
        ("dtype", 16, "the name of a number format"),
        ("tie_word_embeddings", "yes", "true or false"),
    ],
)
def test_a_field_of_another_kind_is_named(
    at: str, value: Any, accepted: str, tmp_path: Path
) -> None:
    tiny("gemma3-window", torch.bfloat16).save_pretrained(tmp_path)
    configure(tmp_path, **{at: value})
    with pytest.raises(InvalidInput, match=accepted) as caught:
        LLM(str(tmp_path))
    assert at in str(caught.value) or "heads" in accepted
    shown = CliRunner().invoke(app, ["generate", "hi", "--model", str(tmp_path)])
    assert shown.exit_code == 2 and accepted in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
        ("mixtral", {"num_local_experts": 4096, "num_hidden_layers": 4096}, "at most 64 in 4096"),
        ("glm4_moe", {"n_group": 3}, "3 of 8 experts chosen in 2 of 3 groups"),
        ("gpt2", {"n_positions": 1024}, "wpe.weight has shape"),
        ("bamba", {"mamba_d_conv": 3}, "conv1d.weight.* has shape"),
        ("qwen3_next", {"linear_num_value_heads": 6}, "has shape"),
        ("phi3", {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0]}}, "longrope"),
    ],
)
def test_numbers_that_do_not_fit_are_named(
    name: str, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    made(name).save_pretrained(tmp_path)
    configure(tmp_path, **changes)
    with pytest.raises(InvalidInput, match=told):
        LLM(str(tmp_path))
