"""Published feature drafters: what is read from their folders computes what their authors'
equations say."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama import modeling_llama as modeling

import checkpoints
from cases import refuses
from checkpoints import DRAFT, LLAMA, LLAMA3, VOCAB, D, eagle1, eagle3, read, write
from features import causal
from quickbeam.drafters.eagle_files import save_eagle
from quickbeam.drafters.eagle_model import EagleConfig, EagleHead
from quickbeam.drafters.layouts import EAGLE, is_kind

EAGLE3 = LLAMA | {"draft_vocab_size": DRAFT}
SPECULATORS = {"speculators_model_type": "eagle3", "draft_vocab_size": DRAFT}
LAYER_FIELDS = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
LAYER_FIELDS += ("rms_norm_eps", "rope_theta", "rope_scaling", "head_dim")
N = 7


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


class Reference:
    """The published equations, of transformers' parts and tensors by their published names."""

    def __init__(self, config, state, prefix, embed, head):
        self.config, self.state, self.prefix = config, state, prefix
        self.embed, self.head = embed, head
        fields = {**config, **config.get("transformer_layer_config", {})}
        known = {k: v for k, v in fields.items() if k in LAYER_FIELDS}
        llama = LlamaConfig(**known, attn_implementation="eager")
        self.wide = f"{prefix}.hidden_norm.weight" in state
        self.attention = modeling.LlamaAttention(llama, 0).eval()
        self.mlp = modeling.LlamaMLP(llama)
        self.rotary = modeling.LlamaRotaryEmbedding(llama)
        for part, module in (*self.attention.named_children(), *self.mlp.named_children()):
            name = f"{prefix}.{'self_attn' if part[0] in 'qkvo' else 'mlp'}.{part}"
            if isinstance(module, nn.Linear):
                module.weight = nn.Parameter(state[f"{name}.weight"])
                bias = state.get(f"{name}.bias")
                module.bias = None if bias is None else nn.Parameter(bias)
        self.eps = llama.rms_norm_eps

    def norm(self, name, x):
        weight = self.state[f"{name}.weight"]
        module = modeling.LlamaRMSNorm(len(weight), self.eps)
        module.weight = nn.Parameter(weight)
        return module(x)

    def fc(self, x):
        name = "fusion_fc" if "fusion_fc.weight" in self.state else "fc"
        return F.linear(x, self.state[f"{name}.weight"], self.state.get(f"{name}.bias"))

    def fuse(self, x):
        if not self.wide:
            return x
        if "fc_norm.0.weight" in self.state:
            parts = enumerate(x.chunk(3, -1))
            x = torch.cat([self.norm(f"fc_norm.{i}", part) for i, part in parts], -1)
        if "input_norm.weight" in self.state:
            x = self.norm("input_norm", x)
        return self.fc(x)

    @torch.no_grad()
    def __call__(self, hidden, tokens):
        """`[n, d]` fused states and `[n]` tokens to what the next row reads, and the logits."""
        hidden, embedded = hidden[None], F.embedding(tokens, self.embed)[None]
        n = len(tokens)
        if self.wide:
            residual, normed = hidden, self.norm(f"{self.prefix}.hidden_norm", hidden)
            if self.config.get("norm_before_residual"):
                residual = normed
            x = torch.cat([self.norm(f"{self.prefix}.input_layernorm", embedded), normed], -1)
        else:
            x = residual = self.fc(torch.cat([embedded, hidden], -1))
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        angles = self.rotary(x, torch.arange(n)[None])
        x = residual + self.attention(x, position_embeddings=angles, attention_mask=mask)[0]
        x = x + self.mlp(self.norm(f"{self.prefix}.post_attention_layernorm", x))
        seen = self.norm("norm", x) if self.wide else x
        return (seen if self.config.get("norm_output") else x)[0], F.linear(seen, self.head)[0]


class Keys:
    def __init__(self):
        self.key, self.value = torch.empty(0, 2, 8), torch.empty(0, 2, 8)

    def __call__(self, query, key, value):
        self.key, self.value = torch.cat([self.key, key]), torch.cat([self.value, value])
        return causal(query, self.key, self.value)


