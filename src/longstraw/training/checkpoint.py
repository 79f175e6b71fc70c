"""Checkpoints that a kill cannot break: written aside, flushed to disk, renamed, and only then named the latest.

A checkpoint holds the trained weights (peft's or transformers' own files), the optimizer, the random state and the
position in the data. The learning rate is a function of the step and needs no state.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from longstraw.errors import InputError
from longstraw.training.randomness import RandomState, restore_random_state
from longstraw.training.trained_state import Snapshot

LATEST = "latest"
POSITION_FILE = "position.json"
OPTIMIZER_FILE = "optimizer.pt"
RANDOM_FILE = "random.pt"
SET_ASIDE = "set-aside"


@dataclass(frozen=True)
class Position:
    """How far training is. Everything it does next follows from this, the weights, the optimizer and the settings."""

    step: int = 0  # optimizer steps taken
    rows_drawn: int = 0
    num_tokens: int = 0  # prompt and response tokens so far, each prompt once for its group
    num_skipped_groups: int = 0
    num_skipped_steps: int = 0


def save_checkpoint(
    folder: Path,
    position: Position,
    *,
    snapshot: Snapshot,
    randomness: RandomState,
    fingerprint: str,
    keep: int | None,
) -> Path:
    """Add `step-NNNNNN` to the checkpoints folder and make it the latest; then drop all but the newest `keep`.

    At no moment is there no usable latest checkpoint: until the last rename it is the one before. `fingerprint` says
    which rows the position counts.
    """
    final = folder / _name(position.step)
    aside = folder / f".saving-{final.name}"
    if aside.exists():
        shutil.rmtree(aside)  # left by a run that was killed here
    aside.mkdir(parents=True)
    snapshot.save_weights(aside)
    torch.save(snapshot.optimizer, aside / OPTIMIZER_FILE)
    torch.save(asdict(randomness), aside / RANDOM_FILE)
    (aside / POSITION_FILE).write_text(json.dumps({**asdict(position), "rows": fingerprint}, indent=2) + "\n")
    _flush_tree(aside)
    if final.exists():
        _set_aside(final)
    os.rename(aside, final)
    _flush(folder)
    _name_latest(folder, final)
    _drop_old(folder, keep)
    return final


def find_checkpoint(folder: Path, chosen: Path | None = None) -> Path:
    """The latest checkpoint of a checkpoints folder, or the chosen one if it is whole. Raises `InputError`."""
    if chosen is None:
        latest = folder / LATEST
        if not latest.is_file():
            raise InputError(f"resume: there is no checkpoint in {folder} to resume from.")
        chosen = folder / latest.read_text(encoding="utf-8").strip()
    missing = [name for name in (POSITION_FILE, OPTIMIZER_FILE, RANDOM_FILE) if not (chosen / name).is_file()]
    if missing:
        others = ", ".join(path.name for path in _all(folder)) or "none"
        raise InputError(f"resume: {chosen} is not a checkpoint ({missing[0]} is missing); there are: {others}.")
    return chosen


def load_position(checkpoint: Path) -> tuple[Position, str]:
    """The position of a checkpoint and the fingerprint of its rows."""
    values = json.loads((checkpoint / POSITION_FILE).read_text(encoding="utf-8"))
    fingerprint = str(values.pop("rows"))
    return Position(**values), fingerprint


def restore(checkpoint: Path, load_optimizer: Callable[[dict[str, object]], None]) -> None:
    """Put optimizer and random state back as they were, bit for bit. The weights are loaded before."""
    load_optimizer(torch.load(checkpoint / OPTIMIZER_FILE, weights_only=True, map_location="cpu"))
    restore_random_state(RandomState(**torch.load(checkpoint / RANDOM_FILE, weights_only=True, map_location="cpu")))


def rewind(folder: Path, checkpoint: Path) -> list[str]:
    """Make this checkpoint the latest and move newer ones aside, so that the run can pass there again.

    Nothing is deleted. Returns the names of what was moved.
    """
    step = load_position(checkpoint)[0].step
    if checkpoint.parent.resolve() == folder.resolve():
        _name_latest(folder, checkpoint)
    newer = [path for path in _all(folder) if load_position(path)[0].step > step]
    for path in newer:
        _set_aside(path)
    return [path.name for path in newer]


def _name(step: int) -> str:
    return f"step-{step:06d}"


def _all(folder: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if (path / POSITION_FILE).is_file())


def _name_latest(folder: Path, checkpoint: Path) -> None:
    written = folder / f".{LATEST}"
    written.write_text(checkpoint.name + "\n", encoding="utf-8")
    _flush(written)
    os.replace(written, folder / LATEST)
    _flush(folder)


def _drop_old(folder: Path, keep: int | None) -> None:
    for doomed in folder.glob(".dropping-*"):
        shutil.rmtree(doomed)  # left by a run that was killed here
    if keep is not None:
        for path in _all(folder)[:-keep]:
            # Renamed first: a half-deleted folder must not look like a checkpoint.
            doomed = path.with_name(f".dropping-{path.name}")
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _set_aside(checkpoint: Path) -> None:
    folder = checkpoint.parent / SET_ASIDE
    folder.mkdir(exist_ok=True)
    count = sum(path.name.startswith(checkpoint.name) for path in folder.iterdir())
    os.rename(checkpoint, folder / f"{checkpoint.name}-{count + 1}")


def _flush(path: Path) -> None:
    """Wait until a file's bytes, or a folder's names, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush_tree(folder: Path) -> None:
    for path in sorted(folder.rglob("*")):
        _flush(path)
    _flush(folder)
