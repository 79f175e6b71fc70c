"""How operators reach rows of state: as they are where they live on the device, or through a stage from host memory.

Apart from the operators, which iterate over parts of rows and do not know where those live. A stage owns two slots of
device memory. While one is read, the next part is copied into the other: the next slice of a layer too large for a
slot, else the first part of what was planned to follow, which is the next layer. Sums, to which the reader adds in
place, are copied back before their slot is filled again.

All copies run in one queue, so a part that is read back always holds what was sent before. On CUDA the queue is a
stream of its own; on a CPU it copies at once, through the same slots and in the same order.

Shape suffixes: N rows, R picked rows, W their width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longstraw.errors import InputError

# Tensors of a part begin at multiples of it in their slot: what vector loads and CUDA kernels want.
ALIGNMENT_BYTES = 64


@dataclass(frozen=True, eq=False)
class Rows:
    """Tensors that hold one row for each of the same tokens: some are only read, sums are also added to in place."""

    read: tuple[Tensor, ...]
    sums: tuple[Tensor, ...] = ()

    def __len__(self) -> int:
        return self.tensors[0].shape[0]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, those that are only read first."""
        return (*self.read, *self.sums)

    def cut(self, begin: int, end: int) -> Rows:
        """The rows begin to end as views."""
        return self.replace(tuple(tensor[begin:end] for tensor in self.tensors))

    def replace(self, tensors: tuple[Tensor, ...]) -> Rows:
        """Other tensors in the same roles."""
        return Rows(tensors[: len(self.read)], tensors[len(self.read) :])

    def num_bytes(self, num_rows: int) -> int:
        """What so many rows take in a slot."""
        return sum(_aligned(num_rows * _row_bytes(tensor)) for tensor in self.tensors)

    def is_same(self, other: Rows) -> bool:
        """Whether both are the same rows of the same memory in the same roles."""
        mine, others = ([(t.data_ptr(), t.shape) for t in rows.tensors] for rows in (self, other))
        return mine == others and len(self.sums) == len(other.sums)


@dataclass(frozen=True, eq=False)
class Passage:
    """One pass over rows. Parts hold whole pieces, so that a piece is the same rows wherever they live."""

    rows: Rows
    rows_per_piece: int


class Staging(Protocol):
    """A way to reach rows from the device."""

    def parts(self, passage: Passage) -> Iterator[tuple[int, Rows]]:
        """The rows in order, in parts that begin at a piece: first row and part, which is valid until the next one.

        What is added to a part's sums reaches the rows' own.
        """
        ...

    def gather(self, rows_NW: Tensor, index_R: Tensor) -> Tensor:
        """The rows `[R, W]` that `index_R` (int64, repeats allowed) names, on the device."""
        ...

    def scatter_add(self, sums_NW: Tensor, index_R: Tensor, share_RW: Tensor) -> None:
        """Add a share to each named row in place, in the order of the index."""
        ...


class Views:
    """Rows that live on the device are reached as they are."""

    def parts(self, passage: Passage) -> Iterator[tuple[int, Rows]]:
        """One part: the rows themselves."""
        yield 0, passage.rows

    def gather(self, rows_NW: Tensor, index_R: Tensor) -> Tensor:
        """See `Staging`."""
        return rows_NW.index_select(0, index_R)

    def scatter_add(self, sums_NW: Tensor, index_R: Tensor, share_RW: Tensor) -> None:
        """See `Staging`."""
        sums_NW.index_add_(0, index_R, share_RW)


VIEWS = Views()


@dataclass(frozen=True, eq=False)
class Fetch:
    """Rows on their way through a slot."""

    source: Rows  # in host memory
    staged: Rows  # in the slot
    slot: int
    arrival: torch.cuda.Event | None  # None where copies are done when they return


