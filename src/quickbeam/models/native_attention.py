"""Attention by the native kernels, for models whose forward is that of transformers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quickbeam.models.attention import Layer
from quickbeam.models.native.operands import Rows
from quickbeam.models.native.program import Program
from quickbeam.models.pages import PagePool


class NativeAttention:
    """Writes keys and values to their pages and attends over them, in one call a layer.

    Each layer has a program of its own.
    """

    def __init__(self, store: PagePool) -> None:
        self._store = store
        self._programs: dict[int, Program] = {}

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer, rows: Rows
    ) -> torch.Tensor:
        """Return the attention `[1, n, heads, d]` of `rows`.

        `query` is `[1, heads, n, d]`; `key` and `value` are `[1, kv_heads, n, d]`.
        """
        heads, n = query.shape[1:3]
        query, key, value = (
            query[0].transpose(0, 1).contiguous(),
            key[0].contiguous(),
            value[0].contiguous(),
        )
        program = self._programs.get(layer.index) or self._make(layer, heads)
        strides = {
            "key_stride": key.shape[2],
            "key_head": n * key.shape[2],
            "value_stride": value.shape[2],
            "value_head": n * value.shape[2],
        }
        program.set(0, **strides)
        out = query.new_empty(1, n, heads, value.shape[2])
        program.run(rows, {"query": query, "key": key, "value": value, "out": out})
        return out

    def _make(self, layer: Layer, heads: int) -> Program:
        shape, offset = self._store.shapes[layer.index], self._store.offsets[layer.index]
        program = self._programs[layer.index] = Program(self._store.kernels)
        query, key, value = (program.given(name, 0) for name in ("query", "key", "value"))
        sorted_query, out = (
            program.buffer(heads * shape.key_dim),
            program.given("out", heads * shape.value_dim),
        )
        program.split(
            query,
            key,
            value,
            sorted_query,
            heads,
            shape,
            offset,
            {"query_stride": heads * shape.key_dim},
        )
        program.attend(
            sorted_query,
            out,
            heads,
            shape,
            offset,
            layer.scaling,
            layer.window,
            layer.softcap,
            layer.sinks,
        )
        return program


@dataclass
class NativeStep:
    """One pass of a model over `rows`.

    `new_positions`: `[n]` int64, positions of these rows.
    """

    rows: Rows
    new_positions: torch.Tensor
    attention: NativeAttention

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: Layer
    ) -> torch.Tensor:
        return self.attention(query, key, value, layer, self.rows)
