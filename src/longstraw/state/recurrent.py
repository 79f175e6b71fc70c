"""State of one node in one gated DeltaNet layer: convolution tail and matrix state at chunk boundaries.

Shape suffixes: B batch, C convolution channels, W kernel width, H value heads, K key width, V value width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Boundary:
    """What a DeltaNet layer needs from all earlier tokens, or the cotangent of it. None: before the first token."""

    conv_tail_BCW: Tensor | None = None  # last W - 1 inputs of the convolution, model dtype
    matrix_BHKV: Tensor | None = None  # float32

    def zeros(self) -> Boundary:
        """Room for the cotangent of this boundary."""
        return Boundary(_zeros(self.conv_tail_BCW), _zeros(self.matrix_BHKV))

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
        return Boundary(
            None if self.conv_tail_BCW is None else self.conv_tail_BCW.expand(batch, -1, -1),
            None if self.matrix_BHKV is None else self.matrix_BHKV.expand(batch, -1, -1, -1),
        )

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for tensor in (self.conv_tail_BCW, self.matrix_BHKV) if tensor is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class RecurrentState:
    """The boundaries of a node: at the start of each of its chunks (for replay), and at its end (for its children).

    With `keep_starts` False (a constant state) only the running end is kept. Between `open_cotangents` and
    `close_cotangents` `d_end` collects the cotangents of the end that children send.
    """

    def __init__(self, begin: Boundary, *, keep_starts: bool) -> None:
        self.end = begin
        self.starts: list[Boundary] = []
        self.d_end = Boundary()
        self._keep_starts = keep_starts

    def advance(self, new_end: Boundary) -> None:
        """A chunk ran: its start boundary is kept if replay will need it, the end moves."""
        if self._keep_starts:
            self.starts.append(self.end)
        self.end = new_end

    def start(self, chunk: int) -> Boundary:
        """The boundary before the node's chunk of that index, which ran or is the next to run."""
        return self.starts[chunk] if chunk < len(self.starts) else self.end

    def open_cotangents(self) -> None:
        self.d_end = self.end.zeros()

    def close_cotangents(self) -> None:
        self.d_end = Boundary()

    @property
    def num_bytes(self) -> int:
        return sum(boundary.num_bytes for boundary in (*self.starts, self.end, self.d_end))


def _zeros(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.zeros_like(tensor)