class CopyQueue:
    """Copies between host memory and one device, in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Overwrite the target once every copy before is done."""
        if self._stream is None:
            target.copy_(source)
            return
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        if source.device.type == "cuda":
            source.record_stream(self._stream)  # its memory is not used again before it was read

    def wait_for_compute(self) -> None:
        """Later copies wait for all work that was queued so far."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def mark(self) -> torch.cuda.Event | None:
        """A mark behind the copies so far."""
        return None if self._stream is None else self._stream.record_event()

    def hold_compute(self, mark: torch.cuda.Event | None) -> None:
        """Work that is queued from here on waits for the copies before the mark."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def finish(self) -> None:
        """Return when all copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


class Stage:
    """Two slots on the device, of half of `staging_bytes` each, through which rows in host memory pass.

    Slots grow up to that size as parts need it and are given back by `rest`. `on_fetch` is called with every fetch when
    its copies are queued. Raises `InputError` for rows of which not one piece fits a slot.
    """

    def __init__(
        self, device: torch.device, staging_bytes: int, *, on_fetch: Callable[[Fetch], None] | None = None
    ) -> None:
        self.staging_bytes = staging_bytes
        self.on_fetch = on_fetch
        self.copies = CopyQueue(device)
        self._device = device
        self._slots = [torch.empty(0, dtype=torch.uint8, device=device) for _ in range(2)]
        self._ahead: Fetch | None = None  # begun, not yet asked for
        self._in_use: list[Fetch] = []
        self._plan: list[Passage] = []

    def plan(self, passages: Sequence[Passage]) -> None:
        """What is passed over next, in this order. A hint: passages that do not come, or others, cost time only."""
        self._in_use, self._ahead = [], None  # a pass that was broken off by an error leaves its own
        self._plan = list(passages)
        self._look_ahead(None)

    def rest(self) -> None:
        """Give the slots back and forget what was planned."""
        self._in_use, self._ahead, self._plan = [], None, []
        self._slots = [self._new_slot(index, 0) for index in range(2)]

    def check(self, passage: Passage) -> None:
        """Raise `InputError` unless a piece of the rows and the next one can be on the device."""
        num_rows = min(passage.rows_per_piece, len(passage.rows))
        needed_bytes = 2 * passage.rows.num_bytes(num_rows)
        if needed_bytes > self.staging_bytes:
            raise InputError(
                f"staging_bytes is {self.staging_bytes:,}, but two pieces of {num_rows:,} tokens of one layer's state "
                f"take {needed_bytes:,}; set staging_bytes to that or more, or lower chunk_tokens."
            )

    def parts(self, passage: Passage) -> Iterator[tuple[int, Rows]]:
        """Copies of as many whole pieces as a slot holds. See `Staging`."""
        self._reach(passage)
        num_rows = self._rows_per_part(passage)
        for begin in range(0, len(passage.rows), num_rows):
            fetch = self._take(passage.rows.cut(begin, begin + num_rows))
            self._look_ahead(passage.rows.cut(begin + num_rows, begin + 2 * num_rows))
            try:
                yield begin, fetch.staged
            finally:
                self._leave(fetch)

    def gather(self, rows_NW: Tensor, index_R: Tensor) -> Tensor:
        """See `Staging`. Every named row travels once, gathered in host memory: far fewer than the rows or the index.

        On CUDA it waits for the device, since host memory is indexed by the host.
        """
        out_RW = torch.empty(len(index_R), rows_NW.shape[1], dtype=rows_NW.dtype, device=index_R.device)
        for staged, where_R, local_R in self._picked(Rows((rows_NW,)), index_R):
            out_RW.index_copy_(0, where_R, staged.read[0].index_select(0, local_R))
        return out_RW

    def scatter_add(self, sums_NW: Tensor, index_R: Tensor, share_RW: Tensor) -> None:
        """See `Staging`. The named rows are fetched, added to and sent back, so that rounding is that of `Views`."""
        for staged, where_R, local_R in self._picked(Rows((), (sums_NW,)), index_R):
            staged.sums[0].index_add_(0, local_R, share_RW.index_select(0, where_R))

    def _picked(self, rows: Rows, index_R: Tensor) -> Iterator[tuple[Rows, Tensor, Tensor]]:
        """Parts of the named rows: each with the entries of the index that name its rows, and these rows in it."""
        named_N, local_R = torch.unique(index_R, return_inverse=True)
        host_N = named_N.cpu()
        num_rows = self._rows_per_part(Passage(rows.replace(tuple(t[: len(host_N)] for t in rows.tensors)), 1))
        for begin in range(0, len(host_N), num_rows):
            part_N = host_N[begin : begin + num_rows]
            where_R = ((local_R >= begin) & (local_R < begin + num_rows)).nonzero()[:, 0]
            self.copies.finish()  # host memory holds what was sent to it
            fetch = self._use(self._begin(rows.replace(tuple(self._pick(t, part_N) for t in rows.tensors))))
            try:
                yield fetch.staged, where_R, local_R[where_R] - begin
            finally:
                self._leave(fetch)
            self.copies.finish()
            for sums, picked in zip(rows.sums, fetch.source.sums, strict=True):
                sums.index_copy_(0, part_N, picked)

    def _pick(self, tensor: Tensor, index_N: Tensor) -> Tensor:
        shape = (len(index_N), *tensor.shape[1:])
        picked = torch.empty(shape, dtype=tensor.dtype, pin_memory=self._device.type == "cuda")
        return torch.index_select(tensor, 0, index_N, out=picked)

    def _reach(self, passage: Passage) -> None:
        """Drop from the plan what is reached now, and what was to come before it."""
        for index, planned in enumerate(self._plan):
            if planned.rows.is_same(passage.rows):
                del self._plan[: index + 1]
                return

    def _rows_per_part(self, passage: Passage) -> int:
        rows = passage.rows
        slot_bytes = self.staging_bytes // 2
        if rows.num_bytes(len(rows)) <= slot_bytes:
            return max(1, len(rows))
        self.check(passage)
        # Room between tensors is counted for every piece, so a few more might fit; never fewer.
        return slot_bytes // rows.num_bytes(passage.rows_per_piece) * passage.rows_per_piece

    def _take(self, part: Rows) -> Fetch:
        ahead, self._ahead = self._ahead, None
        return self._use(ahead if ahead is not None and ahead.source.is_same(part) else self._begin(part))

    def _use(self, fetch: Fetch) -> Fetch:
        self.copies.hold_compute(fetch.arrival)
        self._in_use.append(fetch)
        return fetch

    def _leave(self, fetch: Fetch) -> None:
        """The reader is done: sums go home, and the slot is free for copies that are queued after that."""
        if fetch not in self._in_use:
            return
        self._in_use.remove(fetch)
        if fetch.source.sums:
            self.copies.wait_for_compute()
            for sums, staged in zip(fetch.source.sums, fetch.staged.sums, strict=True):
                self.copies.copy(sums, staged)

    def _look_ahead(self, rest: Rows | None) -> None:
        """Begin to fetch what comes next: the rest of the rows in use, or the first part of the plan."""
        if rest is None or len(rest) == 0:
            rest = self._plan[0].rows.cut(0, self._rows_per_part(self._plan[0])) if self._plan else None
        if rest is not None and self._ahead is None:
            self._ahead = self._begin(rest)

    def _begin(self, source: Rows) -> Fetch:
        taken = {fetch.slot for fetch in (*self._in_use, self._ahead) if fetch is not None}
        free = [slot for slot in range(2) if slot not in taken]
        assert free, "two parts at a time: of a path, one node lives in host memory"
        self.copies.wait_for_compute()  # the slot's earlier reader
        staged = self._room(free[0], source)
        for target, tensor in zip(staged.tensors, source.tensors, strict=True):
            self.copies.copy(target, tensor)
        fetch = Fetch(source, staged, free[0], self.copies.mark())
        if self.on_fetch is not None:
            self.on_fetch(fetch)
        return fetch

    def _room(self, slot: int, rows: Rows) -> Rows:
        """Room in a slot for such rows."""
        needed_bytes = rows.num_bytes(len(rows))
        if self._slots[slot].numel() < needed_bytes:
            # Rounded up, since parts grow with every chunk while a prompt is captured.
            num_bytes = min(self.staging_bytes // 2, 2 ** (needed_bytes - 1).bit_length())
            self._slots[slot] = self._new_slot(slot, num_bytes)
        tensors, begin = [], 0
        for tensor in rows.tensors:
            num_bytes = len(rows) * _row_bytes(tensor)
            tensors.append(self._slots[slot][begin : begin + num_bytes].view(tensor.dtype).view(tensor.shape))
            begin += _aligned(num_bytes)
        return rows.replace(tuple(tensors))

    def _new_slot(self, slot: int, num_bytes: int) -> Tensor:
        # The old one's memory goes back to computations, which must not use it while a copy fills it; and is given
        # back before the new one is made.
        self.copies.hold_compute(self.copies.mark())
        self._slots[slot] = torch.empty(0, dtype=torch.uint8, device=self._device)
        if num_bytes > 0:
            self._slots[slot] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
            self.copies.wait_for_compute()
        return self._slots[slot]


def _row_bytes(tensor: Tensor) -> int:
    return tensor.shape[1:].numel() * tensor.element_size()


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
