"""Results as records, and as the markdown and JSON that are committed with their date and machine."""

from __future__ import annotations

import datetime
import json
import platform
import re
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

RESULTS_FOLDER = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "peft", "prefix-grouper", "longstraw")


@dataclass(frozen=True)
class Machine:
    date: str
    processor: str
    num_cores: int
    num_threads: int
    memory_bytes: int
    device: str
    versions: dict[str, str]


@dataclass(frozen=True)
class Cell:
    """One method on one problem. Fields are None where something was not run; `note` then says why, on what basis."""

    model: str
    num_prompt_tokens: int
    num_response_tokens: int
    num_responses: int
    method: str
    seconds: tuple[float, ...] = ()
    peak_bytes: int | None = None
    stage_seconds: dict[str, float] | None = None  # of the last timed run, for LongStraw's methods
    gradient_cosine: float | None = None  # with the reference method's gradient, all adapter tensors as one vector
    gradient_relative_error: float | None = None
    reference: str = ""
    note: str = ""
    precision: str = "bf16"

    @property
    def median_seconds(self) -> float | None:
        return statistics.median(self.seconds) if self.seconds else None


def available_bytes(device: torch.device) -> int:
    """Free memory of the device, or what Linux says it can hand out without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return _meminfo_bytes("MemAvailable")


def describe_machine(device: torch.device) -> Machine:
    return Machine(
        date=datetime.date.today().isoformat(),
        processor=_processor_name(),
        num_cores=_num_cores(),
        num_threads=torch.get_num_threads(),
        memory_bytes=_meminfo_bytes("MemTotal"),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        versions={"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
    )


def result_path(machine: Machine, name: str) -> Path:
    """`results/<date>-<machine>-<name>`, without suffix."""
    processor = re.sub(r"\W+", "-", machine.processor.replace("(R)", "").replace("(TM)", "")).strip("-").lower()
    place = f"{processor}-{machine.num_cores}-cores"
    if machine.device != "cpu":
        place = re.sub(r"\W+", "-", machine.device).strip("-").lower()
    return RESULTS_FOLDER / f"{machine.date}-{place}-{name}"


def write_json(path: Path, machine: Machine, settings: dict[str, object], results: Sequence[object]) -> None:
    content = {"machine": asdict(machine), "settings": settings, "results": results}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_name(path.name + ".json").write_text(json.dumps(content, indent=1) + "\n")


def machine_lines(machine: Machine) -> list[str]:
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    place = f"{machine.processor}, {machine.num_cores} cores, {machine.num_threads} threads used"
    device = "" if machine.device == "cpu" else f", {machine.device}"
    return [
        f"* Date: {machine.date}",
        f"* Machine: {place}, {machine.memory_bytes / 2**30:.0f} GiB memory{device}",
        f"* Versions: {versions}",
    ]


def comparison_table(cells: Sequence[Cell], baseline: str) -> list[str]:
    """One row a cell, problems in the order given; ratios are to `baseline` on the same problem."""
    rows = [
        "| model | prompt | G | method | time, s (range) | faster than (a) | peak, MiB | of (a)'s peak | cosine "
        "| relative error |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    bases = {_problem(cell): cell for cell in cells if cell.method == baseline}
    for cell in cells:
        base = bases.get(_problem(cell))
        columns = [
            cell.model,
            f"{cell.num_prompt_tokens:,}",
            str(cell.num_responses),
            cell.method,
            _time_column(cell),
            _ratio(base.median_seconds if base else None, cell.median_seconds, "x"),
            "" if cell.peak_bytes is None else f"{cell.peak_bytes / 2**20:,.0f}",
            _ratio(cell.peak_bytes, base.peak_bytes if base else None, ""),
            "" if cell.gradient_cosine is None else f"{cell.gradient_cosine:.6f}",
            "" if cell.gradient_relative_error is None else f"{cell.gradient_relative_error:.1e}",
        ]
        rows.append("| " + " | ".join(columns) + " |")
    return rows


def gradient_table(cells: Sequence[Cell]) -> list[str]:
    """Gradients against float32 full-sequence training of the same weights."""
    rows = ["| model | precision | method | cosine | relative error |", "|---|---|---|---:|---:|"]
    for cell in cells:
        if cell.gradient_cosine is not None:
            numbers = f"{cell.gradient_cosine:.7f} | {cell.gradient_relative_error:.1e}"
            rows.append(f"| {cell.model} | {cell.precision} | {cell.method} | {numbers} |")
    return rows


def summary_table(cells: Sequence[Cell], methods: Sequence[str], baseline: str, peer: str) -> list[str]:
    """One row for each of `methods` on each problem: its ratios to the baseline, to the peer, and to itself at G=1."""
    rows = [
        "| model | prompt | G | method | faster than (a) | of (a)'s peak | time / (b)'s | time / own at G=1 "
        "| peak / own at G=1 |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    found = {(*_problem(cell), cell.method): cell for cell in cells}
    for cell in cells:
        if cell.method not in methods or cell.median_seconds is None:
            continue
        base, other = found.get((*_problem(cell), baseline)), found.get((*_problem(cell), peer))
        single = found.get((cell.model, cell.num_prompt_tokens, 1, cell.method))
        columns = [
            cell.model,
            f"{cell.num_prompt_tokens:,}",
            str(cell.num_responses),
            cell.method,
            _ratio(base.median_seconds if base else None, cell.median_seconds, "x"),
            _ratio(cell.peak_bytes, base.peak_bytes if base else None, ""),
            _ratio(cell.median_seconds, other.median_seconds if other else None, ""),
            _ratio(cell.median_seconds, single.median_seconds if single else None, ""),
            "" if single is None or not single.peak_bytes else f"{cell.peak_bytes / single.peak_bytes:.4f}",
        ]
        rows.append("| " + " | ".join(columns) + " |")
    return rows


def _problem(cell: Cell) -> tuple[str, int, int]:
    return cell.model, cell.num_prompt_tokens, cell.num_responses


def _time_column(cell: Cell) -> str:
    median = cell.median_seconds
    if median is None:
        return cell.note
    if len(cell.seconds) == 1:
        return f"{median:.2f}"
    return f"{median:.2f} ({min(cell.seconds):.2f} to {max(cell.seconds):.2f})"


def _ratio(numerator: float | None, denominator: float | None, unit: str) -> str:
    return "" if numerator is None or not denominator else f"{numerator / denominator:.2f}{unit}"


def _num_cores() -> int:
    return len(re.findall(r"^processor\s*:", Path("/proc/cpuinfo").read_text(), re.M))


def _processor_name() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.M)
    return match.group(1).strip() if match else platform.machine()


def _meminfo_bytes(field: str) -> int:
    match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    return int(match.group(1)) * 1024 if match else 0
