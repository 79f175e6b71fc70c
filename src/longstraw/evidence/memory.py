"""Live tensor bytes, counted by stage: the instrument behind every claim about memory.

Apart from the engine, which runs the same with and without it. On a CPU a storage is counted from the operator that
returned it until it dies, whoever held it last: a Python name, a view, an autograd node. The count depends on the
program only, so it is exact and repeatable. On CUDA the allocator's own statistics are read instead.

Not counted on a CPU: what an operator allocates inside itself and frees before it returns, and operators run by
other threads. CUDA's numbers include both, and are rounded up to the allocator's block sizes. Host memory that holds
state for the device (`state/residency.py`) is made by no operator, so it is no part of the device's count on either.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from longstraw.errors import InputError
from longstraw.execution.progress import Progress, Silent

NO_STAGE = ""
NUM_LARGEST_KEPT = 64


@dataclass(frozen=True)
class TensorRecord:
    """A tensor whose storage was new (or grew) when an operator returned it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    num_bytes: int  # of the whole storage
    stage: str  # innermost stage when it was made, "" outside every stage
    operator: str  # as in "aten.mm.default"


@dataclass(frozen=True)
class MemoryReport:
    """What a tracker saw so far. A stage's peak counts everything alive in it, not only what it made."""

    live_bytes: int
    peak_bytes: int
    stage_peak_bytes: Mapping[str, int]
    largest: tuple[TensorRecord, ...]


class _Meter(Protocol):
    """A source of byte counts. `take_peak_bytes` returns the peak since the call before and starts the next one."""

    def start(self) -> None: ...

    def stop(self) -> None: ...

    def watch(self, tensors: Iterable[Tensor]) -> None: ...

    def live_bytes(self) -> int: ...

    def take_peak_bytes(self) -> int: ...


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """One known storage. torch keeps a storage's Python object as long as the storage itself lives, so the callback
    runs when the bytes are freed, also if an autograd node was the last owner, and `id` names the storage till then."""

    __slots__ = ("counted_bytes", "key", "num_bytes")

    key: int
    num_bytes: int  # as last seen
    counted_bytes: int  # 0 for a storage that existed before tracking and is not watched


