"""A model's folder as data: its configuration, and its tensors by name and row.

transformers is imported only for a configuration that another version of it wrote, to fill in what
that leaves out.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quickbeam.errors import InvalidInput, first_line, refuse_incomplete, some_of
from quickbeam.hub.cache import cache_folder
from quickbeam.hub.mtp import is_mtp
from quickbeam.models.families import FAMILIES, stack_of
from quickbeam.models.families.nearest import undescribed
from quickbeam.models.families.reading import ATTRIBUTES, PAGE, NotDescribed, check_count
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.quantised import BlockRows, Weight
from quickbeam.models.rotary import limit_context
from quickbeam.models.stack import Stack
from quickbeam.models.weights.parameters import Parameters, experts, linears, names
from quickbeam.models.weights.prequantised import (
    UNREAD,
    QuantisedTensor,
    method_of,
    refuse_mlx,
    refuse_unnamed,
)
from quickbeam.models.weights.shapes import check_shapes, expected, refuse_shared_experts
from quickbeam.models.weights.sources import (
    COMPOSITES,
    TRANSPOSED,
    ParameterSource,
    PlainTensor,
    dense,
    language_part,
    source_of,
    tensor_names,
)
from quickbeam.models.weights.tensor_files import DTYPES, TensorFiles

logger = logging.getLogger(__name__)

WANTED = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
UNWANTED = ("original/*", "consolidated*", "onnx/*", "metal/*")  # other forms of the same
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
# types of tensors, as safetensors writes them
PLAIN_TYPES = {"BF16", "F16", "F32"}
CONVERTED_TYPES = {"F64", "F8_E4M3", "F8_E5M2"}  # read with a warning
INTEGER_TYPES = {"U8", "I8", "I16", "I32", "I64"}  # of weights in few bits
COMPLETE = "5."  # versions of transformers whose configurations say all that a family reads
# fields of earlier versions that are in `rope_parameters` since
EARLIER = {"rope_scaling", "partial_rotary_factor", "rotary_pct", "rope_theta"}


class ModelConfig:
    """A configuration as data: its fields are the attributes."""

    def __init__(self, fields: dict[str, Any]) -> None:
        reserved = dir(ModelConfig)
        for name, value in fields.items():
            if name not in reserved:
                self.__dict__[name] = value

    @property
    def attribute_map(self) -> dict[str, str]:
        """Other names of attributes, as transformers has them."""
        return ATTRIBUTES.get(self.__dict__.get("model_type", ""), {})

    def __getattr__(self, name: str) -> Any:
        if name in self.attribute_map:
            return getattr(self, self.attribute_map[name])
        if name == "num_hidden_layers" and self.__dict__.get("layers_block_type"):
            return len(self.__dict__["layers_block_type"])
        raise AttributeError(f"the configuration has no {name}")

    def to_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)

    def get_text_config(self) -> ModelConfig:
        return self

    @property
    def whole_type(self) -> str:
        """The `model_type` of the model that this is the language part of, or of this one."""
        return str(self.__dict__.get("_whole") or self.__dict__.get("model_type", ""))


def read_json(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file; none where there is no file.

    Raises `InvalidInput` where it can't be read.
    """
    try:
        fields = json.loads(path.read_text(encoding="utf-8"), object_hook=_plain)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(f"{path} can't be read: {error}") from error
    return fields if isinstance(fields, dict) else {}


def _plain(value: dict[str, Any]) -> Any:
    """Return infinity and NaN for what transformers writes in place of these."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


def read_config(folder: Path) -> ModelConfig:
    """Return a folder's configuration, with all that transformers fills in.

    Of a model that reads more than text, it is that of the language part (`language_part`).

    Configurations of other versions are read by transformers once, and kept in the cache folder.
    Raises `InvalidInput` where that fails.
    """
    fields = read_json(folder / "config.json")
    refuse_mlx(fields)
    _check_fields(fields)
    if isinstance(fields.get("text_config"), dict):
        _check_fields(fields["text_config"])
    language = language_part(fields)
    if str(fields.get("transformers_version")).startswith(COMPLETE) and _is_complete(language):
        return ModelConfig(language)
    identity = version("transformers") + json.dumps(fields, sort_keys=True)
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    cached = cache_folder() / "configs" / f"{digest}.json"
    completed = dict[str, Any]()
    with suppress(InvalidInput):  # damaged, as by a power cut: it is written again
        completed = read_json(cached)
    if not completed:
        completed = _completed_by_transformers(folder)
        try:
            cached.parent.mkdir(parents=True, exist_ok=True)
            part = cached.with_suffix(f".{os.getpid()}.tmp")
            part.write_text(json.dumps(completed), encoding="utf-8")
            os.replace(part, cached)
        except OSError as error:
            logger.info("the configuration can't be kept in %s: %s", cached.parent, error)
    return ModelConfig(language_part(completed))


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise `InvalidInput` for fields that transformers would fail on in other words."""
    kind = fields.get("model_type")
    if not isinstance(kind, str | None):
        raise InvalidInput(f"its config.json has the model_type {kind!r}: download it again")
    for name in ("num_hidden_layers", "n_layer"):  # transformers makes a list of so many
        if fields.get(name) is not None:
            check_count(fields[name], "layers")


