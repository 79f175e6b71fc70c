"""What a person sees while a step runs, and what each stage took: seconds and peak bytes.

The engine reports stages to a `Progress`; `StageMeter` is one that measures and passes on to a display. On a terminal
the display is a bar a stage with tokens per second and time left; elsewhere it is quiet.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from longstraw.execution.progress import Progress as StageListener
from longstraw.execution.progress import Silent


class StageMemory(Protocol):
    """Counts live bytes while stages run."""

    def begin_stage(self, name: str) -> None: ...

    def end_stage(self, name: str) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...

    @property
    def peak_bytes(self) -> int: ...

    @property
    def stage_peak_bytes(self) -> dict[str, int]: ...


# Sampling runs thousands of tiny operators, which counting would slow by half; the update's peak is elsewhere.
UNCOUNTED_STAGE = "sample"

MemoryTracking = Callable[[], AbstractContextManager[StageMemory]]


@dataclass
class StageCosts:
    """What the stages of one step took, over all their occurrences. No bytes are counted without a tracker."""

    seconds: dict[str, float] = field(default_factory=dict)
    stage_peak_bytes: dict[str, int] = field(default_factory=dict)
    peak_bytes: int | None = None

    def with_peaks_of(self, costs: Sequence[StageCosts]) -> StageCosts:
        """These, with the highest peaks of all of them."""
        stages = dict.fromkeys(stage for each in costs for stage in each.stage_peak_bytes)
        peaks = {stage: max(each.stage_peak_bytes.get(stage, 0) for each in costs) for stage in stages}
        highest = max((each.peak_bytes for each in costs if each.peak_bytes is not None), default=None)
        return StageCosts(self.seconds, peaks, highest)


class StageMeter:
    """A `Progress` for the engine that measures every stage inside `measure` and shows it on a display."""

    def __init__(self, display: StageListener | None = None, track_memory: MemoryTracking | None = None) -> None:
        self._display: StageListener = display or Silent()
        self._track_memory: MemoryTracking | None = track_memory
        self._memory: StageMemory | None = None
        self._costs = StageCosts()
        self._stage = ""
        self._started = 0.0

    @contextmanager
    def measure(self, *, counts_memory: bool = True) -> Iterator[StageCosts]:
        """Costs of what runs inside; complete when the block ends."""
        self._costs = StageCosts()
        track = self._track_memory if counts_memory else None
        with nullcontext() if track is None else track() as memory:
            self._memory = memory
            try:
                yield self._costs
            finally:
                self._memory = None
        if memory is not None:
            self._costs.stage_peak_bytes = memory.stage_peak_bytes
            self._costs.peak_bytes = memory.peak_bytes

    def start(self, stage: str, total_tokens: int) -> None:
        self._stage = stage
        if self._memory is not None:
            if stage == UNCOUNTED_STAGE:
                self._memory.pause()
            else:
                self._memory.begin_stage(stage)
        self._display.start(stage, total_tokens)
        self._started = time.perf_counter()

    def advance(self, num_tokens: int) -> None:
        self._display.advance(num_tokens)

    def finish(self) -> None:
        seconds = time.perf_counter() - self._started
        self._costs.seconds[self._stage] = self._costs.seconds.get(self._stage, 0.0) + seconds
        self._display.finish()
        if self._memory is not None:
            if self._stage == UNCOUNTED_STAGE:
                self._memory.resume()
            else:
                self._memory.end_stage(self._stage)


class _Speed(ProgressColumn):
    """Tokens per second of a running stage."""

    def render(self, task: Task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} tokens/s" if speed else "", style="progress.data.speed")


class StageBars:
    """One bar for the running stage, gone when it ends. Use as a context manager around the whole run."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<13}"),
            BarColumn(),
            TextColumn("{task.completed:,.0f}/{task.total:,.0f}"),
            _Speed(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> StageBars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, stage: str, total_tokens: int) -> None:
        self._task = self._progress.add_task(stage.replace("_", " "), total=max(total_tokens, 1))

    def advance(self, num_tokens: int) -> None:
        if self._task is not None:
            self._progress.advance(self._task, num_tokens)

    def finish(self) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
            self._task = None


@contextmanager
def stage_display(console: Console) -> Iterator[StageListener]:
    """Bars on a terminal, nothing elsewhere."""
    if console.is_terminal:
        with StageBars(console) as bars:
            yield bars
    else:
        yield Silent()
