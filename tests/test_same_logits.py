"""Models that quickbeam's path would run wrongly are refused with the true reason; others load."""

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from cases import THOROUGH, raising, refuses
from models import CONFIGS, UNDESCRIBED, table, tiny
from quickbeam.errors import InvalidInput
from quickbeam.models import opening, same_logits, transformers_model
from quickbeam.models.opening import make_model
from quickbeam.models.torch.model import likeliest
from quickbeam.models.transformers_model import TransformersModel
from target import Target

GOOD, REFUSED = CONFIGS | table("eager"), table("refused")
REASONS = {
    "layer 0 attends more than once in a pass": "diffllama",
    "its logits are .* off those of transformers: it counts positions itself": "roberta",
    "its attention is bidirectional": "bert gemma3-bidirectional",
    "[0-9] of its [0-9]+ layers attend through transformers' attention interface": "bart mbart "
    "marian trocr bloom mpt falcon gpt-neo xglm",
}
BAD = [(name, reason) for reason, names in REASONS.items() for name in names.split()]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def made(config, dtype, seed=0):
    return tiny("", dtype, seed, config=config)


@pytest.fixture
def errors(monkeypatch):
    """The errors that models are judged by, all of which are checked."""
    errors = list[float]()

    def noted(got, expected):
        errors.append(relative_error(got, expected))
        return errors[-1]

    relative_error = same_logits.relative_error
    monkeypatch.setattr(same_logits, "relative_error", noted)
    monkeypatch.setattr(opening, "why_not_native", lambda model: "for the test")
    return errors


@DTYPES
@pytest.mark.parametrize("name", GOOD)
def test_good_models_load_with_room_to_spare(name, dtype, errors):
    seeds = range(3 if THOROUGH else 1)
    for seed in seeds:
        TransformersModel(made(GOOD[name], dtype, seed))
    room = same_logits.TOLERANCE.get(dtype, same_logits.TOLERANCE_FLOAT32)
    assert len(errors) == len(seeds) and max(errors) < room / 2


@DTYPES
@pytest.mark.parametrize(("name", "reason"), BAD)
def test_bad_models_are_refused_with_the_true_reason(name, reason, dtype):
    for seed in range(2):
        model = made(REFUSED[name], dtype, seed)
        with pytest.raises(InvalidInput, match=reason) as caught:
            TransformersModel(model)
        assert str(caught.value).startswith(f"{type(model).__name__} can't be used: ")
        assert "recurrent" not in str(caught.value) and "Use another model" in str(caught.value)


class Convolved(nn.Module):
    """An MLP that reads the token before as well, as short convolutions do."""

    def __init__(self, mlp):
        super().__init__()
        self.mlp = mlp

    def forward(self, x):
        return self.mlp(x + x.roll(1, 1))


@DTYPES
def test_what_reads_earlier_tokens_beside_attention_is_refused(dtype, errors):
    for seed in range(3):
        model = tiny("olmo2", dtype, seed)
        for layer in model.model.layers:
            layer.mlp = Convolved(layer.mlp)
        with pytest.raises(InvalidInput, match=r"Olmo2ForCausalLM can't be used: on a text of 20 "):
            make_model(model, native=False)
    assert min(errors) > 2 * same_logits.TOLERANCE[torch.bfloat16]


def test_a_window_that_only_the_mask_knows_of_is_heeded():
    model = made(GOOD["phimoe-window"], torch.float32)
    ids = [(7 * i + 3) % 97 for i in range(40)]
    expected = model(input_ids=torch.tensor([ids])).logits[0, -1]
    target = Target(model, chunk=16)
    torch.testing.assert_close(target.prefill(ids), expected, atol=1e-4, rtol=1e-4)


def test_layouts_that_are_described_are_not_run_for_it(monkeypatch):
    monkeypatch.setattr(transformers_model, "expect", raising(AssertionError("checked")))
    for name in ("llama", "qwen2", "gemma3-window", "olmo2", "gpt2"):
        make_model(tiny(name, torch.bfloat16))
        make_model(tiny(name, torch.bfloat16), native=False)
    with pytest.raises(AssertionError, match="checked"):
        make_model(tiny("", torch.bfloat16, config=UNDESCRIBED))


def test_what_fails_by_itself_is_no_crash():
    model = tiny("olmo2")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    TransformersModel(model)
    model = AutoModelForCausalLM.from_config(CONFIGS["olmo2"])
    model.model.layers[1].mlp = nn.Linear(3, 3)
    refuses(r"transformers' own forward fails on a text \(mat1", make_model, model, native=False)


def test_an_accelerator_tells_the_likeliest_tokens_of_a_whole_pass():
    rows = torch.tensor([[1.0, 3, 3], [2, 0, 1], [0, torch.nan, 5], [torch.inf, 0, 1]])
    assert [likeliest(one).tolist() for one in (rows, rows[:0])] == [[1, 0, -1, -1], []]
