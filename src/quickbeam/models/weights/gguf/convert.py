"""Writes a `.gguf` file as a folder that transformers reads, too: its configuration, weights and
tokenizer. The default model is kept like this, in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quickbeam.models.weights.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.weights.parameters import names


def convert(gguf: Path, folder: Path, end_tokens: Sequence[str] = ()) -> None:
    """Write a .gguf model of a plain layout as a bfloat16 Hugging Face folder.

    The folder holds config, weights, tokenizer with chat template, and generation config.
    `end_tokens`: any of these ends an answer; without them, those that the file names do. Raises
    `InvalidInput` for a file that can't be read, and `OSError` if the weights can't be written.
    """
    folder.mkdir()
    checkpoint = GgufCheckpoint(gguf, torch.bfloat16, None)
    tokenizer = _tokenizer_of(checkpoint)
    config = _config_of(checkpoint, tokenizer)
    config.save_pretrained(folder)
    path = folder / "model.safetensors"
    try:
        save_file(_weights_of(checkpoint), path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk raises this
        raise OSError(f"writing {folder.name}/{path.name} failed ({error})") from error
    # safetensors makes the file readable by its owner only
    path.chmod((folder / "config.json").stat().st_mode)
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # of several templates in a folder
    eos_ids = [tokenizer.convert_tokens_to_ids(token) for token in end_tokens]
    if not eos_ids:
        eos_ids = sorted(checkpoint.eos_ids, key=lambda id: (id != config.eos_token_id, id))
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=eos_ids or None,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)


def _config_of(checkpoint: GgufCheckpoint, tokenizer: PreTrainedTokenizerFast) -> PreTrainedConfig:
    config = AutoConfig.for_model(**checkpoint.config.to_dict())
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    config.dtype = checkpoint.dtype
    return config


def _weights_of(checkpoint: GgufCheckpoint) -> dict[str, torch.Tensor]:
    """Return a file's weights by name. A head that is the embedding is left out."""
    wanted = names(checkpoint.stack)
    if checkpoint.config.tie_word_embeddings:
        wanted -= {tensor.name for tensor in checkpoint.stack.head.weights}
    return {name: checkpoint(name).to(checkpoint.dtype).contiguous() for name in sorted(wanted)}


def _tokenizer_of(checkpoint: GgufCheckpoint) -> PreTrainedTokenizerFast:
    tokenizer = checkpoint.tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer,
        chat_template=tokenizer.chat_template,
        **tokenizer.special_tokens_map,
    )
