"""Models that are larger than an accelerator's memory.

As many layers as fit stay on the device. The weights of the other layers are copied from pinned
host memory in every pass, each while the layers before it compute.

Two buffers on the device hold the copied layers in turn. A layer waits for its copy. Once it is
computed, its buffer is filled with the next layer that uses the buffer. After the last such layer
of a pass, that is the first such layer of the next pass. All waiting in a pass is done by the
device, with events between two streams. The host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from quickbeam.errors import InvalidInput, QuickbeamError, first_line
from quickbeam.models.base import Streamed
from quickbeam.models.memory import peak_bytes
from quickbeam.models.torch.network import Network

BUFFERS = 2
ALIGNED = 256  # bytes: tensors in a buffer begin at multiples of it


class Copies:
    """Copies to the device: on CUDA in a stream of their own beside what it computes, else at once.

    `slot` is the number of the buffer that is written.
    """

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream
        self._device, self._stream = device, stream(device) if device.type == "cuda" else None
        self._events = dict[int, Any]()

    def start(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. It runs once all work that the device was given so far is done."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._events[slot] = self._stream.record_event()

    def wait(self, slot: int) -> None:
        """Make later work of the device wait for the last copy to this buffer."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._events[slot])


class PinnedLayers(Streamed):
    """Some of a model's decoder layers, with their weights in host memory.

    The constructor puts the model on the device (see `pin_layers`). `held`: numbers of the layers
    whose weights stay on the device. Raises `QuickbeamError` if the host has no memory for a layer.
    """

    def __init__(
        self,
        network: Network,
        held: Sequence[int],
        device: torch.device,
        copies: Copies,
    ) -> None:
        self.source = "host memory"
        self._copies = copies
        layers = network.blocks
        self.weight_bytes = sum(parameter.nbytes for parameter in network.parameters())
        moved = [layer for number, layer in enumerate(layers) if number not in held]
        self._sizes = [layer_bytes(layer) for layer in moved]
        self._host = [
            self._take_out(layer, size, device)
            for layer, size in zip(moved, self._sizes, strict=True)
        ]
        self._buffers = [
            torch.empty(max(self._sizes), dtype=torch.uint8, device=device) for _ in range(BUFFERS)
        ]
        self._holds: list[int | None] = [None] * BUFFERS
        for number, layer in enumerate(moved):
            buffer = self._buffers[number % BUFFERS]
            for parameter, first, last in places(layer):
                parameter.data = buffer[first:last].view(parameter.dtype).view(parameter.shape)
            layer.register_forward_pre_hook(partial(self._before, number))
            layer.register_forward_hook(partial(self._after, number))
        network.to(device)
        self.streamed_bytes = sum(self._sizes)

    @staticmethod
    def _take_out(layer: nn.Module, size: int, device: torch.device) -> torch.Tensor:
        """Copy the layer's weights to one piece of host memory, which is pinned for CUDA."""
        try:
            host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        except RuntimeError as error:
            raise QuickbeamError(
                f"memory: the host can't hold a layer of {size / 1e6:.0f} MB "
                f"({first_line(error)}): take a smaller model"
            ) from error
        for parameter, first, last in places(layer):
            host[first:last].view(parameter.dtype).view(parameter.shape).copy_(parameter.detach())
        return host

    def _before(self, number: int, *_: Any) -> None:
        slot = number % BUFFERS
        if self._holds[slot] != number:  # the first pass, or one after an interrupted pass
            self._fetch(number)
        self._copies.wait(slot)

    def _after(self, number: int, *_: Any) -> None:
        following = number + BUFFERS
        self._fetch(following if following < len(self._host) else number % BUFFERS)

    def _fetch(self, number: int) -> None:
        slot = number % BUFFERS
        self._holds[slot] = None
        self._copies.start(slot, self._buffers[slot][: self._sizes[number]], self._host[number])
        self._holds[slot] = number

    def record(self) -> dict[str, Any]:
        return {
            "streamed_bytes": self.streamed_bytes,
            "resident_bytes": self.weight_bytes - self.streamed_bytes,
            "buffer_bytes": sum(buffer.numel() for buffer in self._buffers),
            "bytes_per_second": None,
            "waited_seconds": None,
            "peak_bytes": peak_bytes(),
        }


def pin_layers(
    network: Network, memory: int, device: torch.device, copies: Copies | None = None
) -> PinnedLayers | None:
    """Put a network that is in host memory on `device`, where its weights may take `memory` bytes.

    Return None if all of them fit.

    Everything but the layers always stays on the device. So do as many layers as there is room for
    beside two buffers. They are spread evenly over the pass, so that copies go on while they
    compute. Raises `InvalidInput` if the memory is too small.
    """
    sizes = [layer_bytes(layer) for layer in network.blocks]
    total = sum(parameter.nbytes for parameter in network.parameters())
    fixed = total - sum(parameter.nbytes for parameter in network.blocks.parameters())
    piece, count = max(sizes), len(sizes)
    if memory >= fixed + sum(sizes):
        network.to(device)
        return None
    least = fixed + BUFFERS * piece
    if memory < least:
        raise InvalidInput(
            f"memory={memory}: this model needs at least {-(-least // 10**6)}MB on {device.type}"
        )
    stay = (memory - least) // piece
    held = [i for i in range(count) if (i + 1) * stay // count > i * stay // count]
    return PinnedLayers(network, held, device, copies or Copies(device))


def places(layer: nn.Module) -> Iterator[tuple[nn.Parameter, int, int]]:
    """Yield a layer's weights, each with its first byte in a buffer and the byte after its last."""
    at = 0
    for parameter in layer.parameters():
        yield parameter, at, at + parameter.nbytes
        at += -(-parameter.nbytes // ALIGNED) * ALIGNED


def layer_bytes(layer: nn.Module) -> int:
    """Return the bytes that a layer's weights take in a buffer."""
    return max((last for _, _, last in places(layer)), default=0)
