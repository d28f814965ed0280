"""Rotary angles (2104.09864), from the `rope_parameters` of a configuration.

The angles never change with a text's length. Otherwise a token's angles would depend on the tokens
that it is run with: on a prompt's chunks, and on the depth of a draft tree (`limit_context`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from quickbeam.errors import InvalidInput
from quickbeam.models.native.operands import RowList
from quickbeam.models.stack import Rotary, Stack
from quickbeam.models.weights.parameters import query_factors

logger = logging.getLogger(__name__)

STEP = 1024  # a table grows by so many positions
Rope = Mapping[str, Any]
# kinds without a scale: "dynamic" has one beyond the context alone, and text has the same position
# on all axes of "mrope"
PLAIN = ("default", "dynamic", "mrope")
SCALED = ("linear", "llama3", "longrope", "proportional", "yarn")


def frequencies(rope: Rope, dim: int) -> tuple[torch.Tensor, float]:
    """Return the angles per position of `dim` dimensions, `[dim / 2]` float32, and a factor.

    Cosines and sines are taken times the factor. Raises `InvalidInput` for an unknown kind of
    angles, and for a kind whose parameters are missing or wrong.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in PLAIN + SCALED:
        raise InvalidInput(f"rotary angles of type {kind!r}; known: {', '.join(PLAIN + SCALED)}")
    try:
        if kind not in PLAIN:
            return _scaled(kind, rope, dim)
        exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
        base: float = rope["rope_theta"]
        return 1.0 / (base**exponents), 1.0
    except (KeyError, TypeError) as error:
        raise InvalidInput(f"rotary angles of type {kind!r} lack {error}") from error
    except (ValueError, ArithmeticError, RuntimeError) as error:
        raise InvalidInput(f"rotary angles of type {kind!r} can't be made: {error}") from error


def _scaled(kind: str, rope: Rope, dim: int) -> tuple[torch.Tensor, float]:
    """Return `frequencies` by transformers; of LongRoPE, those within the first context."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = {"long_factor": None, **rope}
    if kind == "longrope":
        rope["attention_factor"] = rope.get("short_mscale") or rope.get("attention_factor")
        count = len(rope["short_factor"])
        if count != dim // 2:
            raise ValueError(f"short_factor has {count} numbers for {dim // 2} pairs that turn")
    if kind != "proportional":  # the factor is part of its formula
        rope["partial_rotary_factor"] = 1.0
    config = SimpleNamespace(
        rope_parameters=rope,
        head_dim=dim,
        hidden_size=dim,
        num_attention_heads=1,
        max_position_embeddings=None,
        standardize_rope_params=lambda: None,
    )
    angles, factor = ROPE_INIT_FUNCTIONS[kind](config)
    return angles, float(factor)


def rope_parameters_of(config: Any) -> Iterator[dict[str, Any]]:
    """Yield a configuration's parameters of angles: one set, or one for each kind of layer."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, dict):
        raise InvalidInput(f"its rope_parameters are {rope!r}: download it again")
    of_kinds = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
    yield from of_kinds or [rope]


def limit_context(config: Any) -> None:
    """Set a context within which the angles don't change with a text's length.

    Dynamic NTK changes them beyond the context, which no answer exceeds. LongRoPE has two sets of
    angles, and takes the second for all tokens of a text that is longer than the model was first
    trained for. Therefore the context of a model with LongRoPE ends at that length.
    """
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int | float | None):
        raise InvalidInput(f"its max_position_embeddings is {length!r}: download it again")
    for rope in rope_parameters_of(config):
        first_length = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if not first_length or not length:
            continue
        if rope.get("factor", 0) is None:
            rope["factor"] = length / first_length
        if rope.get("rope_type", rope.get("type")) != "longrope":
            continue
        # what transformers derives from the context, which ends earlier from now on
        rope.setdefault("factor", length / first_length)
        rope.setdefault("original_max_position_embeddings", first_length)
        if first_length < length:
            logger.warning(
                "the context is %d tokens, not %d: beyond that, LongRoPE changes the "
                "angles of all tokens",
                first_length,
                length,
            )
            length = int(first_length)
            config.max_position_embeddings = length


