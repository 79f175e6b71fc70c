"""Who is told how far a stage is, and how long stages took. The engine's code knows nothing else of either."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Progress(Protocol):
    """Told of stages as they run, one at a time: capture, sample, score, reference, replay, prompt_replay."""

    def start(self, stage: str, total_tokens: int) -> None: ...

    def advance(self, num_tokens: int) -> None: ...

    def finish(self) -> None: ...


class Silent:
    """Tells nobody."""

    def start(self, stage: str, total_tokens: int) -> None:
        pass

    def advance(self, num_tokens: int) -> None:
        pass

    def finish(self) -> None:
        pass


class Stopwatch:
    """Forwards stages to a `Progress` and adds up their seconds. Stages do not nest."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total_tokens: int) -> Iterator[None]:
        started = time.perf_counter()
        self._progress.start(name, total_tokens)
        try:
            yield
        finally:
            self._progress.finish()
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - started

    def advance(self, num_tokens: int) -> None:
        self._progress.advance(num_tokens)
