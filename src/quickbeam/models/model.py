"""A Hugging Face causal LM that runs tokens of any sequences in one pass.

`Model` holds the weights and no sequence. Each part of a batch brings its sequence's cache.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import nn
from transformers import PreTrainedModel

from quickbeam.errors import InvalidInput
from quickbeam.models.attention import (
    SPLIT,
    Attend,
    Step,
    Steps,
    attend_grouped,
    attend_plain,
    attend_sdpa,
    cuts,
)
from quickbeam.models.batch import Batch, Chain, Draft, Part, Passed
from quickbeam.models.bit_exact import Promise, examine, same_bits
from quickbeam.models.eager_llama import LeanModel
from quickbeam.models.fused_llama import FusedLlama
from quickbeam.models.gathered import GatheredStep, RowPool
from quickbeam.models.hf_attention import Features, check_layers, forward, install
from quickbeam.models.inference import inference
from quickbeam.models.kv_cache import LayerShape, Pool, SequenceCache
from quickbeam.models.kv_store import KVPool, KVStore
from quickbeam.models.linear import pack_linears
from quickbeam.models.loading import hold_angles, refuse_unfit
from quickbeam.models.native.library import kernels
from quickbeam.models.native.operands import KVShape, RowList
from quickbeam.models.native.quantised import BFLOAT16
from quickbeam.models.native_attention import NativeAttention, NativeStep
from quickbeam.models.pages import PagedStore, PagePool
from quickbeam.models.pinned import PinnedLayers
from quickbeam.models.quantised import check_weights, quantise_linears, refuse_unfit_for
from quickbeam.models.same_logits import expect, refuse_other_logits
from quickbeam.models.streamed_llama import StreamedLlama
from quickbeam.models.streamed_pass import Source
from quickbeam.models.weight_file import WeightFile

logger = logging.getLogger(__name__)

# the most nodes of an exact tree: with the keys behind the last cut, it stays within the 512 keys
# of one uncut sum (`attend_grouped`)
EXACT_NODES = 512 - SPLIT
# tokens of prompts that a pass reads; PyTorch's operators cut each prompt at multiples of it
CHUNK = 512
STREAMED_CHUNK = 1024  # the same where weights are read or copied in every pass
# tokens of prompts that are read in a step in which answers run: a running answer never waits for a
# long prompt
BESIDE = 64


class Model:
    """Runs the tokens of a batch with `forward`, and gives the logits after them.

    `pool` makes the sequences' caches. `Model` takes `model` over: it may pack the weights in
    place.

    `fast`: take the native kernels where they can be had (bfloat16 on a CPU, see
    `native/library.py`). They run the whole forward where the model's layout allows, else its
    products and its attention. Without native kernels, `fast` packs and fuses the linears (CPU) and
    takes the leaner forward (`eager_llama.py`). With `fast=False` the model runs as transformers
    wrote it, with plain attention: the reference.

    `exact`: make a tree give the same bits as one token at a time, in bfloat16 on a CPU. None does
    so with `fast`, wherever this machine's kernels keep that promise. True raises `InvalidInput`
    where they don't. The native kernels keep it by construction, whatever `exact` says, and a row's
    bits don't depend on the other sequences of its pass. Without native kernels, an exact pass runs
    one sequence after the other.

    `chunk`: tokens of prompts that a pass reads. Models whose weights are read or copied in every
    pass take `STREAMED_CHUNK` instead.

    `gathered`: run the attention of all sequences in one call a layer (`gathered.py`). None does so
    on accelerators.

    `weights`: the format of all linear layers' weights, `bfloat16` (as they come), `int8` or `int4`
    (`quantised.py`). With `int4`, the head has 8 bits. `kept`: the file where quantised weights are
    found or written.

    `source`: a file that weights are read from while computing; the model is on the meta device
    then. `pinned`: the model's layers whose weights are in host memory (`pin_layers`); the model's
    own modules run it then.

    Raises `InvalidInput` for models that can't verify a tree (encoder-decoders, recurrent and
    hybrid ones), and for models that can't have such `weights`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        fast: bool = True,
        exact: bool | None = None,
        chunk: int = CHUNK,
        gathered: bool | None = None,
        weights: str = BFLOAT16,
        kept: WeightFile | None = None,
        source: Source | None = None,
        pinned: PinnedLayers | None = None,
    ) -> None:
        self.device = model.device if source is None else torch.device("cpu")
        refuse_unfit(type(model), model.config)
        refuse_unfit_for(check_weights(weights), model, self.device, model.dtype)
        hold_angles(model)
        model.eval()
        self.config = model.config.get_text_config()
        self.dtype = model.dtype
        self.vocab_size = int(model.get_output_embeddings().weight.shape[0])
        brought = source is not None or pinned is not None
        self.chunk = STREAMED_CHUNK if brought else chunk
        self.beside = STREAMED_CHUNK // 4 if brought else BESIDE
        # what reads or copies weights in every pass; None where all of them stay in place
        self.streamed: StreamedLlama | PinnedLayers | None = pinned
        self.weights = weights
        self._fused: FusedLlama | None = None
        self._lean: LeanModel | None = None
        self._model = model
        self._features: Features | None = None
        self._native: NativeAttention | None = None
        self._prefill, self._verify = self._attentions(fast, exact=False)
        self.exact, self._rows, self._wide = False, 1, False
        # layouts that are described are tested as well
        looked_at = source is None and not LeanModel.fits(model)
        expected = expect(model, self.config) if looked_at else None
        with torch.inference_mode():
            self._tap = install(model)
            shapes = [self._tap.shapes[layer] for layer in range(len(self._tap.shapes))]
            packs = fast and pinned is None  # pinned layers are copied as they are
            pages = self._pages(shapes) if packs else None
            self.pool: Pool = pages or self._make_pool(shapes, gathered)
            self._native = NativeAttention(pages) if pages is not None else None
            if expected is not None:
                refuse_other_logits(self, expected, model)
            if pages is not None:
                promise = self._take_kernels(model, pages, kept, source)
            else:
                promise = self._take_operators(model, shapes, packs, exact)
            if exact and promise.broken:
                raise InvalidInput(
                    "bit-identical verification can't be promised here: "
                    f"{'; '.join(promise.broken)}; leave exact out"
                )
            self._say(promise.broken, wanted=fast if exact is None else exact)
            self.exact = not promise.broken
            self._rows = promise.rows if self.exact else 1  # the fewest rows of a forward
            self._wide = promise.wide and self.exact
            if pages is None:
                self.pool = self._make_pool(shapes, gathered)  # its layout goes with `exact`
        self._windows = {
            layer.window for layer in self._tap.layers.values() if layer.window is not None
        }
        self._prefill, self._verify = self._attentions(fast, self.exact)
        with nullcontext() if self.streamed is None else self.streamed.shallow():
            kept_bits = self._native is None or not self.exact or same_bits(self)
        if not kept_bits:
            logger.warning(
                "the native kernels don't give the same bits alone and in a tree on "
                "this machine; QUICKBEAM_KERNELS=eager may"
            )
            if exact:
                raise InvalidInput(
                    "bit-identical verification can't be promised here: the native "
                    "kernels don't keep it; leave exact out"
                )
            self.exact = False

    def _say(self, broken: tuple[str, ...], wanted: bool) -> None:
        """Log whether verification is bit-identical; warn where it could be expected to be."""
        if broken and wanted and self.device.type == "cpu" and self.dtype is torch.bfloat16:
            logger.warning(
                "an answer may differ in a batch or with drafts, where two tokens are nearly as "
                "likely: bit-identical verification can't be promised for %s",
                "; ".join(broken),
            )
        else:
            logger.info("bit-identical verification: %s", "; ".join(broken) or "yes")

    def _attentions(self, fast: bool, exact: bool) -> tuple[Attend, Attend]:
        """Return PyTorch's attention for prompts and for trees."""
        if not fast:
            return attend_plain, attend_grouped if exact else attend_plain
        return attend_sdpa, attend_grouped if self.device.type == "cpu" else attend_sdpa

    def _make_pool(self, shapes: list[LayerShape], gathered: bool | None) -> Pool:
        """Return the pool of keys and values for PyTorch's operators."""
        if gathered or (gathered is None and self.device.type != "cpu" and not self.exact):
            return RowPool(shapes, self.dtype, self.device)
        return KVPool(shapes, self.dtype, self.device, pairwise=self.exact)

    def _pages(self, shapes: list[LayerShape]) -> PagePool | None:
        """Return the pool for the native kernels; None where they can't be used."""
        if (
            self.device.type != "cpu"
            or self.dtype is not torch.bfloat16
            or any(shape.key_dim % 2 for shape in shapes)
        ):
            return None
        found = kernels()
        return None if found is None else PagePool([KVShape(*shape) for shape in shapes], found)

    def _take_kernels(
        self,
        model: PreTrainedModel,
        pages: PagePool,
        kept: WeightFile | None,
        source: Source | None,
    ) -> Promise:
        """Hand the model over to the native kernels, and return what they promise."""
        if source is not None:
            self._fused = self.streamed = StreamedLlama(
                model, self._tap.layers, pages, self.weights, source
            )
            return Promise(1, ())
        if FusedLlama.fits(model):
            self._fused = FusedLlama(
                model,
                self._tap.layers,
                pages,
                self.weights,
                kept if self.weights != BFLOAT16 else None,
            )
            return Promise(1, ())
        pack_linears(model, self.weights, model.get_output_embeddings())
        if self.weights != BFLOAT16:
            # linears with an odd number of inputs, which the native kernels don't take
            quantise_linears(model, self.weights, model.get_output_embeddings())
        return examine([], model.modules())

    def _take_operators(
        self, model: PreTrainedModel, shapes: list[LayerShape], fast: bool, exact: bool | None
    ) -> Promise:
        """Prepare the model for PyTorch's operators, and return what they promise."""
        if self.weights != BFLOAT16:
            quantise_linears(model, self.weights, model.get_output_embeddings())
        elif fast and LeanModel.fits(model):
            self._lean = LeanModel(model, self._tap.layers, shapes[0].key_dim)
        elif fast:
            pack_linears(model)
        return self._examine(shapes, wanted=fast if exact is None else exact)

    def _examine(self, shapes: list[LayerShape], wanted: bool) -> Promise:
        if not wanted:
            return Promise(1, ("not wanted",))
        if self.device.type != "cpu" or self.dtype is not torch.bfloat16:
            return Promise(
                1,
                (
                    "it holds for bfloat16 on a CPU, not for "
                    f"{str(self.dtype).removeprefix('torch.')} on {self.device.type}",
                ),
            )
        if any(layer.sinks is not None for layer in self._tap.layers.values()):
            return Promise(1, ("not with attention sinks",))
        return examine(shapes, self._lean.linears() if self._lean else self._model.modules())

    @property
    def native(self) -> bool:
        """Whether the native kernels run the model.

        A row's bits then depend only on the tokens that the row sees, however those were computed.
        """
        return self._native is not None

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that the products of a pass read; 0 where that is not known."""
        return 0 if self._fused is None else self._fused.weight_bytes

    def close(self) -> None:
        """Stop reading weights from disk until the next pass."""
        if self.streamed is not None:
            self.streamed.close()

    @property
    def granularity(self) -> int:
        """How many tokens of a prompt are shared at a time (`PrefixCache`).

        With PyTorch's operators, bits may depend on where a prompt is cut. So this is the chunk
        then, and prompts are cut at multiples of it. With the native kernels it is a page.
        """
        return self.pool.page if self.native else self.chunk

    @property
    def context_length(self) -> int | None:
        """How many positions the model was made for; None where its configuration doesn't say."""
        length = getattr(self.config, "max_position_embeddings", None)
        return int(length) if length else None

    @property
    def most_nodes(self) -> int | None:
        """The most nodes of a tree that a pass takes; None for any number."""
        return EXACT_NODES if self.exact and self._native is None else None

    def nodes_of(self, wanted: int) -> int:
        """Return `wanted`, or the most nodes that a tree may have where that is less."""
        return wanted if self.most_nodes is None else min(wanted, self.most_nodes)

    def depth_limit(self, cache: SequenceCache) -> int:
        """Return how deep a sequence's next tree may grow.

        With `exact` on PyTorch's operators, sums are cut at fixed positions, and a tree must not
        reach across a cut. Otherwise the limit is so high that it never matters.
        """
        if not self.exact or self._native is not None:
            return 1 << 30
        root = cache.length
        places = [root, *(root - window + 1 for window in self._windows if root >= window)]
        every = cuts(self._wide)
        return min(every - 1 - place % every for place in places)

    def check_prompt(self, ids: Sequence[int]) -> None:
        """Raise `InvalidInput` for an empty prompt, and for ids that are not in the vocabulary."""
        if not ids:
            raise InvalidInput("an empty prompt: give at least one token")
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            raise InvalidInput(
                f"token id {low if low < 0 else high} is outside the model's "
                f"vocabulary of {self.vocab_size}"
            )

    @inference
    def forward(self, batch: Batch) -> list[Passed]:
        """Run all rows of `batch`, and return what each part gives.

        The keys and values of a part's rows lie behind its sequence's committed tokens, and are not
        committed.

        Raises `InvalidInput` for a tree that has too many nodes, `NoRoom` where the pool has no
        page left.
        """
        for part in batch.parts:
            if (
                isinstance(part, Draft)
                and self.most_nodes is not None
                and len(part.tree) > self.most_nodes
            ):
                nodes = len(part.tree)
                raise InvalidInput(
                    f"a tree of {nodes} nodes: bit-identical verification takes at "
                    f"most {self.most_nodes}; lower the budget"
                )
        if self._native is not None:
            return self._run_native(self._native, batch.parts)
        if isinstance(self.pool, RowPool):
            return self._run_gathered(self.pool, batch.parts)
        drafts = [part for part in batch.parts if isinstance(part, Draft)]
        if self.exact or len(drafts) < 2:
            return [self._run(part) for part in batch.parts]
        together = iter(self._run_together(drafts))
        return [
            next(together) if isinstance(part, Draft) else self._run(part) for part in batch.parts
        ]

    def _run_native(self, native: NativeAttention, parts: Sequence[Part]) -> list[Passed]:
        """Run all parts side by side in one pass of the native kernels."""
        listed = RowList()
        for part in parts:
            assert isinstance(part.cache, PagedStore)
            if isinstance(part, Draft):
                part.cache.add_tree(listed, part.tree, part.base)
            else:
                part.cache.add_chain(listed, part.tokens, range(part.rows - part.wanted, part.rows))
        rows, best = listed.rows(), None
        if self._fused is not None:
            logits = self._fused(rows, max(listed.positions))
            best, hidden = self._fused.best, self._fused.hidden if self._fused.watched else None
        else:
            step = NativeStep(rows, torch.tensor(listed.positions), native)
            wanted = torch.tensor(listed.wanted, dtype=torch.int64)
            logits = forward(
                self._model,
                self._tap,
                torch.tensor(listed.tokens),
                step,
                0 if len(wanted) == rows.rows else wanted,
            )
            hidden = self._caught()
        return _split(parts, logits, hidden, best)

    def _run_gathered(self, pool: RowPool, parts: Sequence[Part]) -> list[Passed]:
        """Run all parts side by side by PyTorch's operators, with gathered attention."""
        ids, wanted, first = list[int](), list[int](), 0
        for part in parts:
            ids += part.tree.token[part.base :] if isinstance(part, Draft) else part.tokens
            last = part.rows if isinstance(part, Draft) else part.wanted
            wanted += range(first + part.rows - last, first + part.rows)
            first += part.rows
        step, every = GatheredStep(parts, pool), len(wanted) == first
        rows = (
            0
            if every
            else torch.tensor(wanted, dtype=torch.int64).to(self.device, non_blocking=True)
        )
        return _split(parts, self._forward(ids, step, self._verify, rows), self._hidden(), None)

    def _run(self, part: Part) -> Passed:
        """Run one part by PyTorch's operators."""
        assert isinstance(part.cache, KVStore)
        if isinstance(part, Chain):
            start = part.cache.length
            step = Step(part.cache, torch.arange(start, start + part.rows, device=self.device))
            logits = self._forward(part.tokens, step, self._prefill, max(part.wanted, 1))
            return Passed(logits if part.wanted else logits[:0], self._hidden())
        tree, base, n = part.tree, part.base, len(part.tree)
        tokens, depth, visible = tree.token, tree.depth, None if tree.is_chain else tree.visible()
        if base:
            visible = tree.visible()[base:]
        # some kernels treat a single row differently: a lone token is run with a copy of itself
        if n < self._rows:
            tokens, depth, visible = tokens * 2, [0, 0], torch.eye(2, dtype=torch.bool)
        positions = torch.tensor(depth, dtype=torch.int64, device=self.device) + part.cache.length
        step = Step(part.cache, positions, visible, self.exact, base, self._wide)
        logits = self._forward(tokens[base:], step, self._verify)[: n - base]
        hidden = self._hidden()
        return Passed(logits, None if hidden is None else hidden[: n - base])

    def _run_together(self, drafts: Sequence[Draft]) -> list[Passed]:
        """Run several trees by PyTorch's operators, with one product for all rows.

        Attention runs sequence by sequence. On a CPU, gathered attention measured 5 to 46 % slower
        behind 1,000 tokens, which is why both ways exist.
        """
        steps = []
        for part in drafts:
            assert isinstance(part.cache, KVStore)
            positions = (
                torch.tensor(part.tree.depth, dtype=torch.int64).to(self.device, non_blocking=True)
                + part.cache.length
            )
            visible = (
                None if part.tree.is_chain and not part.base else part.tree.visible()[part.base :]
            )
            steps.append(Step(part.cache, positions, visible, base=part.base))
        logits = self._forward(
            [token for part in drafts for token in part.tree.token[part.base :]],
            Steps(steps),
            self._verify,
        )
        return _split(drafts, logits, self._hidden(), None)

    def _forward(
        self,
        ids: Sequence[int],
        step: Step | Steps | GatheredStep,
        attend: Attend,
        wanted: torch.Tensor | int = 0,
    ) -> torch.Tensor:
        """Return the logits `[wanted, vocab]` of the `wanted` rows.

        `wanted`: a number means the last so many rows (0: all), a tensor means rows by their
        numbers.
        """
        tokens = torch.tensor(ids, dtype=torch.int64).to(self.device, non_blocking=True)
        if self._lean is not None:
            return self._lean(tokens, step, attend, wanted)
        self._tap.attend = attend
        return forward(self._model, self._tap, tokens, step, wanted)

    @property
    def embedding(self) -> nn.Module:
        """The module from token ids to what the first layer reads."""
        fused = self._fused or self._lean
        return fused.embedding if fused is not None else self._model.get_input_embeddings()

    @property
    def head(self) -> nn.Module:
        """The module from hidden states after the final norm to logits."""
        fused = self._fused or self._lean
        return fused.head if fused is not None else self._model.get_output_embeddings()

    def watch(self, layers: Sequence[int]) -> None:
        """Give hidden states after `layers` (`hf_attention.Features`) with every pass from now on.

        Raises `InvalidInput` for no layers, and for layers that the model doesn't have.
        """
        check_layers(layers, self.config.num_hidden_layers)
        if self._fused is not None:
            self._fused.watch(layers)
        elif self._lean is not None:
            self._lean.watched = tuple(layers)
        else:
            if self._features is not None:
                self._features.close()
            self._features = Features(self._model, layers)

    def _hidden(self) -> torch.Tensor | None:
        """Hidden states of the last forward, `[n, len(layers) * d]`; None if none are watched."""
        if self._lean is not None:
            return self._lean.hidden if self._lean.watched else None
        return self._caught()

    def _caught(self) -> torch.Tensor | None:
        return self._features.take()[0] if self._features is not None else None


def _split(
    parts: Sequence[Part], logits: torch.Tensor, hidden: torch.Tensor | None, best: list[int] | None
) -> list[Passed]:
    """Divide the results of all rows among the parts."""
    passed, row, want = list[Passed](), 0, 0
    for part in parts:
        count = part.rows if isinstance(part, Draft) else part.wanted
        passed.append(
            Passed(
                logits[want : want + count],
                None if hidden is None else hidden[row : row + part.rows],
                None if best is None else best[want : want + count],
            )
        )
        row, want = row + part.rows, want + count
    return passed
