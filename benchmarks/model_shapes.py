"""Configurations with the shapes of real models."""

from __future__ import annotations

from transformers import (
    Gemma3TextConfig,
    GraniteMoeHybridConfig,
    Lfm2Config,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
)


def layers(count: int, other: str, full: set[int]) -> list[str]:
    return ["full_attention" if i in full else other for i in range(count)]


CONFIGS: dict[str, PreTrainedConfig] = {
    "Gemma-3-270M": Gemma3TextConfig(
        vocab_size=262144,
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        layer_types=layers(18, "sliding_attention", {5, 11, 17}),
        max_position_embeddings=32768,
    ),
    "Qwen3-0.6B": Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
    ),
    "LFM2-350M": Lfm2Config(
        vocab_size=65536,
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=layers(16, "conv", {2, 5, 8, 10, 12, 14}),
        tie_word_embeddings=True,
    ),
    "Granite-4.0-H-350M": GraniteMoeHybridConfig(
        vocab_size=100352,
        hidden_size=768,
        intermediate_size=2048,
        shared_intermediate_size=2048,
        num_hidden_layers=32,
        num_attention_heads=12,
        num_key_value_heads=4,
        layer_types=["attention" if i in {10, 13, 17, 27} else "mamba" for i in range(32)],
        mamba_n_heads=48,
        mamba_d_head=32,
        mamba_d_state=128,
        mamba_n_groups=1,
        num_local_experts=0,
        num_experts_per_tok=0,
        position_embedding_type="nope",
        max_position_embeddings=32768,
        tie_word_embeddings=True,
    ),
    "Qwen3.5-0.8B": Qwen3_5TextConfig(
        vocab_size=248320,
        hidden_size=1024,
        intermediate_size=3584,
        num_hidden_layers=24,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=256,
        layer_types=layers(24, "linear_attention", set(range(3, 24, 4))),
        linear_num_key_heads=16,
        linear_num_value_heads=16,
        tie_word_embeddings=True,
    ),
    "OLMoE-1B-7B": OlmoeConfig(
        vocab_size=50304,
        hidden_size=2048,
        intermediate_size=1024,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_experts=64,
        num_experts_per_tok=8,
    ),
}
