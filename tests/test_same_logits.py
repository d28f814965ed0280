"""Models that quickbeam's path would run wrongly are refused with the true reason; others load."""

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BartConfig,
    BertConfig,
    BloomConfig,
    CodeGenConfig,
    CohereConfig,
    DeepseekV3Config,
    DiffLlamaConfig,
    FalconConfig,
    Gemma3TextConfig,
    GPTNeoConfig,
    GraniteConfig,
    MarianConfig,
    MBartConfig,
    MptConfig,
    Olmo3Config,
    OPTConfig,
    PhimoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    RobertaConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    TrOCRConfig,
    XGLMConfig,
)

from cases import THOROUGH
from models import CONFIGS, SIZES, UNDESCRIBED, tiny
from quickbeam.errors import InvalidInput
from quickbeam.models import opening, same_logits
from quickbeam.models import torch as torch_back_end
from quickbeam.models.opening import make_model
from quickbeam.models.target import Target

EXPERTS = dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
LATENT = dict(
    q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8
) | dict(n_routed_experts=4, n_group=1, topk_group=1, num_key_value_heads=4)
BART = dict(d_model=32, decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=48)
BART |= dict(vocab_size=97, is_encoder_decoder=False, is_decoder=True)
GPT = dict(vocab_size=97, n_embd=32, n_layer=3, n_head=4)
WINDOW = dict(sliding_window=6)
BERT = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}

GOOD: dict[str, PreTrainedConfig] = {name: config for name, config in CONFIGS.items()} | {
    "bert-decoder": BertConfig(**BERT, is_decoder=True),
    "codegen": CodeGenConfig(**GPT, rotary_dim=4),
    "cohere": CohereConfig(**SIZES),
    "deepseek-v3": DeepseekV3Config(**SIZES | EXPERTS | LATENT),
    "granite": GraniteConfig(**SIZES),
    "olmo3": Olmo3Config(**SIZES, **WINDOW),
    "opt": OPTConfig(**BERT, ffn_dim=48, word_embed_proj_dim=32),
    "phimoe-window": PhimoeConfig(**SIZES | EXPERTS | WINDOW),
    "qwen2-moe-window": Qwen2MoeConfig(
        **SIZES | EXPERTS | WINDOW, use_sliding_window=True, max_window_layers=1
    ),
    "qwen3-moe": Qwen3MoeConfig(**SIZES | EXPERTS, head_dim=8),
    "smollm3": SmolLM3Config(**SIZES),
    "stablelm": StableLmConfig(**SIZES),
    "starcoder2": Starcoder2Config(**SIZES),
}
OWN_CODE = "[0-9] of its [0-9]+ layers attend through transformers' attention interface"
OFF = "its logits are .* off those of transformers: it counts positions itself"
BAD: dict[str, tuple[PreTrainedConfig, str]] = {
    "diffllama": (DiffLlamaConfig(**SIZES), "layer 0 attends more than once in a pass"),
    "bart": (BartConfig(**BART), OWN_CODE),
    "mbart": (MBartConfig(**BART), OWN_CODE),
    "marian": (MarianConfig(**BART, pad_token_id=0), OWN_CODE),
    "trocr": (TrOCRConfig(**BART | {"cross_attention_hidden_size": 32}), OWN_CODE),
    "roberta": (RobertaConfig(**BERT, is_decoder=True), OFF),
    "bert": (BertConfig(**BERT), "its attention is bidirectional"),
    "gemma3-bidirectional": (
        Gemma3TextConfig(**SIZES, head_dim=8, **WINDOW, use_bidirectional_attention=True),
        "its attention is bidirectional",
    ),
    "bloom": (BloomConfig(vocab_size=97, hidden_size=32, n_layer=3, n_head=4), OWN_CODE),
    "mpt": (MptConfig(vocab_size=97, d_model=32, n_layers=3, n_heads=4), OWN_CODE),
    "falcon": (FalconConfig(**SIZES, num_kv_heads=2), OWN_CODE),
    "gpt-neo": (
        GPTNeoConfig(**GPT, hidden_size=32, num_layers=2, attention_types=[[["global"], 2]]),
        OWN_CODE,
    ),
    "xglm": (
        XGLMConfig(vocab_size=97, d_model=32, num_layers=3, attention_heads=4, ffn_dim=48),
        OWN_CODE,
    ),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])


def made(config, dtype, seed=0):
    return tiny("", dtype, seed, config=config)


@pytest.fixture
def errors(monkeypatch):
    """The errors that models are judged by, all of which are checked."""
    found = list[float]()

    def noted(got, expected):
        found.append(relative_error(got, expected))
        return found[-1]

    relative_error = same_logits.relative_error
    monkeypatch.setattr(same_logits, "relative_error", noted)
    monkeypatch.setattr(opening, "why_not_native", lambda model: "for the test")
    return found


@DTYPES
@pytest.mark.parametrize("name", GOOD)
def test_good_models_load_with_room_to_spare(name, dtype, errors):
    seeds = range(3 if THOROUGH else 1)
    for seed in seeds:
        make_model(made(GOOD[name], dtype, seed), native=False)
    room = same_logits.TOLERANCE.get(dtype, same_logits.TOLERANCE_FLOAT32)
    assert len(errors) == len(seeds) and max(errors) < room / 2


@DTYPES
@pytest.mark.parametrize("name", BAD)
def test_bad_models_are_refused_with_the_true_reason(name, dtype):
    config, reason = BAD[name]
    for seed in range(2):
        model = made(config, dtype, seed)
        with pytest.raises(InvalidInput, match=reason) as caught:
            make_model(model, native=False)
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
    assert {layer.window for layer in target.model._tap.layers.values()} == {6}
    torch.testing.assert_close(target.prefill(ids), expected, atol=1e-4, rtol=1e-4)


def test_layouts_that_are_described_are_not_run_for_it(monkeypatch):
    def fail(*_):
        raise AssertionError("checked")

    monkeypatch.setattr(torch_back_end, "expect", fail)
    for name in ("llama", "qwen2", "gemma3-window", "olmo2", "gpt2"):
        make_model(tiny(name, torch.bfloat16))
    with pytest.raises(AssertionError, match="checked"):
        make_model(tiny("", torch.bfloat16, config=UNDESCRIBED))


def test_a_model_of_nans_is_left_to_its_answers_error():
    model = tiny("olmo2")
    with torch.no_grad():
        model.lm_head.weight.fill_(torch.nan)
    make_model(model, native=False)


def test_a_forward_that_fails_is_no_crash():
    model = AutoModelForCausalLM.from_config(CONFIGS["olmo2"])
    model.model.layers[1].mlp = nn.Linear(3, 3)
    with pytest.raises(InvalidInput, match=r"transformers' own forward fails on a text \(mat1"):
        make_model(model, native=False)
