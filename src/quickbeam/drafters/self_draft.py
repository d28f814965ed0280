"""A copy of the model itself in 4 bits as its drafter.

The copy reads and writes the pages of the model's own keys and values, so it reads no prompt. Its
rows lie behind a sequence's committed tokens, where the model's own rows of the tree are going to
lie. They are never committed: the model's pass over the tree writes every row before it reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from quickbeam.config import ReportProgress
from quickbeam.drafters.base import Drafter, DraftProbs, DraftRequest
from quickbeam.drafters.draft_model import prepare_head, run_shadows
from quickbeam.drafters.scoring import ScoringState, choose_scorers
from quickbeam.drafters.shadow import ShadowTree
from quickbeam.drafters.shortlist.shortlist import ShortlistState
from quickbeam.errors import InvalidInput
from quickbeam.hub import SELF
from quickbeam.models.base import Model, inference
from quickbeam.models.cache.kv import OutOfPages
from quickbeam.models.compile.native_model import NativeModel
from quickbeam.models.native.pages import PagePool
from quickbeam.models.native.quantised import INT4
from quickbeam.models.opening import AnyCheckpoint, packed_file_of
from quickbeam.models.weights.four_bits import FourBitParameters
from quickbeam.models.weights.packed_file import PackedFile
from quickbeam.models.weights.packing import PackedWeights
from quickbeam.models.weights.parameters import Parameters

# The most that the copy's layers may take of the model's: a call that takes longer gains nothing.
MOST = 0.75
INSTEAD = "leave the drafter out, or name a smaller model of its family"


class SelfState(ScoringState):
    """What the drafter keeps of one sequence: the shadow of its draft tree."""

    def __init__(self, shortlist: ShortlistState | None) -> None:
        super().__init__(shortlist)
        self.shadow: ShadowTree | None = None

    def release(self) -> None:
        super().release()
        self.shadow = None


class SelfDrafter(Drafter):
    """A drafter that is a copy of the target, and runs the target's sequences.

    `model`: the copy, whose pages are the target's. `ranks_ids`: as of `Drafter`.
    """

    def __init__(self, model: NativeModel, ranks_ids: bool = False) -> None:
        self.model = self.head_model = model
        self.weight_bytes = model.weight_bytes
        self.ranks_ids = ranks_ids
        prepare_head(self, model)

    def begin(self, ids: Sequence[int], shortlist: ShortlistState | None = None) -> SelfState:
        return SelfState(shortlist)

    @inference
    def answer(self, requests: Sequence[DraftRequest]) -> list[DraftProbs]:
        """Return distributions over the vocabulary, or over a shortlist. See `Drafter.answer`.

        They are zeros where the target's pages have no memory for the rows. Raises `ValueError`
        where a tree's first request doesn't begin with the root, where a node's parent was never
        requested, or where the target has not read all tokens before the root.
        """
        choose_scorers([request for request in requests if request.nodes[0] == 0])
        shadows = [self._shadow_of(request) for request in requests]
        fitting = [i for i, request in enumerate(requests) if _fits(request, shadows[i])]
        answers = dict[int, DraftProbs]()
        if fitting:
            drafted = run_shadows(
                self.model,
                [requests[i] for i in fitting],
                [shadows[i] for i in fitting],
                [shadows[i].part(_cache(requests[i])) for i in fitting],
                self.model.vocab_size,
            )
            answers = dict(zip(fitting, drafted, strict=True))
        return [
            answers[i] if i in answers else self._nothing(request)
            for i, request in enumerate(requests)
        ]

    def _shadow_of(self, request: DraftRequest) -> ShadowTree:
        """Return the shadow of a request's tree, with the requested nodes."""
        state, tree = request.state, request.tree
        assert isinstance(state, SelfState)
        if request.nodes[0] == 0:
            ids = request.context.ids
            read = _cache(request).length
            if read != len(ids) - 1:
                raise ValueError(f"the target has read {read} of {len(ids) - 1} tokens")
            state.shadow = ShadowTree(tree, ids[-1:], self.name)
        if state.shadow is None or tree is not state.shadow.tree:
            raise ValueError("a new tree: ask for its root first")
        state.shadow.add(request.nodes)
        return state.shadow

    def _nothing(self, request: DraftRequest) -> DraftProbs:
        """Return distributions after which nothing is proposed."""
        return DraftProbs(torch.zeros(len(request.nodes), self.model.vocab_size))


