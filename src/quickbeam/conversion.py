"""A `.gguf` file as a bfloat16 folder that transformers reads.

By itself, transformers reads such a file's metadata anew for the configuration, the weights and the
tokenizer, and makes the table of tensor names anew for every module. `read_once` spares both.
"""

from __future__ import annotations

import functools
import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers import pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GgufConfig,
)

from quickbeam.errors import refuse_incomplete

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def convert(gguf: Path, folder: Path, end_tokens: Sequence[str] = ()) -> None:
    """Write a .gguf model as a bfloat16 Hugging Face folder.

    The folder holds config, weights, tokenizer with chat template, and generation config.

    `end_tokens`: any of these ends an answer; without them, the file's own do. Raises
    `OSError` if the weights can't be written.
    """
    folder.mkdir()
    # the loaders draw their tqdm bars on stderr
    with redirect_stderr(io.StringIO()), read_once():
        model, tokenizer = load(gguf)
    # A new config, because the loaded one would send its readers through the GGUF quantizer.
    fields = {key: value for key, value in model.config.to_dict().items() if key[0] != "_"}
    fields.pop("quantization_config", None)
    config = AutoConfig.for_model(**fields)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    weights = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    file = folder / "model.safetensors"
    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:  # a full disk raises this
        raise OSError(f"writing {folder.name}/{file.name} failed ({error})") from error
    # safetensors makes the file readable by its owner only
    file.chmod((folder / "config.json").stat().st_mode)
    tokenizer.save_pretrained(folder)
    ends = [tokenizer.convert_tokens_to_ids(token) for token in end_tokens] or config.eos_token_id
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=ends, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def load(file: Path) -> tuple[Any, Any]:
    """Return the model of a .gguf file in bfloat16, and its tokenizer.

    Raises `InvalidInput` if it lacks weights.
    """
    source = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    model, about = AutoModelForCausalLM.from_pretrained(
        **source,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # `refuse_incomplete` names them
    )
    refuse_incomplete(about["missing_keys"], about["mismatched_keys"])
    tokenizer = AutoTokenizer.from_pretrained(**source)
    split_digits(tokenizer, file)
    return model, tokenizer


def split_digits(tokenizer: PreTrainedTokenizerBase, file: Path) -> None:
    """Make a tokenizer from a `.gguf` file split off digits first, where the file says so.

    transformers reads every BPE tokenizer of such files as GPT-2's, which doesn't.
    """
    pre = gguf.GGUFReader(file).get_field("tokenizer.ggml.pre")
    if pre is not None and pre.contents() == "smollm":
        digits = pre_tokenizers.Digits(individual_digits=True)
        split = [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)


_patching = threading.Lock()


class Reader(gguf.GGUFReader):
    """A `GGUFReader` over a plain array.

    Each string is a slice, and slices of a memory map take ten times as long.
    """

    @property
    def data(self) -> Any:
        return self._data

    @data.setter
    def data(self, mapped: Any) -> None:
        self._data = np.asarray(mapped).view(np.ndarray)


@contextmanager
def read_once() -> Iterator[None]:
    """Within this context, read a file's metadata and make each table of tensor names only once.

    It replaces functions of the `gguf` module meanwhile, for one thread at a time.
    """
    library: Any = gguf
    kept = functools.lru_cache(maxsize=1)(Reader)
    mended = {
        "GGUFReader": lambda path, *_: kept(str(path)),
        "get_tensor_name_map": functools.cache(library.get_tensor_name_map),
    }
    with _patching, ExitStack() as patches:
        for name, function in mended.items():
            patches.callback(setattr, library, name, getattr(library, name))
            setattr(library, name, function)
        yield
