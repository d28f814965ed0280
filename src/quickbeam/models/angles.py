"""Rotary angles (2104.09864), by what a configuration says of them in `rope_parameters`.

They never change with a text's length, which would let a token's angles depend on the tokens that
it is run with: on a prompt's chunks, and on the depth of a draft tree (`hold`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.stack import Rotary, Stack
from quickbeam.models.stack_tensors import query_factors

logger = logging.getLogger(__name__)

STEP = 1024  # a table grows by so many positions
Rope = Mapping[str, Any]
Scaled = tuple[torch.Tensor, float]


def _plain(rope: Rope, dim: int) -> torch.Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    base: float = rope["rope_theta"]
    return 1.0 / (base**exponents)


def _linear(rope: Rope, dim: int) -> Scaled:
    return _plain(rope, dim) / rope["factor"], 1.0


def _llama3(rope: Rope, dim: int) -> Scaled:
    """Scale long wavelengths, keep short ones, and blend between them (Llama 3.1)."""
    plain, factor = _plain(rope, dim), rope["factor"]
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    length = rope["original_max_position_embeddings"]
    waves = 2 * math.pi / plain
    blend = (length / waves - low) / (high - low)
    between = (waves >= length / high) & (waves <= length / low)
    scaled = torch.where(waves > length / low, plain / factor, plain)
    return torch.where(between, (1 - blend) * scaled / factor + blend * scaled, scaled), 1.0


def _yarn(rope: Rope, dim: int) -> Scaled:
    """YaRN (2309.00071): by how often a dimension turns within the first context."""
    base, factor = rope["rope_theta"], rope["factor"]
    length = rope["original_max_position_embeddings"]

    def size(weight: float = 1.0) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    def dimension(turns: float) -> float:
        return dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    attention = rope.get("attention_factor")
    if attention is None:
        both = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = size(both[0]) / size(both[1]) if both[0] and both[1] else size()
    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = (torch.arange(dim // 2).float() - low) / (high - low if high != low else 0.001)
    kept = 1 - ramp.clamp(0, 1)
    powers = base ** (torch.arange(0, dim, 2).float() / dim)
    return 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept, float(attention)


def _longrope(rope: Rope, dim: int) -> Scaled:
    """LongRoPE (2402.13753), within the first context."""
    factor, length = rope["factor"], rope["original_max_position_embeddings"]
    attention = rope.get("short_mscale") or rope.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(length))
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    short = torch.tensor(rope["short_factor"], dtype=torch.float32)
    if len(short) != dim // 2:
        raise ValueError(f"short_factor has {len(short)} numbers for {dim // 2} pairs that turn")
    return 1.0 / (short * rope["rope_theta"] ** exponents), float(attention)


def _proportional(rope: Rope, dim: int) -> Scaled:
    """Only the first part of a head's pairs turns; the angles go by the whole head (Gemma 4)."""
    turning = int((rope.get("partial_rotary_factor") or 1.0) * dim // 2)
    exponents = torch.arange(0, 2 * turning, 2, dtype=torch.int64).float() / dim
    found = torch.zeros(dim // 2)
    found[:turning] = 1.0 / (rope["rope_theta"] ** exponents)
    return found / (rope.get("factor") or 1.0), 1.0


KINDS: dict[str, Callable[[Rope, int], Scaled]] = {
    "default": lambda rope, dim: (_plain(rope, dim), 1.0),
    "dynamic": lambda rope, dim: (_plain(rope, dim), 1.0),  # it scales beyond the context alone
    "linear": _linear,
    "llama3": _llama3,
    "longrope": _longrope,
    "mrope": lambda rope, dim: (_plain(rope, dim), 1.0),  # text has the same position on all axes
    "proportional": _proportional,
    "yarn": _yarn,
}


def frequencies(rope: Rope, dim: int) -> Scaled:
    """Return the angles per position of `dim` dimensions, `[dim / 2]` float32, and a factor.

    The factor is that of cosines and sines. Raises `InvalidInput` for a kind of angles that is not
    in `KINDS`, and for a kind without its parameters, or with others than it can be made of.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        raise InvalidInput(f"rotary angles of type {kind!r}; known: {', '.join(KINDS)}")
    try:
        return KINDS[kind](rope, dim)
    except (KeyError, TypeError) as error:
        raise InvalidInput(f"rotary angles of type {kind!r} lack {error}") from error
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise InvalidInput(f"rotary angles of type {kind!r} can't be made: {error}") from error


def of_config(config: Any) -> Iterator[dict[str, Any]]:
    """Yield a configuration's angles: one kind, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = [one for one in rope.values() if isinstance(one, dict)]
    yield from kinds or [rope]


def hold(config: Any) -> None:
    """Set a context within which the angles don't change with a text's length.

    Dynamic NTK changes them beyond the context, which no answer exceeds. LongRoPE has two sets of
    angles, and takes the second for all tokens of a text that is longer than the model was first
    trained for. Therefore the context of such a model ends at that length.
    """
    length = getattr(config, "max_position_embeddings", None)
    for rope in of_config(config):
        border = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if border and length and rope.get("factor", 0) is None:
            rope["factor"] = length / border
        if rope.get("rope_type", rope.get("type")) != "longrope" or not border or not length:
            continue
        # what follows from the context, which ends earlier from now on
        rope.setdefault("factor", length / border)
        rope.setdefault("original_max_position_embeddings", border)
        if border < length:
            logger.warning(
                "the context is %d tokens, not %d: beyond that, LongRoPE changes the "
                "angles of all tokens",
                border,
                length,
            )
            config.max_position_embeddings = length = int(border)


class Angles:
    """Cosines and sines of `dim` dimensions by position, for halves that turn together."""

    def __init__(self, rope: Rope, dim: int) -> None:
        self._frequencies, self._factor = frequencies(rope, dim)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return those of `positions` `[...]`, `[..., dim / 2]` float32 each."""
        self._frequencies = self._frequencies.to(positions.device)  # moved once
        turned = positions.float()[..., None] * self._frequencies
        return turned.cos() * self._factor, turned.sin() * self._factor


class AngleTable:
    """Cosines and sines of all kinds of layers side by side, by position.

    `config`: what the model's configuration says. `columns`: where each kind of angles begins.
    `end`: where all end; there the cosines have the queries' factor.
    """

    def __init__(self, config: Any, stack: Stack) -> None:
        self._scale = stack.query_scale
        turned = [one for one in stack.attentions if one.rotary is not None]
        halves = {one.rotary: one.turned // 2 for one in turned if one.rotary is not None}
        self.columns, self.end = dict[Rotary, int](), 0
        self._angles = list[Angles]()
        for rotary, half in halves.items():
            self.columns[rotary], self.end = self.end, self.end + half
            self._angles.append(angles_of(config, rotary, 2 * half))
        self._table = (torch.empty(0, 1), torch.empty(0, 1))

    def up_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[positions, columns]` each, at least up to `position`."""
        if position >= len(self._table[0]):
            positions = torch.arange((position // STEP + 1) * STEP)
            parts = [one.at(positions) for one in self._angles]
            factors = torch.ones(len(positions), 1)
            if self._scale is not None:
                factors = query_factors(self._scale, positions)[:, None]
            cosine, sine = (torch.cat([*(part[k] for part in parts), factors], 1) for k in (0, 1))
            self._table = cosine.contiguous(), sine.contiguous()
        return self._table


def angles_of(config: Any, rotary: Rotary, dim: int) -> Angles:
    """Return the angles of layers with `rotary`, of which `dim` dimensions turn."""
    rope = config.rope_parameters
    if rotary.kind is not None and not isinstance(rope.get(rotary.kind), dict):
        raise InvalidInput(f"its rope_parameters lack those of {rotary.kind}")
    return Angles(rope if rotary.kind is None else rope[rotary.kind], dim)
