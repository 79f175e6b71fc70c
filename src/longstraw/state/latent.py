"""Latents of one node in one MLA layer: a row [latent | rotated shared key] per token, and index keys where it indexes.

To attention the rows are one key head whose value is the key itself, so runs of them go wherever runs of keys go, and
a row has one cotangent.

Shape suffixes: T tokens of a chunk, N tokens of the node, W width of a row, D width of an index key.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.ops.attention import KeyRun
from longstraw.ops.index_scan import IndexRun
from longstraw.ops.kernels import wide_dtype
from longstraw.state.residency import ON_DEVICE, Residency


class LatentState:
    """The extent of a node in one layer, and its cotangents while a replay needs them.

    Owns rows `[N, W]` and, in a layer with an indexer, index keys `[N, D]`, both in the model's dtype; between
    `open_cotangents` and `close_cotangents` a float32 buffer `[N, W]`. Index keys have no cotangent: what they choose
    is discrete. Buffers are made at the first write, when widths and dtype are known; they lie where `residency` says.
    """

    def __init__(self, *, start: int, num_tokens: int, residency: Residency = ON_DEVICE) -> None:
        self.start = start
        self._residency = residency
        self.capacity = num_tokens
        self.num_written = 0
        self._rows: Tensor | None = None
        self._index_keys: Tensor | None = None
        self._d_rows: Tensor | None = None

    def write(self, rows_TW: Tensor, index_keys_TD: Tensor | None) -> None:
        """Append a chunk's rows and index keys."""
        end = self.num_written + rows_TW.shape[0]
        if self._rows is None:
            self._rows = self._residency.empty((self.capacity, rows_TW.shape[-1]), rows_TW)
            if index_keys_TD is not None:
                self._index_keys = self._residency.empty((self.capacity, index_keys_TD.shape[-1]), index_keys_TD)
        self._residency.write(self._rows[self.num_written : end], rows_TW.detach())
        if self._index_keys is not None:
            assert index_keys_TD is not None, "a layer with an indexer makes index keys of every token"
            self._residency.write(self._index_keys[self.num_written : end], index_keys_TD)
        self.num_written = end

    def run(self, end: int | None = None) -> list[KeyRun]:
        """The rows written so far, or of the node's first `end` tokens: one run of views, or none when empty."""
        end = self.num_written if end is None else end
        if self._rows is None or end == 0:
            return []
        rows = self._rows[:end, None]
        d_rows = None if self._d_rows is None else self._d_rows[:end, None]
        return [KeyRun(rows, rows, self.start, d_rows, d_rows, self._residency.staging)]

    def index_run(self, end: int | None = None) -> list[IndexRun]:
        """The index keys of the same tokens."""
        end = self.num_written if end is None else end
        if self._index_keys is None or end == 0:
            return []
        return [IndexRun(self._index_keys[:end], self.start, self._residency.staging)]

    def complete_index_run(self) -> list[IndexRun]:
        """The index keys of all tokens, written or not, or none in a layer without an indexer."""
        if self._index_keys is None:
            return []
        return [IndexRun(self._index_keys, self.start, self._residency.staging)]

    def complete_run(self, *, constant: bool) -> KeyRun:
        """The rows of all tokens, written or not, as replay finds them. Cotangents not yet there take no memory."""
        assert self._rows is not None, "a chunk was written"
        rows = self._rows[:, None]
        d_rows = None if constant else torch.empty(rows.shape, dtype=wide_dtype(rows.dtype), device="meta")
        return KeyRun(rows, rows, self.start, d_rows, d_rows, self._residency.staging)

    def own_cotangents(self, begin: int, end: int) -> Tensor | None:
        """What later tokens sent to the node's rows begin to end, on the device."""
        return None if self._d_rows is None else self._residency.fetch(self._d_rows[begin:end])

    def open_cotangents(self) -> None:
        """A zero buffer for the rows' cotangents, which attention adds to in place."""
        assert self._rows is not None, "captured before it is replayed"
        self._d_rows = self._residency.zeros_like(self._rows, wide_dtype(self._rows.dtype))

    def close_cotangents(self) -> None:
        self._d_rows = None

    @property
    def num_bytes(self) -> int:
        tensors = [x for x in (self._rows, self._index_keys, self._d_rows) if x is not None]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
