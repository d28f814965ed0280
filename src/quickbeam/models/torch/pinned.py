"""Models that are larger than an accelerator's memory.

As many layers as fit stay on the device. The weights of the other layers are copied from pinned
host memory in every pass, each while the layers before it compute.

Two buffers on the device hold the copied layers by turns. A layer waits for its copy. Once the
layer is computed, its buffer is filled with the next layer that uses the buffer. After the last
such layer of a pass, that is the first such layer of the next pass. In a pass the device waits,
with events between two streams. The host does not wait.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    """Copies to buffers on the device.

    On CUDA copies run in a second stream while the device computes. Elsewhere they run at once.
    `slot` is the index of the buffer that is written.
    """

    def __init__(self, device: torch.device) -> None:
        stream: Any = torch.cuda.Stream
        self._device = device
        self._stream = stream(device) if device.type == "cuda" else None
        self._events = dict[int, Any]()

    def start(self, slot: int, target: torch.Tensor, source: torch.Tensor) -> None:
        """Queue a copy. It runs after all work that was queued before."""
        if self._stream is None:
            target.copy_(source)
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            self._events[slot] = self._stream.record_event()

    def wait(self, slot: int) -> None:
        """Make work that is queued later wait for the last copy to this buffer."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_event(self._events[slot])


class PinnedLayers(Streamed):
    """Some of a model's decoder layers, with their weights in host memory.

    The constructor puts the model on the device (see `pin_layers`). `resident`: indices of the
    layers whose weights stay on the device. Raises `QuickbeamError` if the host has no memory for a
    layer.
    """

    def __init__(
        self,
        network: Network,
        resident: Sequence[int],
        device: torch.device,
        copies: Copies,
    ) -> None:
        self.source = "host memory"
        self._copies = copies
        self.weight_bytes = sum(parameter.nbytes for parameter in network.parameters())
        streamed = [layer for i, layer in enumerate(network.blocks) if i not in resident]
        self._sizes = [layer_bytes(layer) for layer in streamed]
        self._host = [host_copy(layer, device) for layer in streamed]
        self._buffers = [
            torch.empty(max(self._sizes), dtype=torch.uint8, device=device) for _ in range(BUFFERS)
        ]
        self._layer_in_slot: list[int | None] = [None] * BUFFERS
        for index, layer in enumerate(streamed):
            buffer = self._buffers[index % BUFFERS]
            for parameter, view in views_in(buffer, layer):
                parameter.data = view
            self._add_hooks(layer, index)
        network.to(device)
        self.streamed_bytes = sum(self._sizes)

    def _add_hooks(self, layer: nn.Module, index: int) -> None:
        """Have `_before` and `_after` called around the layer."""

        def before(*_: Any) -> None:
            self._before(index)

        def after(*_: Any) -> None:
            self._after(index)

        layer.register_forward_pre_hook(before)
        layer.register_forward_hook(after)

    def _before(self, index: int) -> None:
        """Wait for the weights of streamed layer `index`."""
        slot = index % BUFFERS
        if self._layer_in_slot[slot] != index:  # the first pass, or one after an interrupted pass
            self._fetch(index)
        self._copies.wait(slot)

    def _after(self, index: int) -> None:
        """Start the copy of the next layer with the buffer of streamed layer `index`."""
        following = index + BUFFERS
        self._fetch(following if following < len(self._host) else index % BUFFERS)

    def _fetch(self, index: int) -> None:
        slot = index % BUFFERS
        self._layer_in_slot[slot] = None
        target = self._buffers[slot][: self._sizes[index]]
        self._copies.start(slot, target, self._host[index])
        self._layer_in_slot[slot] = index

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

    Returns None if all weights fit.

    Everything but the layers always stays on the device, and as many layers as fit beside two
    buffers. These layers are spread evenly over the pass, so that copies go on while they compute.
    Raises `InvalidInput` if the memory is too small.
    """
    sizes = [layer_bytes(layer) for layer in network.blocks]
    total = sum(parameter.nbytes for parameter in network.parameters())
    fixed = total - sum(parameter.nbytes for parameter in network.blocks.parameters())
    largest = max(sizes)
    count = len(sizes)
    if memory >= fixed + sum(sizes):
        network.to(device)
        return None
    least = fixed + BUFFERS * largest
    if memory < least:
        raise InvalidInput(
            f"memory={memory}: this model needs at least {-(-least // 10**6)}MB on {device.type}"
        )
    fitting = (memory - least) // largest
    resident = [i for i in range(count) if (i + 1) * fitting // count > i * fitting // count]
    return PinnedLayers(network, resident, device, copies or Copies(device))


def host_copy(layer: nn.Module, device: torch.device) -> torch.Tensor:
    """Copy a layer's weights to one piece of host memory, which is pinned for CUDA."""
    size = layer_bytes(layer)
    try:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    except RuntimeError as error:
        raise QuickbeamError(
            f"memory: the host can't hold a layer of {size / 1e6:.0f} MB "
            f"({first_line(error)}): take a smaller model"
        ) from error
    for parameter, view in views_in(host, layer):
        view.copy_(parameter.detach())
    return host


def views_in(buffer: torch.Tensor, layer: nn.Module) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Yield a layer's weights, each with its view of a buffer of bytes."""
    first = 0
    for parameter in layer.parameters():
        view = buffer[first : first + parameter.nbytes]
        yield parameter, view.view(parameter.dtype).view(parameter.shape)
        first += aligned(parameter.nbytes)


def layer_bytes(layer: nn.Module) -> int:
    """Return the bytes that a layer's weights take in a buffer."""
    first = 0
    end = 0
    for parameter in layer.parameters():
        end = first + parameter.nbytes
        first += aligned(parameter.nbytes)
    return end


def aligned(size: int) -> int:
    """Return `size` rounded up to a multiple of `ALIGNED`."""
    return -(-size // ALIGNED) * ALIGNED
