"""Feed-forwards and experts: each row by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.models.stack import Experts, FeedForward, Linear, ParallelExperts, Routing
from quickbeam.models.torch.parts import ACTIVATIONS, Reader, constant
from quickbeam.models.torch.rows import PassRows

GROUPED_PRODUCTS = ((9, 0), (10, 0))  # compute capabilities of GPUs with grouped products


def activated(feed_forward: FeedForward, inner: torch.Tensor) -> torch.Tensor:
    """Return what `down` reads, `[n, inner]`, of what `up` gives: `[n, inner]`, twice if gated."""
    if feed_forward.activation == "clamped":
        gate, up = inner.chunk(2, -1)
        gate = gate.clamp(max=feed_forward.limit)
        up = up.clamp(-feed_forward.limit, feed_forward.limit)
        return (up + 1) * gate * (feed_forward.slope * gate).sigmoid()
    activation = ACTIVATIONS[feed_forward.activation]
    if not feed_forward.gated:
        return activation(inner)
    gate, up = inner.chunk(2, -1)
    return activation(gate * feed_forward.gate_scale) * up


class FeedForwardLayer(nn.Module):
    """A feed-forward (`stack.FeedForward`): `[n, d]` to `[n, d]`."""

    def __init__(self, feed_forward: FeedForward, reader: Reader) -> None:
        super().__init__()
        self.feed_forward = feed_forward
        self.up, self.down = reader.product(feed_forward.up), reader.product(feed_forward.down)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = activated(self.feed_forward, self.up(x))
        result: torch.Tensor = self.down(inner) * self.feed_forward.factor
        return result


class Router(nn.Module):
    """Chooses each row's experts (`stack.Routing`). Its scores are computed in float32."""

    def __init__(self, routing: Routing, reader: Reader) -> None:
        super().__init__()
        self.routing = routing
        self.logits = reader.dense_product(routing.logits, torch.float32)
        self.correction = reader.optional_vector(routing.correction)
        self.scale = reader.optional_vector(routing.scale)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, float32, and the numbers of each row's experts, `[n, top]` each."""
        routing, logits = self.routing, self.logits(x)
        weight, expert = self._mixed(logits) if routing.scores == "mixer" else self._top(logits)
        if routing.renormalised:
            total = weight.sum(-1, keepdim=True) + routing.plus
            weight = weight / total.clamp(min=routing.least)
        if self.scale is not None:
            weight = weight * self.scale[expert]
        return weight * routing.factor, expert

    def _top(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose the largest scores among the best groups."""
        routing, score = self.routing, logits
        if routing.scores == "softmax":
            score = logits.softmax(-1)
        elif routing.scores == "sigmoid":
            score = logits.sigmoid()
        choice = score if self.correction is None else score + self.correction.flatten()
        groups = torch.unflatten(choice, -1, (routing.groups, -1))
        group_score = groups.topk(routing.best_of_group, -1).values.sum(-1)
        best_groups = group_score.topk(routing.top_groups, -1).indices
        is_best = torch.zeros_like(group_score).scatter(-1, best_groups, 1) > 0
        choice = groups.masked_fill(~is_best[..., None], -torch.inf).flatten(-2)
        expert = choice.topk(routing.top, -1).indices
        weight = score.gather(-1, expert)
        return (weight.softmax(-1) if routing.scores == "softmax_of_chosen" else weight), expert

    def _mixed(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Choose by Phi-MoE's rule, one expert after the other."""
        left, weights, experts = logits, [], []
        for _ in range(self.routing.top):
            top, expert = left.max(-1, keepdim=True)
            distance = (top - logits) / torch.maximum(logits.abs(), top)
            near = left.masked_fill(distance > 2 * self.routing.jitter, -torch.inf)
            weights.append(near.softmax(-1).gather(-1, expert))
            experts.append(expert)
            left = left.scatter(-1, expert, -torch.inf)
        return torch.cat(weights, -1), torch.cat(experts, -1)


def has_grouped_product(x: torch.Tensor) -> bool:
    """Whether PyTorch multiplies groups of such rows without asking the device where they end.

    It does since 2.10: on a CPU, and in bfloat16 on some GPUs. On others it reads the ends back,
    which no graph can hold.
    """
    if not hasattr(F, "grouped_mm") or x.device.type == "cpu":
        return hasattr(F, "grouped_mm")
    if x.device.type != "cuda" or x.dtype is not torch.bfloat16:
        return False
    return torch.cuda.get_device_capability(x.device) in GROUPED_PRODUCTS


class GroupedProduct(nn.Module):
    """A product for each of E experts: rows sorted by expert to `[n, outputs]` float32.

    `weight`: `[E, outputs, inputs]`. `bias`: `[E, outputs]`, or None.
    """

    def __init__(self, linears: Sequence[Linear], reader: Reader) -> None:
        super().__init__()
        products = [reader.dense_product(linear) for linear in linears]
        weights: list[torch.Tensor] = [product.weight for product in products]
        biases: list[torch.Tensor] = [one.bias for one in products if one.bias is not None]
        self.weight = constant(torch.stack(weights))
        self.bias = constant(torch.stack(biases)) if biases else None

    def forward(self, x: torch.Tensor, expert: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """`x`: `[n, inputs]`. `expert` `[n]`: of each row. `ends` `[E]` int32: behind its last row.

        Rows behind the last end belong to no expert, and their results are any numbers.
        """
        x = x.to(self.weight.dtype)
        if has_grouped_product(x):
            result = F.grouped_mm(x, self.weight.transpose(1, 2), offs=ends).float()
        else:  # all rows by all experts
            result = x.new_zeros(len(x), self.weight.shape[1], dtype=torch.float32)
            for number, weight in enumerate(self.weight):
                is_own = (expert == number)[:, None]
                result = torch.where(is_own, F.linear(x, weight).float(), result)
        return result if self.bias is None else result + self.bias[expert]


class ExpertsLayer(nn.Module):
    """The weighted sum of what a row's experts give (`stack.Experts`): `[n, d]` to `[n, d]`."""

    def __init__(self, experts: Experts, reader: Reader) -> None:
        super().__init__()
        self.router, self.one = Router(experts.routing, reader), experts.chosen[0]
        self.up = GroupedProduct([one.up for one in experts.chosen], reader)
        self.down = GroupedProduct([one.down for one in experts.chosen], reader)
        self.shared = self.shared_gate = None
        if experts.shared is not None:
            self.shared = FeedForwardLayer(experts.shared, reader)
        if experts.shared_gate is not None:
            self.shared_gate = reader.dense_product(experts.shared_gate, torch.float32)

    def forward(
        self, x: torch.Tensor, rows: PassRows, router_reads: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`router_reads`: what the router reads in place of `x`."""
        weight, expert = self.router(x if router_reads is None else router_reads)
        total: torch.Tensor = (self._chosen(x, expert, rows) * weight[..., None]).sum(1)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(x).sigmoid()
            total = total + shared
        return total

    def _chosen(self, x: torch.Tensor, expert: torch.Tensor, rows: PassRows) -> torch.Tensor:
        """Return what the experts `[n, top]` of each row give, `[n, top, d]`."""
        count, top = len(self.up.weight), expert.shape[1]
        # rows of padding come last, behind all experts
        number = expert.masked_fill(rows.is_padding[:, None], count).flatten()
        sorted_number, order = number.sort(stable=True)
        last = torch.arange(count, device=x.device)
        ends = torch.searchsorted(sorted_number, last, right=True).int()
        of_row = sorted_number.clamp(max=count - 1)
        inner = activated(self.one, self.up(x[order // top], of_row, ends))
        results: torch.Tensor = self.down(inner, of_row, ends) * self.one.factor
        results = results.masked_fill((sorted_number == count)[:, None], 0.0)
        in_order = torch.zeros_like(results).index_copy_(0, order, results)
        return torch.unflatten(in_order, 0, (-1, top))


class ParallelExpertsLayer(nn.Module):
    """Experts beside a dense feed-forward (`stack.ParallelExperts`).

    They read the residual stream `[n, d]`, and their result is added to the dense one's.
    """

    def __init__(self, parallel: ParallelExperts, reader: Reader) -> None:
        super().__init__()
        self.experts = ExpertsLayer(parallel.experts, reader)
        self.before, self.router = reader.norm(parallel.before), reader.norm(parallel.router)
        self.after = reader.norm(parallel.after)
        self.dense_after = reader.norm(parallel.dense_after)

    def forward(self, x: torch.Tensor, rows: PassRows, dense: torch.Tensor) -> torch.Tensor:
        """`dense`: what the dense feed-forward gave."""
        mixed = self.experts(self.before(x), rows, self.router(x))
        total: torch.Tensor = self.dense_after(dense) + self.after(mixed)
        return total
