"""State of one node in one gated DeltaNet layer: convolution tail and matrix state at chunk boundaries.

Shape suffixes: B batch, C convolution channels, W kernel width, H value heads, K key width, V value width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.state.residency import ON_DEVICE, Residency


@dataclass(frozen=True, eq=False)
class Boundary:
    """What a DeltaNet layer needs from all earlier tokens, or the cotangent of it. None: before the first token."""

    conv_tail_BCW: Tensor | None = None  # last W - 1 inputs of the convolution, model dtype
    matrix_BHKV: Tensor | None = None  # float32

    def map(self, function: Callable[[Tensor], Tensor]) -> Boundary:
        """The function's results on what there is."""
        conv, matrix = self.conv_tail_BCW, self.matrix_BHKV
        return Boundary(None if conv is None else function(conv), None if matrix is None else function(matrix))

    def add_(self, other: Boundary) -> None:
        """Add a cotangent in place, so that many children take no more room than one."""
        for total, addend in (
            (self.conv_tail_BCW, other.conv_tail_BCW),
            (self.matrix_BHKV, other.matrix_BHKV),
        ):
            if total is not None and addend is not None:
                total.add_(addend)

    def expand(self, batch: int) -> Boundary:
        """The same boundary for every row of a batch; views."""
        return self.map(lambda tensor: tensor.expand(batch, *tensor.shape[1:]))

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for tensor in (self.conv_tail_BCW, self.matrix_BHKV) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class RecurrentState:
    """The boundaries of a node: at the start of each of its chunks (for replay), and at its end (for its children).

    With `keep_starts` False (a constant state) only the running end is kept. Between `open_cotangents` and
    `close_cotangents` `d_end` collects the cotangents of the end that children send. Starts, one for each chunk, lie
    where `residency` says; the end and its cotangent, one each, are always on the device.
    """

    def __init__(self, begin: Boundary, *, keep_starts: bool, residency: Residency = ON_DEVICE) -> None:
        self.end = begin
        self.starts: list[Boundary] = []
        self.d_end = Boundary()
        self._keep_starts = keep_starts
        self._residency = residency

    def advance(self, new_end: Boundary) -> None:
        """A chunk ran: its start boundary is kept if replay will need it, the end moves."""
        if self._keep_starts:
            self.starts.append(self.end.map(self._residency.store))
        self.end = new_end

    def start(self, chunk: int) -> Boundary:
        """The boundary before the node's chunk of that index, which ran or is the next to run, on the device."""
        return self.starts[chunk].map(self._residency.fetch) if chunk < len(self.starts) else self.end

    def open_cotangents(self) -> None:
        self.d_end = self.end.map(torch.zeros_like)

    def close_cotangents(self) -> None:
        self.d_end = Boundary()

    @property
    def num_bytes(self) -> int:
        return sum(boundary.num_bytes for boundary in (*self.starts, self.end, self.d_end))
