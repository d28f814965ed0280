"""Feed-forwards and experts: each row by itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from quickbeam.models.stack import Experts, FeedForward, Linear, ParallelExperts, Routing, Xielu
from quickbeam.models.torch.parts import ACTIVATIONS, Reader, constant
from quickbeam.models.torch.rows import PassRows

GROUPED_PRODUCTS = ((9, 0), (10, 0))  # compute capabilities of GPUs with grouped products


def halves(
    feed_forward: FeedForward, inner: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the gates and the rest of what `up` gives, `[n, inner]` each.

    `inner`: `[n, 2 * inner]`, the gates first. Without gates it is `[n, inner]`, and there is no
    rest.
    """
    if not feed_forward.gated:
        return inner, None
    gate, up = inner.chunk(2, -1)
    return gate if feed_forward.gate_scale == 1 else gate * feed_forward.gate_scale, up


def activated(
    feed_forward: FeedForward, gate: torch.Tensor, up: torch.Tensor | None
) -> torch.Tensor:
    """Return the input of `down`, `[n, inner]`, for the results of `halves`."""
    if feed_forward.activation == "clamped":
        assert up is not None
        gate = gate.clamp(max=feed_forward.limit)
        up = up.clamp(-feed_forward.limit, feed_forward.limit)
        return (up + 1) * gate * (feed_forward.slope * gate).sigmoid()
    result = ACTIVATIONS[feed_forward.activation](gate)
    return result if up is None else result * up


class XieluLayer(nn.Module):
    """The activation xIELU (`stack.Xielu`), element by element."""

    def __init__(self, xielu: Xielu, reader: Reader) -> None:
        super().__init__()
        self.positive = reader.vector(xielu.positive)
        self.negative = reader.vector(xielu.negative)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = F.softplus(self.positive)
        c = 0.5 + F.softplus(self.negative)
        above = x.clamp(min=0)
        below = x.clamp(max=0)
        return a * above * above + c * (torch.expm1(below) - below) + 0.5 * x


class FeedForwardLayer(nn.Module):
    """A feed-forward (`stack.FeedForward`): `[n, d]` to `[n, d]`."""

    def __init__(self, feed_forward: FeedForward, reader: Reader) -> None:
        super().__init__()
        self.feed_forward = feed_forward
        self.up = reader.product(feed_forward.up)
        self.down = reader.product(feed_forward.down)
        self.xielu: nn.Module | None = None
        if feed_forward.xielu is not None:
            self.xielu = XieluLayer(feed_forward.xielu, reader)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.up(x)
        if self.xielu is not None:
            inner = self.xielu(inner)
        else:
            gate, up = halves(self.feed_forward, inner)
            # as a product of its own gives them: an activation's last bit depends on that
            inner = activated(self.feed_forward, gate.contiguous(), up)
        result: torch.Tensor = self.down(inner) * self.feed_forward.factor
        return result


