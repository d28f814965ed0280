"""A `.gguf` file as a bfloat16 folder that transformers reads.

By itself, transformers reads such a file's metadata anew for the configuration, the weights and the
tokenizer, and makes the table of tensor names anew for every module. `read_once` spares both.
"""

from __future__ import annotations

import functools
import io
import math
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
    PreTrainedTokenizerFast,
)
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from quickbeam.errors import InvalidInput, first_line, refuse_incomplete
from quickbeam.models.families.reading import PARTIAL, NotDescribed
from quickbeam.models.gguf.architecture import architecture_of
from quickbeam.models.gguf.file import GgufFile, parts_of
from quickbeam.models.gguf.metadata import INSTEAD, Metadata, scaling_of
from quickbeam.models.gguf.names import ANGLES
from quickbeam.models.gguf.tokenizer import (
    chat_templates,
    file_eos_ids,
    load_tokenizer,
    token_ids,
)

# fields that say how tensors of a file are ordered, which transformers knows by itself
ORDERS = ("architectures", "gates_apart", "value_heads_tiled")
# what transformers raises for a file that it can't read
UNREADABLE = (
    *(ValueError, LookupError, TypeError, AttributeError, ArithmeticError, NotImplementedError),
    StrictDataclassError,
)
EPSILONS = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")


def convert(gguf: Path, folder: Path, end_tokens: Sequence[str] = ()) -> None:
    """Write a .gguf model as a bfloat16 Hugging Face folder.

    The folder holds config, weights, tokenizer with chat template, and generation config.

    `end_tokens`: any of these ends an answer; without them, the file's own do. Raises
    `InvalidInput` for metadata that may change answers and is not known, and `OSError` if the
    weights can't be written.
    """
    folder.mkdir()
    file = GgufFile(gguf)
    # the loaders draw their tqdm bars on stderr
    with redirect_stderr(io.StringIO()), read_once():
        model, tokenizer = load(file)
    # A new config, because the loaded one would send its readers through the GGUF quantizer.
    fields = {key: value for key, value in model.config.to_dict().items() if key[0] != "_"}
    fields.pop("quantization_config", None)
    config = AutoConfig.for_model(**fields)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    path = folder / "model.safetensors"
    try:
        save_file(weights, path, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk raises this
        raise OSError(f"writing {folder.name}/{path.name} failed ({error})") from error
    # safetensors makes the file readable by its owner only
    path.chmod((folder / "config.json").stat().st_mode)
    tokenizer.save_pretrained(folder, save_jinja_files=False)  # of several templates in a folder
    ends = [tokenizer.convert_tokens_to_ids(token) for token in end_tokens]
    known = file_eos_ids(file.metadata, tokenizer)
    ends = ends or sorted(known, key=lambda token: (token != config.eos_token_id, token))
    GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=ends or None,
        pad_token_id=config.pad_token_id,
    ).save_pretrained(folder)


def load(file: GgufFile) -> tuple[Any, Any]:
    """Return the model of a .gguf file in bfloat16, and its tokenizer.

    Raises `InvalidInput` if it lacks weights, or has metadata that is not known.
    """
    path = file.path
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    try:
        config = config_of(file, source)
        tokenizer = _tokenizer(file, source)
        model, about = AutoModelForCausalLM.from_pretrained(
            **source,
            config=config,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # `refuse_incomplete` names them
        )
    except InvalidInput:
        raise
    except UNREADABLE as error:
        raise InvalidInput(f"transformers can't read it: {first_line(error)}") from error
    refuse_incomplete(about["missing_keys"], about["mismatched_keys"])
    return model, tokenizer


def config_of(file: GgufFile, source: dict[str, str]) -> Any:
    """Return a file's configuration.

    That of an architecture which quickbeam describes holds all that the metadata says. That of
    another is made by transformers, which reads a part. `source`: where transformers finds the
    file. Raises `InvalidInput` for metadata that is not read and may change answers.
    """
    try:
        _, fields = architecture_of(file)
    except NotDescribed:
        config = AutoConfig.from_pretrained(**source)
        _refuse_unread(file, config)
    else:
        config = AutoConfig.for_model(**_for_transformers(fields))
    tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        ids = token_ids(file.metadata, key, tokens)
        setattr(config, f"{name}_token_id", ids[0] if ids else None)
    return config


