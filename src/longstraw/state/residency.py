"""Where the state of a node lives: on the device, or in host memory, from where operators fetch it through a stage.

Apart from the kinds of state, which ask their residency for buffers, write to them and read from them without knowing
where they are.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from longstraw.ops.staging import VIEWS, Passage, Stage, Staging


class Residency(Protocol):
    """Memory for state, and the ways in and out of it."""

    @property
    def staging(self) -> Staging:
        """How operators pass over rows that live here."""
        ...

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A buffer of the dtype of `like`, which is on the device."""
        ...

    def zeros_like(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """A zero buffer of the shape of one made by `empty`."""
        ...

    def write(self, target: Tensor, source: Tensor) -> None:
        """Overwrite (a view of) a buffer with a tensor of the device."""
        ...

    def store(self, tensor: Tensor) -> Tensor:
        """A tensor of the device, which is not written to again, as it is kept here."""
        ...

    def fetch(self, buffer: Tensor) -> Tensor:
        """(A view of) a buffer as a tensor of the device: that itself, or a copy."""
        ...

    def plan(self, passages: Iterable[Passage]) -> None:
        """What is passed over next, in this order; see `Stage.plan`."""
        ...

    def check(self, passages: Iterable[Passage]) -> None:
        """Raise `InputError` if rows cannot be passed over for want of device memory."""
        ...

    def rest(self) -> None:
        """Give back what is held on the device beside the state."""
        ...


class OnDevice:
    """State beside the weights."""

    staging: Staging = VIEWS

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """On the device of `like`."""
        return like.new_empty(shape)

    def zeros_like(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """Beside the buffer."""
        return torch.zeros_like(buffer, dtype=dtype)

    def write(self, target: Tensor, source: Tensor) -> None:
        """A copy on the device."""
        target.copy_(source)

    def store(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def fetch(self, buffer: Tensor) -> Tensor:
        """The buffer itself."""
        return buffer

    def plan(self, passages: Iterable[Passage]) -> None:
        """Nothing has to be fetched."""

    def check(self, passages: Iterable[Passage]) -> None:
        """Nothing has to be fetched."""

    def rest(self) -> None:
        """Nothing is held."""


ON_DEVICE = OnDevice()


class HostMemory:
    """Host buffers, pinned for a CUDA device, and how many bytes of them are alive.

    Where the device is a CPU too, they are made without an operator, so a `MemoryTracker` counts the device's own bytes
    alone, as on CUDA.
    """

    def __init__(self, device: torch.device) -> None:
        self._pinned = device.type == "cuda"
        self.num_bytes = 0
        self.peak_bytes = 0

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised buffer; counted until its storage is freed."""
        if self._pinned:
            buffer = torch.empty(shape, dtype=dtype, pin_memory=True)
        else:
            num_elements = math.prod(shape)
            storage = torch.UntypedStorage(num_elements * dtype.itemsize)
            buffer = torch.empty(0, dtype=dtype).set_(storage, 0, (num_elements,), (1,)).view(shape)
        self._count(buffer.untyped_storage())
        return buffer

    def _count(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        self.num_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.num_bytes)
        weakref.finalize(storage, self._forget, num_bytes).atexit = False

    def _forget(self, num_bytes: int) -> None:
        self.num_bytes -= num_bytes


class InHostMemory:
    """State in host memory, for the device that works on it. Values and gradients are bit for bit those of `OnDevice`.

    `staging_bytes` of the device serve what is fetched: see `Stage`.
    """

    def __init__(self, device: torch.device, staging_bytes: int) -> None:
        self.memory = HostMemory(device)
        self.stage = Stage(device, staging_bytes)
        self._device = device

    @property
    def staging(self) -> Staging:
        """The stage."""
        return self.stage

    def empty(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """In host memory."""
        return self.memory.empty(shape, like.dtype)

    def zeros_like(self, buffer: Tensor, dtype: torch.dtype) -> Tensor:
        """In host memory."""
        return self.memory.empty(tuple(buffer.shape), dtype).zero_()

    def write(self, target: Tensor, source: Tensor) -> None:
        """A copy from the device, queued behind the work that makes the source."""
        source = source.detach().contiguous()  # here, so that no copy of it is made on the copies' stream
        self.stage.copies.wait_for_compute()
        self.stage.copies.copy(target, source)

    def store(self, tensor: Tensor) -> Tensor:
        """A copy in a buffer of its own."""
        buffer = self.empty(tuple(tensor.shape), tensor)
        self.write(buffer, tensor)
        return buffer

    def fetch(self, buffer: Tensor) -> Tensor:
        """A copy on the device, behind what was queued to be written."""
        if self._device.type == "cpu":
            return buffer.clone()
        self.stage.copies.hold_compute(self.stage.copies.mark())
        return buffer.to(self._device, non_blocking=True)

    def plan(self, passages: Iterable[Passage]) -> None:
        """The stage looks ahead along it."""
        self.stage.plan([passage for passage in passages if len(passage.rows) > 0])

    def check(self, passages: Iterable[Passage]) -> None:
        """The stage must hold two pieces of each."""
        for passage in passages:
            self.stage.check(passage)

    def rest(self) -> None:
        """The stage gives its slots back."""
        self.stage.rest()