def _completed_by_transformers(folder: Path) -> dict[str, Any]:
    """Return all fields of a folder's configuration as transformers reads it."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        text = config.to_json_string(use_diff=False)
        fields: dict[str, Any] = json.loads(text, object_hook=_plain)
    except Exception as error:  # of any kind, by what the file says
        raise InvalidInput(f"its config.json can't be read: {first_line(error)}") from error
    return fields


def refuse_undescribed(folder: Path) -> None:
    """Raise `NotDescribed` for a folder with a model of no family, before anything reads more."""
    fields = read_json(folder / "config.json")
    if not isinstance(fields.get("model_type"), str):
        return  # `read_config` says why
    language = language_part(fields)
    kind = language.get("model_type")
    without_parts = kind in COMPOSITES  # an older form, which `read_config` puts into parts
    if isinstance(kind, str) and not without_parts and kind not in FAMILIES:
        raise undescribed(language, FAMILIES)


def _is_complete(fields: Mapping[str, Any]) -> bool:
    """Whether fields have the form that transformers writes.

    It adds to other forms, as of edited files.
    """
    rope = fields.get("rope_parameters")
    layered = "layer_types" in fields and fields.get("use_sliding_window", True)
    return (
        isinstance(rope, dict)
        and not fields.keys() & EARLIER
        and "tie_word_embeddings" in fields
        and bool(layered or not fields.get("sliding_window"))
    )


def local_folder(model: str, revision: str | None, wanted: Sequence[str] = WANTED) -> Path:
    """Return a model's folder: `model` itself, or what `wanted` files of a Hugging Face id are
    downloaded to.

    Weights in `.bin` files are downloaded where there are no others. Raises `InvalidInput` where
    there is no such model.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise InvalidInput(f"no such model folder or file: {model}")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    def download(patterns: list[str]) -> Path:
        folder = snapshot_download(
            model, revision=revision, allow_patterns=patterns, ignore_patterns=list(UNWANTED)
        )
        return Path(folder)

    try:
        folder = download([*wanted])
        if not any(folder.glob("*.safetensors")):
            folder = download([*wanted, "*.bin"])
        return folder
    except (HfHubHTTPError, LocalEntryNotFoundError, HFValidationError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise InvalidInput(
            f"can't load {model!r}: {reason} (give a Hugging Face id, a model "
            "folder or a .gguf file)"
        ) from error


class Checkpoint(Parameters):
    """The parameters of a folder's weight files (`Parameters`).

    Names are those of the causal LM, also where the checkpoint holds the model without its head.
    `config`: the folder's configuration. `dtype`: the format that parameters are read in; None: the
    one that the configuration names. `kernels`: read weights in few bits; without them these are
    widened. `stack`: the model's architecture.
    """

    def __init__(
        self, folder: Path, dtype: torch.dtype | None, kernels: Kernels | None = None
    ) -> None:
        """Find the source of each parameter of the stack.

        Raises `NotDescribed` for what no family describes, or is stored otherwise than the family
        says, and `InvalidInput` for parameters that are missing, or have another shape.
        """
        refuse_undescribed(folder)
        self.path, self.config = folder, read_config(folder)
        self._method = method_of(self.config)
        self._kernels = kernels
        self._files = TensorFiles(folder)
        if dtype is None:
            dtype = self._named_dtype()
        self.dtype = dtype
        limit_context(self.config)
        self.stack: Stack = stack_of(self.config, dtype)
        # the last rows that were read of tensors in few bits, by name, first and last
        self._recent = dict[tuple[str, int, int], Any]()
        self._in_blocks = set[str]()  # weights whose blocks, if any, stay blocks
        if dtype is torch.bfloat16 and kernels is not None:
            for linear, _ in linears(self.stack):
                self._in_blocks |= {rows.name for rows in linear.weights}
        self._sources = self._find_sources(self.stack)
        # parameters that keep every bit
        self._exact: set[str | None] = {layer.routing.correction for layer in experts(self.stack)}
        if self.quantised:  # most often in half precision
            self._exact |= {name for name in self._sources if len(self.shape(name)) == 1}
        check_shapes(self.stack, self.shape, expected(self.stack, self.config))

    def _named_dtype(self) -> torch.dtype:
        """Return the number format that the configuration names, or that most tensors have.

        Raises `InvalidInput` for one that nothing computes in.
        """
        named = self.config.__dict__.get("dtype") or self.config.__dict__.get("torch_dtype")
        if named is None:
            kinds = Counter(self._files.kind(name) for name in self._files.names)
            plain = [DTYPES[kind] for kind, _ in kinds.most_common() if kind in PLAIN_TYPES]
            named = plain[0] if plain else None
        name = str(named).removeprefix("torch.")
        dtype: torch.dtype | None = getattr(torch, name, None)
        if self.quantised and dtype is torch.float16:  # what AWQ and GPTQ are saved in
            return torch.bfloat16
        if dtype in FLOAT8:  # of tensors without scales
            return torch.bfloat16
        if dtype is None or dtype not in (torch.bfloat16, torch.float16, torch.float32):
            raise InvalidInput(
                f"its config.json names numbers of type {name}: give dtype bfloat16, float16 or "
                "float32"
            )
        return dtype

    def _find_sources(self, stack: Stack) -> dict[str, ParameterSource]:
        """Return the source of each parameter of a stack, by name. Sets `_like` and `_unread`."""
        head, wanted = stack.head.weights[0].name, names(stack)
        config = self.config
        parts = config.whole_type != config.model_type
        tensors = tensor_names(self._files.names, config.model_type, stack.embedding, head, parts)
        if config.tie_word_embeddings:  # either name may stand for both
            tied = tensors.get(stack.embedding) or tensors.get(head)
            if tied is not None:
                tensors.setdefault(stack.embedding, tied)
                tensors.setdefault(head, tied)

        width = config.hidden_size if config.model_type in TRANSPOSED else None
        sources = dict[str, ParameterSource]()
        read, in_blocks = set[str](), set[str]()  # names of tensors
        self._like = dict[str, Weight]()
        for name in wanted:
            source = source_of(name, tensors, self._files, self._method, width)
            if source is None:
                continue
            sources[name] = source
            self._like[name] = source.like(self._files)
            read.update(source.names)
            if isinstance(self._like[name], BlockRows):
                in_blocks.update(source.names)
        self._unread = {name: tensors[name] for name in stack.unread if name in tensors}
        read.update(self._unread.values())
        unread = {name for name, tensor in tensors.items() if tensor not in read}
        self._leave_out(unread, tensors, wanted, wanted - sources.keys())
        if self._in_blocks:
            try:
                refuse_shared_experts(stack, self._like.__getitem__)
            except NotDescribed as error:
                logger.info("%s is widened: %s", self.path, error)
                self._in_blocks.clear()
        self._check_types(read - in_blocks, bool(in_blocks))
        return sources

    def _leave_out(
        self,
        unread: Iterable[str],
        tensors: Mapping[str, str],
        wanted: Collection[str],
        missing: Collection[str],
    ) -> None:
        """Warn of tensors that are left out, as the model has no such parameters.

        `unread`: their names as of parameters. `tensors`: the tensor's name of each. `missing`:
        those parameters of the `wanted` ones that have no source. Raises `InvalidInput` for these,
        and for weights in few bits where no method is named. Raises `NotDescribed` for a bias that
        the architecture doesn't add.
        """
        odd = list[str]()
        for name in sorted(unread):
            if not is_mtp(name, self.config) and not self._is_needless(name, tensors[name]):
                odd.append(name)
        for name in odd:
            if self._method is None:
                refuse_unnamed(name)
            if name.endswith(".bias") and f"{name.removesuffix('.bias')}.weight" in wanted:
                raise NotDescribed(
                    f"its files hold {name}, and the family {self.config.model_type!r} has no such "
                    f"bias; {PAGE} says how to describe it"
                )
        refuse_incomplete(missing, [], odd)
        if odd:
            logger.warning(
                "%s: its files hold %s, which its architecture has no use for: left out",
                self.path,
                some_of(odd),
            )

    def _check_types(self, read: Iterable[str], in_blocks: bool) -> None:
        """Raise `NotDescribed` for tensors of a type that is not read.

        `in_blocks`: whether other tensors are in blocks; then float8 ones need scales, and
        `InvalidInput` is raised without. It is also raised for integers where the configuration
        doesn't say what they stand for.
        """
        kinds = {name: self._files.kind(name) for name in read}
        integers = sorted(name for name, kind in kinds.items() if kind in INTEGER_TYPES)
        if integers and self._method is None:
            raise InvalidInput(
                f"its files hold {some_of(integers)} as integers ({kinds[integers[0]]}), as "
                "quantised weights are, and its config.json has no quantization_config: download "
                "config.json again, or take the unquantised weights"
            )
        odd = {*kinds.values()} - PLAIN_TYPES - CONVERTED_TYPES
        if odd:
            raise NotDescribed(
                f"its files hold numbers of type {', '.join(sorted(odd))}; read are "
                f"{', '.join(sorted(PLAIN_TYPES | CONVERTED_TYPES))}: take another checkpoint"
            )
        converted = {name: kind for name, kind in kinds.items() if kind in CONVERTED_TYPES}
        for name, kind in sorted(converted.items()):
            if in_blocks and kind != "F64":
                raise InvalidInput(
                    f"{name} has float8 numbers and no scale, which others have: download it "
                    "again, with all of its files"
                )
        if converted:
            logger.warning(
                "%s: numbers of type %s (%s) become %s",
                self.path,
                ", ".join(sorted({*converted.values()})),
                some_of(converted),
                str(self.dtype).removeprefix("torch."),
            )

    @property
    def quantised(self) -> bool:
        """Whether it holds weights in few bits."""
        return self._method is not None

    def _is_needless(self, name: str, tensor: str) -> bool:
        """Whether a tensor says nothing about the model.

        It is a scale of activations beside quantised weights, or a bias of zeros, as GPTQ's
        libraries wrote for all weights. `name`: as of a parameter.
        """
        _, _, last = name.rpartition(".")
        if self._method is not None and last in UNREAD:
            return True
        return name.endswith(".bias") and not self._files.tensor(tensor).float().any()

    def mapped(self, name: str) -> Any:
        """Return a parameter whose rows are read from its file as they are needed.

        All rows are read where the file has them otherwise, or in another number format.
        """
        source = self._sources[name]
        if not isinstance(source, PlainTensor) or source.transposed:
            return self(name)
        if self._files.dtype(source.name) is not self.dtype:
            return self(name)
        return self._files.mapped(source.name)

    def shape(self, name: str) -> list[int]:
        return self._sources[name].shape(self._files)

    def unread(self) -> dict[str, torch.Tensor]:
        """Return what the files hold of tensors that no pass reads (`Stack.unread`), by name."""
        files = self._files
        return {
            name: files.tensor(tensor).view(files.shape(tensor))
            for name, tensor in self._unread.items()
        }

    def like(self, name: str) -> Weight:
        return self._like[name] if name in self._in_blocks else super().like(name)

    def rows(self, name: str, first: int = 0, last: int | None = None) -> Any:
        """Return rows `first` to `last` (excluded) of a parameter.

        The rows have the bits that loading the model gives: corrections of routers keep every bit,
        and so do norms and biases beside weights in few bits. Weights in few bits stay in blocks
        (`BlockRows`; of MXFP4, rows are those of the transposed matrices) where the other
        parameters are bfloat16. Raises `QuickbeamError` naming the file where it can't be read.
        """
        end, source = self.shape(name)[0], self._sources[name]
        last = end if last is None else last
        if isinstance(source, PlainTensor):
            rows = source.rows(self._files, first, last)
            if name not in self._exact:
                return rows.to(self.dtype)
            return rows.float() if rows.dtype is torch.float64 else rows
        if isinstance(source, QuantisedTensor):  # all rows are read at once
            return self._recent_rows(name, 0, end)[first:last]
        return self._recent_rows(name, first, last)

    def _recent_rows(self, name: str, first: int, last: int) -> Any:
        """Return rows of a parameter in few bits: in blocks, or widened. The last two are kept."""
        key = (name, first, last)
        if key not in self._recent:
            if len(self._recent) > 1:
                del self._recent[next(iter(self._recent))]
            source = self._sources[name]
            rows = source.rows(self._files, first, last, self._kernels)
            if name not in self._in_blocks or isinstance(rows, torch.Tensor):
                rows = dense(rows, source, self._kernels).to(self.dtype)
            self._recent[key] = rows
        return self._recent[key]

    def release(self, layers: str, layer: int | None) -> None:
        """Free what was read of tensors in few bits."""
        self._recent.clear()
