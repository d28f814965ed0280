"""The Python interface: a model, a method, answers."""

from __future__ import annotations

from functools import partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any

import torch

from quickbeam import hub, options
from quickbeam.answering import Answering, choose_budget
from quickbeam.drafters.loading import load_drafter
from quickbeam.drafters.mtp import runs_mtp
from quickbeam.drafters.texts import AnswerMemory
from quickbeam.drafting import Drafting
from quickbeam.engine.engine import MOST_ACTIVE
from quickbeam.errors import InvalidInput
from quickbeam.machine import in_own_thread
from quickbeam.methods import preset, stand_in
from quickbeam.models.formats import (
    check_weights,
    pick_device,
    refuse_memory,
    refuse_place,
    wanted_dtype,
)
from quickbeam.models.native import choice, library
from quickbeam.models.opening import open_model
from quickbeam.mtp import MTP
from quickbeam.options import Budget, check_vocab, parse_bytes
from quickbeam.params import FLAG, Rules, check_values, optional, whole

SOURCE = (
    optional(lambda given: isinstance(given, str | PathLike) and str(given) != ""),
    "a folder, a .gguf file or a Hugging Face id, as a text or a Path; None: the default",
)
FILE = (optional(lambda given: isinstance(given, str | PathLike)), "a file's path, or None")
# the arguments whose wrong types nothing else would name
ARGUMENTS: Rules = {
    "model": SOURCE,
    "drafter": SOURCE,
    "max_running": (whole(1), "at least 1 answer at a time"),
    "keep": FILE,
    "share_prefixes": FLAG,
    "progress": (optional(callable), "a function of a text and a number, or None"),
    **options.RULES,
}


class LLM(Answering):
    """A causal language model that drafts ahead and gives the answers of plain decoding.

    - `model`: a Hugging Face id, a folder or a `.gguf` file. None takes the built-in model, which
      is fetched on first use.
    - `method`: a name of `methods/__init__.py`. A call may name another one.
    - `dtype`: `bfloat16`, `float16`, `float32`, or `auto` for the checkpoint's own.
    - `device`: the device to run on. None takes CUDA where there is one, else the CPU.
    - `budget`: nodes of a draft tree, the root included, at most 512; `"auto"` (or 0): as many as
      pay, by measured cost. None takes the method's own. A call may give its own.
    - `drafter`: a smaller model, or a feature drafter of this model, named as `model` is; `mtp` is
      a head for several tokens in the model's own checkpoint. None takes the one that comes with
      the model, if there is one. The drafter is loaded when a method first needs it.
    - `vocab`: which part of the vocabulary the drafter scores, one of `options.VOCABS`. None takes
      the preset's. A call may give its own.
    - `shortlist`: about how many tokens that part has. None takes the default of
      `drafters/vocabulary.py`. A call may give its own.
    - `max_running`: how many answers run side by side, 32 by default; the others wait their turn.
    - `kv_memory`: memory for keys and values, in bytes or as in `"2GB"`; None: half of the free.
    - `memory_of_answers`: memory for prompts and answers that are over, in bytes or as in `"64MB"`;
      0 for none. Later answers draft from them. `keep`: a file that holds them from one process to
      the next; it is written when the model is closed.
    - `share_prefixes`: whether texts that begin alike share what was computed of their beginning.
    - `revision`: a branch, tag or commit of a Hugging Face id.
    - `weights`: `bfloat16`, or `int8` or `int4` (on a CPU). The model is quantised at the first
      load, and the result is kept in the cache folder. Answers are then exactly those of the
      quantised model.
    - `draft_weights`: the same for a smaller model that drafts. None takes the model's own format,
      which changes no answer.
    - `memory`: how much the model's weights may take, in bytes or as in `"2GB"`. The weights beyond
      that are brought in every pass (`docs/memory.md`): on a CPU from disk, on CUDA from the host's
      memory.
    - `progress`: called as `progress(stage, fraction)` while a built-in model is fetched and while
      the native kernels are compiled.

    Raises `InvalidInput` for arguments that can't be used, before any work.
    """

    def __init__(
        self,
        model: str | PathLike[str] | None = None,
        method: str = "auto",
        *,
        dtype: str = "bfloat16",
        device: str | None = None,
        budget: Budget | None = None,
        drafter: str | PathLike[str] | None = None,
        vocab: str | None = None,
        shortlist: int | None = None,
        max_running: int = MOST_ACTIVE,
        kv_memory: int | str | None = None,
        memory_of_answers: int | str = "64MB",
        keep: str | Path | None = None,
        share_prefixes: bool = True,
        revision: str | None = None,
        weights: str = "bfloat16",
        draft_weights: str | None = None,
        memory: int | str | None = None,
        progress: Any = None,
    ) -> None:
        check_values(locals(), ARGUMENTS)
        model = None if model is None else fspath(model)
        named = None if drafter is None else fspath(drafter)
        drafter = named or hub.shipped_drafter(model)
        asked, method = method, stand_in(method, drafter is not None)
        measured = choose_budget(budget, method) is None
        check_vocab(vocab or preset(method).vocab)
        remembered = _remembered(memory_of_answers, keep, model or hub.DEFAULT)
        room = None if kv_memory is None else parse_bytes(kv_memory, "kv_memory")
        limit = None if memory is None else parse_bytes(memory, "memory")
        torch_dtype, place = wanted_dtype(dtype), pick_device(device)
        for one in [weights] if draft_weights is None else [weights, draft_weights]:
            refuse_place(check_weights(one), place, torch_dtype)
        if limit is not None:
            refuse_memory(place, torch_dtype)
        for source in (model, drafter):
            if source is not None:
                hub.check_source(source)
        if model is not None and revision is None:
            hub.check_hub(model)
        prepare_kernels(place, torch_dtype, progress)
        name, self.folder = model or hub.DEFAULT, str(hub.resolve(model, progress))
        if progress:
            progress(f"loading {name}", None)
        opened = in_own_thread(
            lambda: open_model(
                self.folder,
                torch_dtype,
                place,
                weights=weights,
                memory=limit,
                progress=progress,
                revision=revision,
            )
        )
        if drafter == MTP and named is None and not runs_mtp(opened.model):
            drafter, method = None, stand_in(asked, False)
        load = None
        if drafter:
            load = partial(
                load_drafter,
                drafter,
                model=self.folder,
                progress=progress,
                weights=draft_weights,
            )
        if remembered is not None:
            remembered.check(opened.model.vocab_size)
        engine = {"most": max_running, "share": share_prefixes, "memory": remembered}
        drafting = Drafting(load, vocab, shortlist)
        super().__init__(opened, name, drafting, method, budget, room, **engine)
        self.prepare(method)
        if measured:  # now, and not in the first answer
            self.thread.call(lambda: self.engine.budget)


def _remembered(size: int | str, keep: str | Path | None, model: str) -> AnswerMemory | None:
    if str(size) == "0":
        if keep is not None:
            raise InvalidInput(f"keep={str(keep)!r}: a memory of answers of 0 keeps none")
        return None
    limit = parse_bytes(size, "memory_of_answers")
    return AnswerMemory(limit, None if keep is None else Path(keep), model)


def prepare_kernels(place: torch.device, dtype: torch.dtype | None, progress: Any = None) -> None:
    """Compile the native kernels, if a model of this number format (None: its own) uses them."""
    choice.requested()  # raises for unknown words, even where no kernels are used
    if place.type == "cpu" and dtype in (torch.bfloat16, None):
        library.kernels(lambda stage: progress and progress(stage, None))