def _cache(request: DraftRequest) -> Any:
    """Return the target's keys and values of a request's sequence."""
    cache = request.context.cache
    if cache is None:
        raise ValueError("the target has read none of the sequence's tokens")
    return cache


def _fits(request: DraftRequest, shadow: ShadowTree) -> bool:
    """Whether the target's pages have memory for a shadow's rows, which is then reserved."""
    cache = _cache(request)
    try:
        cache.reserve(cache.length + len(shadow.rows))
    except OutOfPages:
        return False
    return True


def load_self(
    target: Model,
    ranks_ids: bool = False,
    progress: ReportProgress | None = None,
    weights: str | None = None,
) -> SelfDrafter:
    """Make a drafter of `target`. `ranks_ids`: as of `Drafter`. `weights`: None or 4 bits.

    Its weights are kept in the cache folder, as those of `weights="int4"` are. Raises
    `InvalidInput` for a model that has no such copy, or gains nothing from it.
    """
    if not isinstance(target, NativeModel):
        raise InvalidInput(
            f"the drafter {SELF!r} needs the native kernels, and this model runs on "
            f"{target.describe()}: {INSTEAD}"
        )
    checkpoint = target.parameters
    if not isinstance(checkpoint, AnyCheckpoint):
        raise InvalidInput(
            f"the drafter {SELF!r} reads the model's files, and this model comes from memory: load "
            f"it by its name, or {INSTEAD}"
        )

    if weights not in (None, INT4):
        raise InvalidInput(
            f"draft_weights={weights!r}: the drafter {SELF!r} has 4 bits; leave it out"
        )

    def packed_file(kind: str) -> PackedFile:
        return packed_file_of(checkpoint, kind, progress)

    return SelfDrafter(four_bit_copy(target, checkpoint, packed_file), ranks_ids)


def four_bit_copy(
    target: NativeModel,
    parameters: Parameters,
    packed_file: Callable[[str], PackedFile] | None = None,
) -> NativeModel:
    """Return a copy of `target` in 4 bits, which runs the sequences of the target's pages.

    `parameters`: the target's. `packed_file`: where packed weights of a kind are read or written;
    None keeps nothing. The target's embedding is shared. Raises `InvalidInput` as `load_self` does.
    """
    pages = target.pool
    assert isinstance(pages, PagePool)
    if pages.state_pages:
        raise InvalidInput(
            f"the drafter {SELF!r} can't draft for models with recurrent layers, which keep no row "
            f"for each token: {INSTEAD}"
        )
    embedding: Any = target.embedding.weight
    if isinstance(embedding, torch.Tensor):
        embedding = embedding.detach()
    kernels = pages.kernels
    shared = FourBitParameters(parameters, target.stack, embedding, kernels)
    size = PackedWeights(shared, target.stack, kernels, INT4).layer_size
    of_target = target.layer_bytes
    if size > MOST * of_target:
        raise InvalidInput(
            f"the drafter {SELF!r}: the model's layers take {of_target / 1e6:.0f} MB and a copy in "
            f"4 bits {size / 1e6:.0f} MB, so a call would take about as long as a pass: {INSTEAD}"
        )
    return NativeModel(
        shared,
        target.stack,
        kernels,
        weights=INT4,
        packed_file=packed_file and packed_file(f"{INT4}-self" if shared.widens else INT4),
        pages=pages,
    )
