"""Builds a drafter from what `--drafter` names.

This is a smaller model, a feature or block drafter or an assistant of Gemma 4 in any layout that
`layouts.py` has, or an MTP head in the model's own checkpoint.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from quickbeam.config import ReportProgress
from quickbeam.drafters.assistant import load_assistant
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.block import BlockDrafter
from quickbeam.drafters.block_files import MASK, load_block
from quickbeam.drafters.draft_model import LMDrafter, same_tokens
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.eagle_files import load_eagle
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.layouts import ASSISTANT, BLOCK, layout_of
from quickbeam.drafters.mtp import load_mtp
from quickbeam.drafters.self_draft import load_self
from quickbeam.errors import InvalidInput
from quickbeam.hub import SELF
from quickbeam.hub.mtp import MTP
from quickbeam.models import builtin
from quickbeam.models.base import Model
from quickbeam.models.native.library import Kernels
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.opening import open_model
from quickbeam.models.weights.checkpoint import WANTED, local_folder

logger = logging.getLogger(__name__)

MOST_BYTES = 512  # ids before the first merges: bytes, and tokens with a meaning of their own


def load_drafter(
    name: str,
    target: Model,
    tokenizer: Any,
    *,
    model: str = "",
    progress: ReportProgress | None = None,
    weights: str | None = None,
    kernels: Kernels | None = None,
) -> Drafter:
    """Load the drafter `name` for `target`.

    - `name`: a folder, a `.gguf` file, a built-in model or a Hugging Face id; or `MTP`, a head in
      the target's own checkpoint, whose folder, file or id is `model`; or `SELF`, a copy of the
      target in 4 bits.
    - `tokenizer`: the target's, which a smaller model must have, too.
    - `weights`: the weight format of a smaller model (see `make_model`). None takes the target's.
    - `kernels`: what runs a feature or block drafter, if they can; None: PyTorch does.

    Raises `InvalidInput` for what is no drafter of this target, a smaller model with another
    tokenizer among it, and for a feature drafter with `weights` other than `bfloat16`.
    """
    if name == MTP:
        _refuse_weights(name, weights)
        file = Path(model).expanduser()
        return load_mtp(file if file.suffix == ".gguf" else local_folder(model, None), target)
    if name == SELF:
        return load_self(target, ranks_ids(tokenizer), progress, weights)
    path = Path(builtin.resolve(name, progress)).expanduser()
    if not path.exists() and name.count("/") == 1 and not name.startswith((".", "~", "/")):
        path = local_folder(name, None, [*WANTED, MASK])
    layout = layout_of(path)
    if layout is not None:
        _refuse_weights(name, weights)
        drafter = _load_network(layout.kind, path, target, kernels)
        drafter.folder = path
        return drafter
    weights = weights or target.weights
    opened = open_model(str(path), target.dtype, target.device, weights=weights, progress=progress)
    sizes = (target.vocab_size, opened.model.vocab_size)
    if not same_tokens(tokenizer, opened.tokenizer, sizes):
        raise InvalidInput(
            f"{name} has another tokenizer than the model, and can't draft for it: name a smaller "
            "model of its family, or leave the drafter out"
        )
    return LMDrafter(opened.model, target.vocab_size, ranks_ids(tokenizer))


def ranks_ids(tokenizer: Any) -> bool:
    """Whether a token's id is about its rank by frequency.

    The tokens of byte-level BPE stand in the order in which they were merged. SentencePiece's have
    single characters, the most frequent ones, at the end.
    """
    single: int | None = tokenizer.get_vocab().get("e")
    return single is not None and single < MOST_BYTES


def _load_network(kind: str, path: Path, target: Model, kernels: Kernels | None) -> Drafter:
    """Load a drafter that has a layout of its own, of a `kind` of `layouts.py`."""
    if kind == ASSISTANT:
        return load_assistant(path, target)
    if target.streamed is not None:
        logger.warning("the model's embedding and head are in memory for this drafter, too")
    parts = TargetParts.of(target)
    if kind == BLOCK:
        return BlockDrafter(load_block(path, parts, kernels), target, kernels)
    return eagle_drafter(load_eagle(path, parts), target, kernels)


def _refuse_weights(name: str, weights: str | None) -> None:
    if weights not in (None, BFLOAT16):
        raise InvalidInput(
            f"draft_weights={weights!r}: {name} is a feature drafter, whose format can't be "
            "chosen; leave it out"
        )