def _for_transformers(fields: dict[str, Any]) -> dict[str, Any]:
    """Return a file's configuration in the words of transformers alone."""
    fields = {name: value for name, value in fields.items() if name not in ORDERS}
    rope, dim = fields.get("rope_parameters", {}), fields["head_dim"]
    if (rotary_dim := rope.pop("rotary_dim", dim)) != dim:
        if fields["model_type"] not in PARTIAL:
            raise InvalidInput(
                f"its angles turn {rotary_dim} dimensions of heads of {dim} "
                f"(rope.dimension_count), which transformers doesn't do for it: {INSTEAD}"
            )
        rope["partial_rotary_factor"] = rotary_dim / dim
    if rope.get("rope_type") == "longrope":  # the context ends where the others would begin
        rope["long_factor"] = rope["short_factor"]
    if fields["model_type"] == "lfm2":
        fields["block_auto_adjust_ff_dim"] = False  # its width is that of the tensors
    return fields


def _refuse_unread(file: GgufFile, config: Any) -> None:
    """Raise `InvalidInput` for metadata that transformers doesn't read and that may change answers.

    `config`: what transformers made of it.
    """
    m = Metadata(file, str(file.metadata.get("general.architecture")))
    read = GGUF_CONFIG_MAPPING.get(config.model_type, {})
    m.note(*(key for key, name in read.items() if name is not None))
    if any(m.has(one) for one in ANGLES) or scaling_of(m)["rope_type"] != "default":
        raise m.refusal("rope.scaling", "scales the rotary angles")
    rope = getattr(config, "rope_parameters", None) or {}
    same: dict[str, Any] = {"rope.freq_base": rope.get("rope_theta")}
    epsilons = (getattr(config, name, None) for name in EPSILONS)
    same["attention.layer_norm_epsilon"] = next((one for one in epsilons if one), None)
    if rope and getattr(config, "num_attention_heads", 0):
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        same["rope.dimension_count"] = int(dim * rope.get("partial_rotary_factor", 1))
    for key, value in same.items():
        own = m.get(key)
        if own is not None and value is not None and not math.isclose(own, value, rel_tol=1e-6):
            raise m.refusal(key, f"is {own}")
    m.refuse_unknown()
    if getattr(config, "max_position_embeddings", None) == 0:
        config.max_position_embeddings = m.context_length


def _tokenizer(file: GgufFile, source: dict[str, str]) -> Any:
    """Return a file's tokenizer; that of transformers for kinds that quickbeam doesn't know.

    transformers splits texts for every byte-level tokenizer of such files as GPT-2 does.
    """
    try:
        own = load_tokenizer(file)
    except NotDescribed:
        tokenizer = AutoTokenizer.from_pretrained(**source)
        tokenizer.chat_template = chat_templates(file.metadata)
        return tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=own.backend_tokenizer,
        chat_template=own.chat_template,
        **own.special_tokens_map,
    )


_patching = threading.Lock()


class Reader(gguf.GGUFReader):
    """A `GGUFReader` over a plain array, with the tensors of all files of a model.

    Each string is a slice, and slices of a memory map take ten times as long.
    """

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped).view(np.ndarray)

    @classmethod
    def whole(cls, path: str) -> Reader:
        """Return the reader of a model's first file, and of those that follow it."""
        first, *others = (cls(str(part)) for part in parts_of(Path(path)))
        for other in others:
            first.tensors += other.tensors
        return first


@contextmanager
def read_once() -> Iterator[None]:
    """Within this context, read a file's metadata and make each table of tensor names only once.

    It replaces functions of the `gguf` module meanwhile, for one thread at a time.
    """
    library: Any = gguf
    kept = functools.lru_cache(maxsize=1)(Reader.whole)
    mended = {
        "GGUFReader": lambda path, *_: kept(str(path)),
        "get_tensor_name_map": functools.cache(library.get_tensor_name_map),
    }
    with _patching, ExitStack() as patches:
        for name, function in mended.items():
            patches.callback(setattr, library, name, getattr(library, name))
            setattr(library, name, function)
        yield