@torch.no_grad()
def check(network, reference):
    """Same hidden states and logits over a text, and a row further on the network's own output."""
    assert all(p.device.type == "cpu" for p in network.parameters())
    hidden = torch.randn(N, len(network.config.layers) * network.config.target_size)
    tokens = torch.randint(VOCAB, (N + 1,))
    keys = Keys()
    out = network(network.fuse(hidden), network.embedding(tokens[:N]), torch.arange(N), keys)
    fused = reference.fuse(hidden)
    further = network(out[-1:], network.embedding(tokens[N:]), torch.tensor([N]), keys)
    expected, logits = reference(fused, tokens[:N])
    after, next_logits = reference(torch.cat([fused, expected[-1:]]), tokens)
    for got, rows, scores in ((out, expected, logits), (further, after[-1:], next_logits[-1:])):
        torch.testing.assert_close(got, rows, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(network.head(network.feature(got)), scores, rtol=1e-5, atol=1e-5)


def held(folder, config, state, prefix, how="safetensors"):
    """The network of a folder, after a check against the equations."""
    embedding, head = checkpoints.shared()
    write(folder, config, state, how)
    assert is_kind(folder, EAGLE)
    network = read(folder, embedding, head)
    assert network.config.own_embedding == ("embed_tokens.weight" in state)
    assert network.config.own_head == ("lm_head.weight" in state)
    own = state.get("embed_tokens.weight", embedding.weight)
    check(network, Reference(config, state, prefix, own, state.get("lm_head.weight", head.weight)))
    return network


@pytest.mark.parametrize("how", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("bias", [False, True])
def test_eagle_reads_the_last_state_and_shares_the_embedding_and_the_head(tmp_path, how, bias):
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "qkv_bias": True}
    config = LLAMA | {"bias": bias} | (qwen if bias else {})
    network = held(tmp_path / "drafter", config, eagle1(bias, fc_bias=bias), "layers.0", how)
    assert network.config.layers == (checkpoints.LAYERS + 1,)


@pytest.mark.parametrize("rope", [None, LLAMA3])
def test_eagle3_reads_three_states_and_maps_its_head(tmp_path, rope):
    state, config = eagle3(), EAGLE3 | {"rope_scaling": rope}
    config |= {"head_dim": None}  # as some are written
    network = held(tmp_path / "drafter", config, state, "midlayer", "bin")
    assert network.config.layers == (2, 6, 9)
    assert network.tokens.tolist() == state["t2d"].nonzero()[:, 0].tolist()


def test_eagle3_of_the_whole_vocabulary_and_of_another_width(tmp_path):
    state = {k: v for k, v in eagle3(rows=VOCAB).items() if k not in ("d2t", "t2d")}
    network = held(tmp_path / "a", LLAMA | {"draft_vocab_size": VOCAB}, state, "midlayer")
    assert network.tokens.tolist() == list(range(VOCAB))
    del state["lm_head.weight"]  # the target's then
    held(tmp_path / "b", LLAMA, state, "midlayer")
    state = {**eagle3(d=64), "embed_tokens.weight": torch.randn(VOCAB, 64)}
    config = EAGLE3 | {"hidden_size": 64, "head_dim": 8, "target_hidden_size": D}
    assert held(tmp_path / "drafter", config, state, "midlayer").config.target_size == D


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("norms", ["none", "fused", "each"])
def test_speculators_eagle3(tmp_path, before, norms):
    config = SPECULATORS | {"norm_before_residual": before, "transformer_layer_config": LLAMA}
    config |= {"eagle_aux_hidden_state_layer_ids": [1, 5, 10]}
    state = eagle3("layers.0") | {"embed_tokens.weight": torch.randn(VOCAB, D)}
    state |= {"verifier_norm.weight": checkpoints.noise(D)}
    if norms == "fused":
        state |= {"input_norm.weight": checkpoints.noise(3 * D)}
        config |= {"norm_before_fc": True, "norm_output": True}
    if norms == "each":
        state |= {f"fc_norm.{i}.weight": checkpoints.noise(D) for i in range(3)}
        config |= {"fc_norm": True, "norm_output": True}
    assert held(tmp_path / "drafter", config, state, "layers.0").config.layers == (1, 5, 10)


@pytest.mark.parametrize("names", [("fc", "layers.0"), ("fusion_fc", "transformer")])
def test_speculators_eagle(tmp_path, names):
    state = {
        k.replace("fc.", f"{names[0]}.").replace("layers.0", names[1]): v
        for k, v in eagle1(fc_bias=True).items()
    }
    config = {"speculators_model_type": "eagle", "fusion_bias": True, "layernorms": False}
    held(tmp_path / "drafter", config | {"transformer_layer_config": LLAMA}, state, names[1])


def test_our_own(tmp_path):
    embedding, head = checkpoints.shared()
    config = EagleConfig(D, 48, 4, 2, 8, (2, 6, 9), D, VOCAB, feature_norms=True)
    network = EagleHead(config, embedding, head)
    save_eagle(network, tmp_path / "drafter", torch.float32)
    assert is_kind(tmp_path / "drafter", EAGLE)
    again = read(tmp_path / "drafter", embedding, head)
    assert again.config == network.config
    assert all(map(torch.equal, again.state_dict().values(), network.state_dict().values()))
    refuses("vocabulary or width is another", read, tmp_path / "drafter", size=64)
    refuses("the model has 1 to 5", read, tmp_path / "drafter", layers=5)
    refuses("with the target's head, the target has 98", read, tmp_path / "drafter", vocab=98)


def test_names_of_others_are_read_and_the_dtype_is_kept(tmp_path):
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 4, 8], "use_aux_hidden_state": True}
    config = EAGLE3 | {"eagle_config": ids}
    assert read(write(tmp_path / "drafter", config, eagle3())).config.layers == (2, 5, 9)
    state = {f"model.{k}": v.bfloat16() for k, v in eagle1().items()}
    network = read(write(tmp_path / "drafter", LLAMA, state))
    assert {p.dtype for p in network.parameters()} == {torch.bfloat16}
    for config in (EAGLE3, SPECULATORS | {"transformer_layer_config": LLAMA}):
        at = config.get("transformer_layer_config", config)
        at = at | {"layer_types": ["sliding_attention"], "sliding_window": 6}
        whole = at if config is EAGLE3 else config | {"transformer_layer_config": at}
        assert read(write(tmp_path / "drafter", whole, eagle3())).config.window == 6