def _tensors_in(values: Iterable[object]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


class _StorageMeter(TorchDispatchMode):
    """Counts storages through the dispatcher, which also sees backward and custom autograd functions."""

    def __init__(self, device_type: str, on_tensor: Callable[[TensorRecord], None] | None) -> None:
        super().__init__()
        self.stage = NO_STAGE
        self._device_type = device_type
        self._on_tensor = on_tensor
        self._known: dict[int, _StorageRef] = {}
        self._live_bytes = 0
        self._peak_bytes = 0
        self._largest: dict[TensorRecord, None] = {}
        self._smallest_kept_bytes = 0

    def start(self) -> None:
        self.__enter__()

    def stop(self) -> None:
        self.__exit__(None, None, None)

    def live_bytes(self) -> int:
        return self._live_bytes

    def take_peak_bytes(self) -> int:
        peak, self._peak_bytes = self._peak_bytes, self._live_bytes
        return peak

    def watch(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.device.type == self._device_type:
                ref = self._ref_of(tensor.untyped_storage())
                self._count(ref, ref.num_bytes - ref.counted_bytes)

    def largest(self, num_tensors: int) -> tuple[TensorRecord, ...]:
        by_size = sorted(self._largest, key=lambda record: (-record.num_bytes, record.stage, record.operator))
        return tuple(by_size[: min(num_tensors, NUM_LARGEST_KEPT)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = list(_tensors_in((*args, *kwargs.values()) if kwargs else args))
        is_mutable = func._schema.is_mutable
        if is_mutable:  # out= and resize_ change the size of a storage that may be unknown yet
            for tensor in inputs:
                if tensor.device.type == self._device_type:
                    self._ref_of(tensor.untyped_storage())
        output = func(*args, **(kwargs or {}))
        for tensor in _tensors_in((output, inputs) if is_mutable else (output,)):
            if tensor.device.type == self._device_type:
                self._see_output(tensor, inputs, func)
        return output

    def _see_output(self, tensor: Tensor, inputs: list[Tensor], func: object) -> None:
        storage = tensor.untyped_storage()
        ref = self._known.get(id(storage))
        if ref is None:
            ref = self._ref_of(storage)
            # Schemas cannot tell a view from a new tensor: aten._unsafe_view declares no alias and makes one.
            grown_bytes = 0 if any(storage is source.untyped_storage() for source in inputs) else ref.num_bytes
        else:
            num_bytes = storage.nbytes()
            grown_bytes = num_bytes - ref.num_bytes
            ref.num_bytes = num_bytes
        if grown_bytes:
            self._count(ref, grown_bytes)
        if grown_bytes > 0:
            self._record(tensor, ref.num_bytes, func)

    def _ref_of(self, storage: torch.UntypedStorage) -> _StorageRef:
        key = id(storage)
        ref = self._known.get(key)
        if ref is None:
            ref = _StorageRef(storage, self._forget)
            ref.key, ref.num_bytes, ref.counted_bytes = key, storage.nbytes(), 0
            self._known[key] = ref
        return ref

    def _count(self, ref: _StorageRef, grown_bytes: int) -> None:
        counted_bytes = max(0, ref.counted_bytes + grown_bytes)
        self._live_bytes += counted_bytes - ref.counted_bytes
        ref.counted_bytes = counted_bytes
        self._peak_bytes = max(self._peak_bytes, self._live_bytes)

    def _forget(self, ref: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(ref, _StorageRef), "only storage refs carry this callback"
        del self._known[ref.key]
        self._live_bytes -= ref.counted_bytes

    def _record(self, tensor: Tensor, num_bytes: int, func: object) -> None:
        if self._on_tensor is None and num_bytes < self._smallest_kept_bytes:
            return
        record = TensorRecord(tuple(tensor.shape), tensor.dtype, num_bytes, self.stage, str(func))
        if num_bytes >= self._smallest_kept_bytes:
            self._largest[record] = None
            if len(self._largest) >= 2 * NUM_LARGEST_KEPT:
                kept = self.largest(NUM_LARGEST_KEPT)
                self._largest = dict.fromkeys(kept)
                self._smallest_kept_bytes = kept[-1].num_bytes
        if self._on_tensor is not None:
            self._on_tensor(record)


class _AllocatorMeter:
    """CUDA's caching allocator. Bytes alive at the first start are left out, but for the watched ones."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._uncounted_bytes = 0
        self._started = False

    def start(self) -> None:
        if not self._started:
            self._started = True
            self._uncounted_bytes += torch.cuda.memory_allocated(self._device)
            torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        pass

    def live_bytes(self) -> int:
        return torch.cuda.memory_allocated(self._device) - self._uncounted_bytes if self._started else 0

    def take_peak_bytes(self) -> int:
        peak = torch.cuda.max_memory_allocated(self._device) - self._uncounted_bytes if self._started else 0
        torch.cuda.reset_peak_memory_stats(self._device)
        return peak

    def watch(self, tensors: Iterable[Tensor]) -> None:
        storages = {id(s): s for s in (t.untyped_storage() for t in tensors if t.device.type == "cuda")}
        self._uncounted_bytes -= sum(storage.nbytes() for storage in storages.values())


class MemoryTracker:
    """Counts live tensor bytes of one device while its `with` block runs; a tensor freed later is still subtracted.

        with MemoryTracker() as tracker:
            tracker.watch(model.parameters())
            with tracker.stage("capture"):
                ...
        tracker.peak_bytes, tracker.stage_peak_bytes["capture"], tracker.largest(5)

    Tensors that existed before count only when watched; they must be given once and, on CUDA, must be older than the
    block. `on_tensor` is called with every new tensor and may raise, which stops the operator's caller: a test that
    some shape never occurs points at the line that made it. Records of single tensors need the dispatcher, so on CUDA
    they are kept only if `on_tensor` is given. Peaks on CUDA use and reset the allocator's peak statistics.
    Does not change values or gradients.
    """

    def __init__(
        self, device: torch.device | str = "cpu", *, on_tensor: Callable[[TensorRecord], None] | None = None
    ) -> None:
        self._device = torch.device(device)
        self._meter: _Meter
        self._recorder: _StorageMeter | None = None
        if self._device.type == "cuda":
            self._meter = _AllocatorMeter(self._device)
            if on_tensor is not None:
                self._recorder = _StorageMeter("cuda", on_tensor)
        else:
            self._recorder = _StorageMeter(self._device.type, on_tensor)
            self._meter = self._recorder
        self._stages: list[str] = []
        self._stage_peak_bytes: dict[str, int] = {}
        self._peak_bytes = 0

    def __enter__(self) -> MemoryTracker:
        self._meter.start()
        if self._recorder is not None and self._recorder is not self._meter:
            self._recorder.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._fold_peak()
        if self._recorder is not None and self._recorder is not self._meter:
            self._recorder.stop()
        self._meter.stop()

    def watch(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that already exist, such as weights. Tensors that share a storage count once."""
        self._meter.watch(tensors)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name what runs inside. Stages nest; an outer stage's peak includes its inner ones. Names may recur."""
        self.begin_stage(name)
        try:
            yield
        finally:
            self.end_stage(name)

    def begin_stage(self, name: str) -> None:
        """The first half of `stage`, for callers that learn of a stage's end in another call."""
        if not name:
            raise InputError("memory tracker: a stage needs a name.")
        self._fold_peak()
        self._stages.append(name)
        self._stage_peak_bytes.setdefault(name, 0)
        self._name_stage()

    def end_stage(self, name: str) -> None:
        """The second half of `stage`. Stages end in the reverse order of their beginning."""
        assert self._stages[-1:] == [name], f"stage {name} ends, but the open stages are {self._stages}"
        self._fold_peak()
        self._stages.pop()
        self._name_stage()

    def pause(self) -> None:
        """Until `resume`, new tensors of a CPU are not seen, which makes operators as fast as without a tracker."""
        if self._meter is self._recorder:
            self._meter.stop()

    def resume(self) -> None:
        """Count again. What died meanwhile was subtracted; what was made meanwhile stays unknown."""
        if self._meter is self._recorder:
            self._meter.start()

    @property
    def live_bytes(self) -> int:
        return self._meter.live_bytes()

    @property
    def peak_bytes(self) -> int:
        self._fold_peak()
        return self._peak_bytes

    @property
    def stage_peak_bytes(self) -> dict[str, int]:
        """Most bytes alive during each stage, over all its occurrences, whoever made them."""
        self._fold_peak()
        return dict(self._stage_peak_bytes)

    def largest(self, num_tensors: int = 10) -> tuple[TensorRecord, ...]:
        """The largest single tensors made (at most 64), largest first, equal records once. Watched ones are no part."""
        return self._recorder.largest(num_tensors) if self._recorder is not None else ()

    def report(self) -> MemoryReport:
        return MemoryReport(self.live_bytes, self.peak_bytes, self.stage_peak_bytes, self.largest())

    def _name_stage(self) -> None:
        if self._recorder is not None:
            self._recorder.stage = self._stages[-1] if self._stages else NO_STAGE

    def _fold_peak(self) -> None:
        peak = self._meter.take_peak_bytes()
        self._peak_bytes = max(self._peak_bytes, peak)
        for name in self._stages:
            self._stage_peak_bytes[name] = max(self._stage_peak_bytes[name], peak)


class StageProgress:
    """The engine's stages as stages of a tracker: `Engine(..., progress=StageProgress(tracker))`. Hands calls on."""

    def __init__(self, tracker: MemoryTracker, progress: Progress | None = None) -> None:
        self._tracker = tracker
        self._progress = progress or Silent()
        self._stage = NO_STAGE

    def start(self, stage: str, total_tokens: int) -> None:
        self._stage = stage
        self._tracker.begin_stage(stage)
        self._progress.start(stage, total_tokens)

    def advance(self, num_tokens: int) -> None:
        self._progress.advance(num_tokens)

    def finish(self) -> None:
        self._progress.finish()
        self._tracker.end_stage(self._stage)
