"""Read a run folder into records, with a note on everything that is missing or broken.

Apart from the page so that a report can always be written: a run that was killed, has no step yet, or lost a file
still gets one, and it says what it lacks. Imports no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from longstraw.errors import InputError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
JsonObject = dict[str, Json]

EXPECTED_METRICS = ("loss", "reward", "grad_norm", "step_time", "completions/mean_length", "memory/peak_bytes")


@dataclass(frozen=True)
class StepTable:
    """Numbers by optimizer step, one column for each key. Absent and non-numeric entries are NaN."""

    steps: tuple[int, ...]
    columns: Mapping[str, tuple[float, ...]]

    def column(self, key: str) -> tuple[float, ...]:
        """The column, all NaN if the run has none."""
        return self.columns.get(key, (math.nan,) * len(self.steps))

    def finite(self, key: str) -> list[tuple[int, float]]:
        """The (step, number) pairs of a column that are finite."""
        return [(step, value) for step, value in zip(self.steps, self.column(key), strict=True) if math.isfinite(value)]

    def keys_between(self, prefix: str, suffix: str) -> list[str]:
        """What stands between prefix and suffix in the keys that have both, in order of appearance."""
        inside = [key for key in self.columns if key.startswith(prefix) and key.endswith(suffix)]
        return [key[len(prefix) : len(key) - len(suffix)] for key in inside if len(key) > len(prefix) + len(suffix)]


@dataclass(frozen=True)
class Completion:
    """One sampled response as it was logged; absent numbers are NaN."""

    step: int
    row: str
    prompt_tail: str
    text: str
    reward: float
    advantage: float
    truncated: bool


@dataclass(frozen=True)
class RunFolder:
    """Everything a report is made of."""

    name: str
    config: JsonObject
    config_text: str
    metrics: StepTable
    evaluations: StepTable
    completions: tuple[Completion, ...]
    notes: tuple[str, ...]  # one sentence for each thing that is missing or broken

    @property
    def score_names(self) -> list[str]:
        """Columns of the evaluations that are scores; counts and statistics of the responses are not."""
        return [key for key in self.evaluations.columns if "/" not in key and not key.startswith("num_")]

    def setting(self, path: str) -> Json:
        """A setting by dotted path, None where it is absent."""
        value: Json = self.config
        for key in path.split("."):
            if not isinstance(value, dict):
                return None
            value = value.get(key)
        return value


def read_run_folder(folder: Path) -> RunFolder:
    """Read what there is. Raises `InputError` only if the folder itself does not exist."""
    if not folder.is_dir():
        raise InputError(f"report: {folder} is not a folder; give the folder a training run has written.")
    notes: list[str] = []
    config, config_text = _read_config(folder / "config.yaml", notes)
    metrics = _step_table(_read_lines(folder / "metrics.jsonl", notes), "metrics.jsonl", notes)
    if metrics.steps:
        absent = [key for key in EXPECTED_METRICS if key not in metrics.columns]
        if absent:
            notes.append(f"metrics.jsonl has no {', '.join(absent)}.")
    else:
        notes.append("No optimizer step was recorded, so there are no curves.")
    evaluations = _step_table(_read_lines(folder / "evaluations.jsonl", notes), "evaluations.jsonl", notes)
    completions = tuple(map(_completion, _read_lines(folder / "completions.jsonl", notes)))
    name = folder.resolve().name
    return RunFolder(name, config, config_text, metrics, evaluations, completions, tuple(notes))


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is not in the run folder.")
        return ""


def _read_config(path: Path, notes: list[str]) -> tuple[JsonObject, str]:
    text = _read_text(path, notes)
    try:
        config = yaml.safe_load(text)
    except yaml.YAMLError:
        config = None
        notes.append(f"{path.name} is not valid YAML; its text is shown as it is.")
    return (config if isinstance(config, dict) else {}), text


def _read_lines(path: Path, notes: list[str]) -> Iterator[JsonObject]:
    # Not splitlines: JSON strings may hold line separators other than the newline.
    for number, line in enumerate(_read_text(path, notes).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except json.JSONDecodeError:
            value = None
        if isinstance(value, dict):
            yield value
        else:
            notes.append(f"{path.name}, line {number}, is not a JSON object and was left out.")


def _number(value: Json) -> float:
    if isinstance(value, bool | int | float):
        return float(value)
    return math.nan


def _integer(value: Json) -> int | None:
    number = _number(value)
    return int(number) if math.isfinite(number) else None


def _step_table(lines: Iterator[JsonObject], file_name: str, notes: list[str]) -> StepTable:
    """One row for each step. A resumed run repeats steps after its checkpoint: the last line counts."""
    rows: dict[int, JsonObject] = {}
    num_without_step = 0
    for line in lines:
        step = _integer(line.get("step"))
        if step is None:
            num_without_step += 1
        else:
            rows[step] = line
    if num_without_step:
        notes.append(f"{file_name}: {num_without_step} lines have no step and were left out.")
    steps = tuple(sorted(rows))
    keys = dict.fromkeys(key for step in steps for key in rows[step] if key != "step")
    columns = {key: tuple(_number(rows[step].get(key)) for step in steps) for key in keys}
    _note_not_finite(rows, file_name, notes)
    return StepTable(steps, columns)


def _note_not_finite(rows: Mapping[int, JsonObject], file_name: str, notes: list[str]) -> None:
    found: dict[str, list[int]] = {}
    for step in sorted(rows):
        for key, value in rows[step].items():
            if isinstance(value, float) and not math.isfinite(value):
                found.setdefault(key, []).append(step)
    for key, steps in found.items():
        listed = ", ".join(map(str, steps[:5])) + (f" and {len(steps) - 5} more" if len(steps) > 5 else "")
        notes.append(f"{file_name}: {key} is not a finite number at step {listed}; the curve has a gap there.")


def _completion(line: JsonObject) -> Completion:
    return Completion(
        step=_integer(line.get("step")) or 0,
        row=str(line.get("row", "")),
        prompt_tail=str(line.get("prompt_tail") or ""),
        text=str(line.get("completion") or ""),
        reward=_number(line.get("reward")),
        advantage=_number(line.get("advantage")),
        truncated=line.get("truncated") is True,
    )