def test_a_rounded_copy_of_the_embedding_is_the_targets(tmp_path):
    embedding, head = checkpoints.shared()
    copy = embedding.weight.detach()
    for stored in (copy, copy.bfloat16(), copy.half(), copy * 1.1):
        state = {**eagle1(), "embed_tokens.weight": stored.clone()}
        network = read(write(tmp_path / "drafter", LLAMA, state), embedding, head)
        assert network.config.own_embedding is not torch.allclose(stored.float(), copy, 0.02)


@pytest.mark.parametrize("how", ["safetensors", "bin"])
def test_a_causal_language_model_is_no_drafter(tmp_path, how):
    state = {k: v.clone() for k, v in LlamaForCausalLM(LlamaConfig(**LLAMA)).state_dict().items()}
    folder = write(tmp_path / "llama", LLAMA, state, how)
    assert not is_kind(folder, EAGLE)
    refuses(r"no known feature drafter.*known: EAGLE and EAGLE-2", read, folder)


def test_what_is_no_folder_of_weights_is_no_drafter(tmp_path):
    assert not is_kind(tmp_path / "nowhere", EAGLE)
    folder = write(tmp_path / "drafter", LLAMA, eagle1())
    (folder / "model.safetensors").write_bytes(b"broken")
    assert not is_kind(folder, EAGLE)


def refuse(folder, config, state, match, **target):
    refuses(f"^{folder}(?!.*{folder}).*{match}", read, write(folder, config, state), **target)


