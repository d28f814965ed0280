"""A `.gguf` file in transformers' words: its configuration, weights and tokenizer.

The default model is kept like this, as a folder in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quickbeam.errors import InvalidInput, first_line
from quickbeam.models.families.reading import PARTIAL
from quickbeam.models.gguf.checkpoint import GgufCheckpoint
from quickbeam.models.stack_tensors import names

# fields of a file whose tensors are laid out otherwise than transformers has them
LAYOUTS = ("gates_apart", "head_norms_stacked", "value_heads_tiled")


def convert(gguf: Path, folder: Path, end_tokens: Sequence[str] = ()) -> None:
    """Write a .gguf model as a bfloat16 Hugging Face folder.

    The folder holds config, weights, tokenizer with chat template, and generation config.

    `end_tokens`: any of these ends an answer; without them, the file's own do. Raises
    `NotDescribed` and `InvalidInput` for a file that can't be read, and `OSError` if the weights
    can't be written.
    """
    folder.mkdir()
    checkpoint = GgufCheckpoint(gguf, torch.bfloat16, None)
    config, tokenizer = config_of(checkpoint), tokenizer_of(checkpoint)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    path = folder / "model.safetensors"
    try:
        save_file(weights_of(checkpoint), path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk raises this
        raise OSError(f"writing {folder.name}/{path.name} failed ({error})") from error
    # safetensors makes the file readable by its owner only
    path.chmod((folder / "config.json").stat().st_mode)
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # of several templates in a folder
    ends = [tokenizer.convert_tokens_to_ids(token) for token in end_tokens]
    own = sorted(checkpoint.eos_ids, key=lambda token: (token != config.eos_token_id, token))
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=ends or own or None,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)


def config_of(checkpoint: GgufCheckpoint) -> PreTrainedConfig:
    """Return a file's configuration.

    Raises `InvalidInput` for a file whose tensors or angles transformers has otherwise.
    """
    fields = checkpoint.config.to_dict()
    otherwise = [name for name in LAYOUTS if fields.pop(name, False)]
    if rope := dict(fields.get("rope_parameters") or {}):
        fields["rope_parameters"] = rope
    if (rotary_dim := rope.pop("rotary_dim", None)) is not None:
        dim = fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"]
        rope["partial_rotary_factor"] = rotary_dim / dim
        otherwise += ["rope.dimension_count"] * (fields["model_type"] not in PARTIAL)
    if otherwise:
        raise InvalidInput(
            f"transformers has this model otherwise than the file ({', '.join(otherwise)}): take "
            "the model's folder instead"
        )
    if rope.get("rope_type") == "longrope":  # the context ends where the others would begin
        rope["long_factor"] = rope["short_factor"]
    if fields["model_type"] == "lfm2":
        fields["block_auto_adjust_ff_dim"] = False  # its width is that of the tensors
    try:
        config = AutoConfig.for_model(**fields)
    except (ValueError, TypeError, StrictDataclassError) as error:
        raise InvalidInput(f"transformers can't read its metadata: {first_line(error)}") from error
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    tokenizer = tokenizer_of(checkpoint)
    config.bos_token_id = tokenizer.bos_token_id
    config.eos_token_id = tokenizer.eos_token_id
    config.pad_token_id = tokenizer.pad_token_id
    return config


def weights_of(checkpoint: GgufCheckpoint) -> dict[str, torch.Tensor]:
    """Return a file's weights by name, in the checkpoint's number format.

    A head that is the embedding is left out. `checkpoint`: without kernels.
    """
    wanted = names(checkpoint.stack)
    if checkpoint.config.tie_word_embeddings:
        wanted -= {one.name for one in checkpoint.stack.head.weights}
    return {name: checkpoint(name).to(checkpoint.dtype).contiguous() for name in sorted(wanted)}


def tokenizer_of(checkpoint: GgufCheckpoint) -> PreTrainedTokenizerFast:
    """Return a file's tokenizer."""
    own = checkpoint.tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=own.backend_tokenizer,
        chat_template=own.chat_template,
        **own.special_tokens_map,
    )
