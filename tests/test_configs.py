"""Configurations whose fields can't be: an error of ours that says what to do.

pytest tests/test_configs.py
"""

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
from quickbeam.models.native import library
from test_families import made

pytestmark = pytest.mark.skipif(library.kernels() is None, reason="no native kernels here")


@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        ("num_hidden_layers", "3", "can't be read"),
        ("num_key_value_heads", 3, "4 heads of queries, 3 of keys"),
        ("layer_types", ["full_attention"], "can't be read"),
        ("hidden_size", [32], "can't be read"),
    ],
)
def test_a_field_of_another_kind_is_an_error(
    at: str, value: Any, told: str, tmp_path: Path
) -> None:
    tiny("gemma3-window", torch.bfloat16).save_pretrained(tmp_path)
    configure(tmp_path, **{at: value})
    with pytest.raises(InvalidInput, match=told):
        LLM(str(tmp_path))
    shown = CliRunner().invoke(app, ["generate", "hi", "--model", str(tmp_path)])
    assert shown.exit_code == 2 and told in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("name", "changes", "told"),
    [
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
