"""Tiny random models of many layouts, and the plain way to run them."""

import copy

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GptOssConfig,
    HeliumConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from quickbeam.tree import TokenTree

VOCAB = 97
SIZES = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=4096,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "llama-llama3-rope": LlamaConfig(**SIZES, rope_parameters=LLAMA3_ROPE),
    "llama-multi-head": LlamaConfig(
        **{**SIZES, "num_key_value_heads": 4}, attention_bias=True, tie_word_embeddings=True
    ),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7, head_dim=16),
    "qwen2": Qwen2Config(**SIZES),
    "qwen2-window": Qwen2Config(
        **SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1
    ),
    "qwen3": Qwen3Config(**SIZES, head_dim=16),
    "gemma2-softcap-window": Gemma2Config(
        **SIZES, head_dim=8, sliding_window=6, query_pre_attn_scalar=16
    ),
    "gemma3-window": Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 6}, head_dim=8, sliding_window=6, query_pre_attn_scalar=16
    ),
    "phi3": Phi3Config(**SIZES),
    "gpt-neox": GPTNeoXConfig(
        **{k: v for k, v in SIZES.items() if k != "num_key_value_heads"}, rotary_pct=0.5
    ),
    "gpt2": GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=512),
    "olmo2": Olmo2Config(**SIZES),
    "gpt-oss-sinks": GptOssConfig(
        **SIZES, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=6
    ),
}

UNDESCRIBED = HeliumConfig(**SIZES, head_dim=8)  # what the native kernels don't run


def tiny(name, dtype=torch.float32, seed=0, wide=False, layers=None, config=None):
    """A random model with logits far enough apart to tell tokens by. `wide`: heads of 32
    dimensions, as small as real ones get. `layers`: so many, not 3. `config`: of this one, not
    `name`'s."""
    torch.manual_seed(seed)
    config = copy.deepcopy(CONFIGS[name] if config is None else config)
    if layers is not None:
        config.num_hidden_layers = layers
        if kinds := getattr(config, "layer_types", None):
            config.layer_types = [kinds[i % len(kinds)] for i in range(layers)]
    if wide:
        config.hidden_size = 128
        if "head_dim" in config.to_dict():
            config.head_dim = 32
    model = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation="eager"
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    return model


@torch.inference_mode()
def path_logits(model, prefix, tree):
    """`[n, vocab]`: each root-to-node path run on its own, prefix and all, as transformers does
    it."""
    rows = []
    for node in range(len(tree)):
        ids = prefix + [tree.token[i] for i in tree.path(node)]
        rows.append(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1])
    return torch.stack(rows)


def random_tree(generator, nodes, vocab=VOCAB):
    """A tree of up to `nodes` nodes, any shape."""

    def below(high):
        return int(torch.randint(high, (1,), generator=generator))

    tree = TokenTree(below(vocab))
    for _ in range(nodes - 1):
        parent, token = below(len(tree)), below(vocab)
        if tree.child(parent, token) is None:
            tree.add(parent, token, "random")
    return tree