class Router(nn.Module):
    """Selects each row's experts (`stack.Routing`). Its scores are computed in float32."""

    def __init__(self, routing: Routing, reader: Reader) -> None:
        super().__init__()
        self.routing = routing
        self.logits = reader.dense_product(routing.logits, torch.float32)
        self.correction = reader.optional_vector(routing.correction)
        self.scale = reader.optional_vector(routing.scale)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weights, float32, and the indices of each row's experts, `[n, top]` each."""
        routing = self.routing
        logits = self.logits(x)  # [n, experts]
        if routing.scores == "mixer":
            weight, expert = self._sparse_mixer(logits)
        else:
            weight, expert = self._top_experts(logits)
        if routing.renormalised:
            total = weight.sum(-1, keepdim=True) + routing.plus
            weight = weight / total.clamp(min=routing.least)
        if self.scale is not None:
            weight = weight * self.scale[expert]
        return weight * routing.factor, expert

    def _top_experts(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Select the largest scores among the best groups."""
        routing = self.routing
        score = logits
        if routing.scores == "softmax":
            score = logits.softmax(-1)
        elif routing.scores == "sigmoid":
            score = logits.sigmoid()
        corrected = score if self.correction is None else score + self.correction.flatten()

        groups = torch.unflatten(corrected, -1, (routing.groups, -1))  # [n, groups, experts]
        group_score = groups.topk(routing.best_of_group, -1).values.sum(-1)  # [n, groups]
        best_groups = group_score.topk(routing.top_groups, -1).indices
        is_best = torch.zeros_like(group_score).scatter(-1, best_groups, 1) > 0
        candidates = groups.masked_fill(~is_best[..., None], -torch.inf).flatten(-2)

        expert = candidates.topk(routing.top, -1).indices  # [n, top]
        weight = score.gather(-1, expert)
        if routing.scores == "softmax_of_chosen":
            weight = weight.softmax(-1)
        return weight, expert

    def _sparse_mixer(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Select experts by Phi-MoE's rule, one after the other."""
        remaining = logits
        weights = list[torch.Tensor]()
        experts = list[torch.Tensor]()
        for _ in range(self.routing.top):
            top, expert = remaining.max(-1, keepdim=True)
            distance = (top - logits) / torch.maximum(logits.abs(), top)
            near = remaining.masked_fill(distance > 2 * self.routing.jitter, -torch.inf)
            weights.append(near.softmax(-1).gather(-1, expert))
            experts.append(expert)
            remaining = remaining.scatter(-1, expert, -torch.inf)
        return torch.cat(weights, -1), torch.cat(experts, -1)


def has_grouped_product(x: torch.Tensor) -> bool:
    """Whether PyTorch multiplies groups of such rows without asking the device where they end.

    PyTorch does so since 2.10: on a CPU, and in bfloat16 on some GPUs. On other GPUs it reads the
    end positions back, which a graph can't do.
    """
    if not hasattr(F, "grouped_mm"):
        return False
    if x.device.type == "cpu":
        return True
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
        biases: list[torch.Tensor] = [
            product.bias for product in products if product.bias is not None
        ]
        self.weight = constant(torch.stack(weights))
        self.bias = constant(torch.stack(biases)) if biases else None

    def forward(self, x: torch.Tensor, expert: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """Multiply each row by the weight of its expert.

        `x`: `[n, inputs]`. `expert`: the expert of each row, `[n]`. `offsets`: the end position of
        each expert's rows, `[E]` int32. Rows after the last of them belong to no expert, and their
        results are undefined.
        """
        x = x.to(self.weight.dtype)
        if has_grouped_product(x):
            result = F.grouped_mm(x, self.weight.transpose(1, 2), offs=offsets).float()
        else:  # all rows by all experts
            result = x.new_zeros(len(x), self.weight.shape[1], dtype=torch.float32)
            for index, weight in enumerate(self.weight):
                is_routed = (expert == index)[:, None]
                result = torch.where(is_routed, F.linear(x, weight).float(), result)
        return result if self.bias is None else result + self.bias[expert]


class ExpertsLayer(nn.Module):
    """The weighted sum of what a row's experts give (`stack.Experts`): `[n, d]` to `[n, d]`."""

    def __init__(self, experts: Experts, reader: Reader) -> None:
        super().__init__()
        self.router = Router(experts.routing, reader)
        # all experts have one activation and one factor
        self.first_expert = experts.candidates[0]
        self.up = GroupedProduct([expert.up for expert in experts.candidates], reader)
        self.down = GroupedProduct([expert.down for expert in experts.candidates], reader)
        self.shared = self.shared_gate = None
        if experts.shared is not None:
            self.shared = FeedForwardLayer(experts.shared, reader)
        if experts.shared_gate is not None:
            self.shared_gate = reader.dense_product(experts.shared_gate, torch.float32)

    def forward(
        self, x: torch.Tensor, rows: PassRows, router_reads: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return `[n, d]`. `router_reads`: the router's input, where it is not `x`."""
        weight, expert = self.router(x if router_reads is None else router_reads)
        results = self._run_experts(x, expert, rows)  # [n, top, d]
        total: torch.Tensor = (results * weight[..., None]).sum(1)
        if self.shared is not None:
            shared = self.shared(x)
            if self.shared_gate is not None:
                shared = shared * self.shared_gate(x).sigmoid()
            total = total + shared
        return total

    def _run_experts(self, x: torch.Tensor, expert: torch.Tensor, rows: PassRows) -> torch.Tensor:
        """Return the results `[n, top, d]` of the active experts `[n, top]` of each row."""
        count = len(self.up.weight)
        top = expert.shape[1]
        # sort pairs of a row and an expert by expert; rows of padding come last
        expert = expert.masked_fill(rows.is_padding[:, None], count).flatten()
        sorted_expert, pair = expert.sort(stable=True)  # [n * top]
        experts = torch.arange(count, device=x.device)
        offsets = torch.searchsorted(sorted_expert, experts, right=True).int()
        bias_index = sorted_expert.clamp(max=count - 1)

        inner = self.up(x[pair // top], bias_index, offsets)
        inner = activated(self.first_expert, *halves(self.first_expert, inner))
        results: torch.Tensor = self.down(inner, bias_index, offsets) * self.first_expert.factor
        results = results.masked_fill((sorted_expert == count)[:, None], 0.0)

        by_row = torch.zeros_like(results).index_copy_(0, pair, results)
        return torch.unflatten(by_row, 0, (-1, top))


class ParallelExpertsLayer(nn.Module):
    """Experts beside a dense feed-forward (`stack.ParallelExperts`).

    They read the residual stream `[n, d]`, and their result is added to the dense one's.
    """

    def __init__(self, parallel: ParallelExperts, reader: Reader) -> None:
        super().__init__()
        self.experts = ExpertsLayer(parallel.experts, reader)
        self.before = reader.norm(parallel.before)
        self.router = reader.norm(parallel.router)
        self.after = reader.norm(parallel.after)
        self.dense_after = reader.norm(parallel.dense_after)

    def forward(self, x: torch.Tensor, rows: PassRows, dense: torch.Tensor) -> torch.Tensor:
        """Return `[n, d]`. `dense`: the result of the dense feed-forward, `[n, d]`."""
        mixed = self.experts(self.before(x), rows, self.router(x))
        total: torch.Tensor = self.dense_after(dense) + self.after(mixed)
        return total