class Angles:
    """Cosines and sines of `dim` dimensions by position, for halves that are rotated together.

    `backwards`: of the negative of each angle.
    """

    def __init__(self, rope: Rope, dim: int, backwards: bool = False) -> None:
        self._frequencies, self._factor = frequencies(rope, dim)
        if backwards:
            self._frequencies = -self._frequencies

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines of `positions` `[...]`, `[..., dim / 2]` float32 each."""
        self._frequencies = self._frequencies.to(positions.device)  # moved once
        angles = positions.float()[..., None] * self._frequencies
        return angles.cos() * self._factor, angles.sin() * self._factor


class AngleTable:
    """Cosines and sines of all kinds of layers side by side, by position.

    `config`: the model's configuration. `columns`: where each kind of angles begins. `end`: the
    column behind all kinds, where the cosines have the queries' factor.
    """

    def __init__(self, config: Any, stack: Stack) -> None:
        attentions = stack.attentions
        self._scale = attentions[0].query_scale if attentions else None
        halves = dict[Rotary, int]()
        for attention in attentions:
            if attention.rotary is not None:
                halves[attention.rotary] = attention.rotary_dim // 2
        self.columns, self.end = dict[Rotary, int](), 0
        self._angles = list[Angles]()
        for rotary, half in halves.items():
            self.columns[rotary] = self.end
            self.end += half
            self._angles.append(angles_of(config, rotary, 2 * half))
        self._table = (torch.empty(0, 1), torch.empty(0, 1))
        self._rope: Rope = getattr(config, "rope_parameters", None) or {}

    def of(self, rows: RowList) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines by the positions of a pass's rows, `[positions, columns]` each.

        If there are rows of three positions, their angles are put together row by row, and
        `rows.positions` become the rows' indices.
        """
        if not rows.axes:
            return self.up_to(max(rows.positions))
        axes = torch.tensor(rows.positions)[:, None].repeat(1, 3)
        axes[list(rows.axes)] = torch.tensor(list(rows.axes.values()))
        cosine, sine = self.up_to(int(axes.max()))
        rows.positions = list(range(len(rows)))
        positions, columns = axes[:, axes_of_columns(self._rope, self.end)], torch.arange(self.end)
        return cosine[positions, columns], sine[positions, columns]

    def up_to(self, position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, `[positions, columns]` each, at least up to `position`."""
        if position >= len(self._table[0]):
            positions = torch.arange((position // STEP + 1) * STEP)
            cosines, sines = list[torch.Tensor](), list[torch.Tensor]()
            for angles in self._angles:
                cosine, sine = angles.at(positions)
                cosines.append(cosine)
                sines.append(sine)
            factors = torch.ones(len(positions), 1)
            if self._scale is not None:
                factors = query_factors(self._scale, positions)[:, None]
            self._table = torch.cat([*cosines, factors], 1), torch.cat([*sines, factors], 1)
        return self._table


def axes_of_columns(rope: Rope, columns: int) -> torch.Tensor:
    """Return which of a token's three positions each column of angles is of, `[columns]` (M-RoPE).

    The axes have `mrope_section` columns each, one axis behind the other. Where they are
    interleaved, the axes alternate, and the columns that are left at the end are of the first axis.
    """
    sections: Sequence[int] = rope["mrope_section"]
    if not rope.get("mrope_interleaved"):
        return torch.arange(3).repeat_interleave(torch.tensor(sections))
    axis_of_column = torch.zeros(columns, dtype=torch.int64)
    for axis in (1, 2):
        axis_of_column[axis : 3 * sections[axis] : 3] = axis
    return axis_of_column


def angles_of(config: Any, rotary: Rotary, dim: int) -> Angles:
    """Return the angles of layers with `rotary`, of which `dim` dimensions are rotated."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rotary.kind is not None and not isinstance(rope.get(rotary.kind), dict):
        raise InvalidInput(f"its rope_parameters lack those of {rotary.kind}")
    rope = rope if rotary.kind is None else rope[rotary.kind]
    if rotary.base is not None:
        rope = {**rope, "rope_theta": rotary.base}
    return Angles(rope, dim, rotary.backwards)
