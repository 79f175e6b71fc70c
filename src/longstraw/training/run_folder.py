"""The run folder: what a run leaves, and the care that nothing written there is lost.

    config.yaml  metrics.jsonl  completions.jsonl  evaluations.jsonl  checkpoints/  report.html

A new run takes an empty folder only. A resumed run cuts its logs back to the checkpoint's step; the lines it cuts are
moved to `<log>.cut.jsonl`, an older configuration to `config-until-step-NNNNNN.yaml`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from longstraw.errors import InputError

LOGS = ("metrics.jsonl", "completions.jsonl", "evaluations.jsonl")
CONFIG = "config.yaml"


class RunFolder:
    """Appends to the logs of one run. A line is whole on disk only after `flush`, which a checkpoint calls first.

    Of a job's ranks one writes; on the others `append` does nothing.
    """

    def __init__(self, path: Path, *, is_written_here: bool = True) -> None:
        self.path = path
        self._is_written_here = is_written_here

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def append(self, log: str, record: Mapping[str, object]) -> None:
        """Add one line to a log: `metrics`, `completions` or `evaluations`. The record must be JSON."""
        if not self._is_written_here:
            return
        with (self.path / f"{log}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(record, default=str) + "\n")

    def flush(self) -> None:
        """Wait until every line is on disk."""
        for name in LOGS:
            if (self.path / name).exists():
                with (self.path / name).open("rb") as file:
                    os.fsync(file.fileno())


def refuse_used_folder(path: Path) -> None:
    """Raise `InputError` if a new run would write into a folder with something in it. Creates nothing.

    A configuration alone is what a run leaves that failed before its first step; it does not count.
    """
    if path.exists() and not path.is_dir():
        raise InputError(f"run.output_dir: {path} is a file; give a folder.")
    if path.is_dir() and any(left.name != CONFIG for left in path.iterdir()):
        has_checkpoint = (path / "checkpoints" / "latest").is_file()
        advice = "go on with it by --resume, or " if has_checkpoint else ""
        raise InputError(f"run.output_dir: {path} is not empty; {advice}give another folder. Nothing was changed.")


def open_new(path: Path, config_text: str) -> RunFolder:
    """Create the folder of a new run and write its configuration. Raises `InputError` if it is in use."""
    refuse_used_folder(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / CONFIG).write_text(config_text, encoding="utf-8")
    return RunFolder(path)


def open_resumed(path: Path, config_text: str, *, step: int) -> RunFolder:
    """Cut the logs back to `step` and write the configuration the run goes on with."""
    for name in LOGS:
        _cut(path / name, step)
    config = path / CONFIG
    if config.exists() and config.read_text(encoding="utf-8") != config_text:
        os.replace(config, _unused(path / f"config-until-step-{step:06d}.yaml"))
    _write_whole(config, config_text)
    return RunFolder(path)


def _cut(log: Path, step: int) -> None:
    """Keep the lines up to `step`; append the others to `<log>.cut.jsonl`. A half-written last line is cut too."""
    if not log.exists():
        return
    kept: list[str] = []
    cut: list[str] = []
    for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):
        line_step = _step_of(line)
        if line_step is not None and line_step <= step:
            kept.append(line)
        elif line.strip():
            cut.append(line)
    if cut:
        with log.with_suffix(".cut.jsonl").open("a", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in cut)
        _write_whole(log, "".join(line + "\n" for line in kept))


def _step_of(line: str) -> int | None:
    try:
        step = json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _unused(path: Path) -> Path:
    candidate, count = path, 1
    while candidate.exists():
        count += 1
        candidate = path.with_stem(f"{path.stem}-{count}")
    return candidate


def _write_whole(path: Path, text: str) -> None:
    """Replace a file so that a kill leaves the old or the new one."""
    aside = path.with_name(f".{path.name}")
    with aside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(aside, path)
