"""Builds a drafter from what `--drafter` names.

This is a smaller model, a feature drafter in any layout that `checkpoints.py` reads, a block
drafter, an assistant of Gemma 4, or an MTP head in the model's own checkpoint.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from quickbeam.drafters.assistant import is_assistant, load_assistant
from quickbeam.drafters.base import Drafter
from quickbeam.drafters.block import BlockDrafter
from quickbeam.drafters.block_files import MASK, is_block, load_block
from quickbeam.drafters.checkpoints import is_eagle, load_eagle
from quickbeam.drafters.draft_model import LMDrafter, Translation, same_tokens
from quickbeam.drafters.eagle import eagle_drafter
from quickbeam.drafters.folder import TargetParts
from quickbeam.drafters.mtp import load_mtp
from quickbeam.errors import InvalidInput
from quickbeam.hub.mtp import MTP
from quickbeam.models import builtin
from quickbeam.models.base import Model
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.opening import open_model
from quickbeam.models.weights.checkpoint import WANTED, local_folder

logger = logging.getLogger(__name__)


def load_drafter(
    name: str,
    target: Model,
    tokenizer: Any,
    *,
    model: str = "",
    progress: Any = None,
    weights: str | None = None,
) -> Drafter:
    """Load the drafter `name` for `target`.

    - `name`: a folder, a `.gguf` file, a built-in model or a Hugging Face id; or `MTP`, a head in
      the target's own checkpoint, whose folder, file or id is `model`.
    - `tokenizer`: the target's; a smaller model may have another one (`Translation`).
    - `weights`: the weight format of a smaller model (see `make_model`). None takes the target's.

    Raises `InvalidInput` for what is no drafter of this target, and for a feature drafter with
    `weights` other than `bfloat16`.
    """
    if name == MTP:
        _refuse_weights(name, weights)
        file = Path(model).expanduser()
        return load_mtp(file if file.suffix == ".gguf" else local_folder(model, None), target)
    place = Path(builtin.resolve(name, progress)).expanduser()
    if not place.exists() and name.count("/") == 1 and not name.startswith((".", "~", "/")):
        place = local_folder(name, None, [*WANTED, MASK])
    if place.is_dir() and is_assistant(place):
        _refuse_weights(name, weights)
        return load_assistant(place, target)
    block = is_block(place)
    if block or (place.is_dir() and is_eagle(place)):
        _refuse_weights(name, weights)
        if target.streamed is not None:
            logger.warning("the model's embedding and head are in memory for this drafter, too")
        parts = TargetParts.of(target)
        drafter: Drafter
        if block:
            drafter = BlockDrafter(load_block(place, parts), target)
        else:
            drafter = eagle_drafter(load_eagle(place, parts), target)
        drafter.folder = place
        return drafter
    weights = weights or target.weights
    opened = open_model(str(place), target.dtype, target.device, weights=weights, progress=progress)
    sizes = target.vocab_size, opened.model.vocab_size
    if not same_tokens(tokenizer, opened.tokenizer, sizes):
        translation = Translation(tokenizer, opened.tokenizer, sizes)
        return LMDrafter(opened.model, sizes[1], translation=translation)
    return LMDrafter(opened.model, target.vocab_size)


def _refuse_weights(name: str, weights: str | None) -> None:
    if weights not in (None, BFLOAT16):
        raise InvalidInput(
            f"draft_weights={weights!r}: {name} is a feature drafter, which stays bfloat16; leave "
            "it out"
        )