CONFIGS = [
    ({"hidden_act": "quick_gelu"}, "hidden_act: 'quick_gelu'; known: silu"),
    ({"rope_scaling": {"rope_type": "mystery", "factor": 2.0}}, "rotary angles.*mystery"),
    ({"num_attention_heads": "four"}, "can't be used.*str"),
    ({"rms_norm_eps": "small"}, "can't be used.*small"),
    ({"rope_parameters": "plain"}, "can't be used"),
    ({"intermediate_size": 64}, r"down_proj.weight .and 2 more. has shape \[32, 48\], expected "),
    ({"draft_vocab_size": DRAFT + 1}, r"lm_head.weight has shape \[20, 32\], expected \[21, 32\]"),
    ({"target_hidden_size": 64}, r"fc.weight has shape \[32, 96\], expected \[32, 192\]"),
    ({"fc_norm": True}, "lack fc_norm.0.weight"),
    ({"eagle_aux_hidden_state_layer_ids": [2, 6, 14]}, "the model has 1 to 12"),
    ({"layer_types": ["sliding_attention"]}, r"\['sliding_attention'\] .*sliding_window None"),
    ({"use_sliding_window": True, "sliding_window": 6}, r"layer_types \[\].*sliding_window 6"),
    ({"rope_parameters": {"full_attention": {"rope_theta": 10.0}}}, "by kind of layer"),
    ({"speculators_model_type": "peagle"}, "speculators_model_type 'peagle'.*known: "),
]
AT = "midlayer.self_attn"
FEWER = f"embedding has {VOCAB - 1} tokens, the target has {VOCAB}"
TENSORS = [
    ("norm.weight", None, "lack norm.weight: download it again"),
    ("d2t", None, "lack d2t"),
    ("lm_head.weight", None, "lacks lm_head.weight"),
    (f"{AT}.k_proj.weight", torch.zeros(16, 32), r"has shape \[16, 32\], expected \[16, 64\]"),
    (f"{AT}.q_norm.weight", torch.ones(8), f"no place for {AT}.q_norm.weight"),
    (f"{AT}.o_proj.bias", torch.ones(32), f"no place for {AT}.o_proj.bias"),
    ("d2t", torch.zeros(DRAFT + 1, dtype=torch.int64), r"d2t has shape \[21\]"),
    ("d2t", torch.full((DRAFT,), VOCAB), f"names token .* must be ids from 0 to {VOCAB - 1}"),
    ("d2t", -torch.arange(DRAFT), "more than once"),
    ("embed_tokens.weight", torch.zeros(VOCAB - 1, D), FEWER),
]


def test_what_does_not_fit_is_refused(tmp_path):
    for change, match in CONFIGS:
        refuse(tmp_path / "drafter", EAGLE3 | change, eagle3(), match)
    for name, tensor, match in TENSORS:
        state = {k: v for k, v in (eagle3() | {name: tensor}).items() if v is not None}
        refuse(tmp_path / "drafter", EAGLE3, state, match)
    whole = eagle3() | {"embed_tokens.weight": torch.zeros(VOCAB, D)}
    for i, (config, state) in enumerate([(LLAMA, eagle1()), (EAGLE3, eagle3()), (EAGLE3, whole)]):
        match = "reads hidden states 32 wide, the target's are 64"
        refuse(tmp_path / str(i), config, state, match, size=64)
    match = "must be ids from 0 to 11"
    refuse(tmp_path / "few", EAGLE3 | {"vocab_size": 10}, eagle3(), match, vocab=12)


def test_a_broken_folder_is_refused(tmp_path):
    folder = tmp_path / "drafter"
    refuses(r"has no weights", read, folder)
    write(folder, LLAMA, eagle1())
    (folder / "model.safetensors").write_bytes(b"broken")
    refuses(r"can't be read as weights .*download it again", read, folder)
    (folder / "model.safetensors").unlink()
    refuses(r"has no weights: none of model.safetensors", read, folder)
    # anything but tensors is not unpickled
    torch.save({"fc.weight": Path("x")}, folder / "pytorch_model.bin")
    refuses("can't be read as weights", read, folder)
    (folder / "pytorch_model.bin").unlink()
    (folder / "part.bin").write_bytes(b"broken")
    index = folder / "pytorch_model.bin.index.json"
    index.write_text('{"weight_map": {"fc.weight": "part.bin"}}')
    refuses("index.json can't be read as weights", read, folder)
    index.unlink()
    for text, words in (("{}", "weight_map"), ('{"weight_map": {"fc.weight": "a.bin"}}', "a.bin")):
        (folder / "model.safetensors.index.json").write_text(text)
        refuses(f"index.json can't be read as weights .*{words}", read, folder)
