"""One exact update behind a very long prompt on a small model, with its memory predicted first. See README.md.

    python benchmarks/long_run.py --threads 2
    python benchmarks/long_run.py --threads 2 --model latent

The prediction is the state's formula on top of a short probe: what the probe's peak holds beyond its own state is
working memory, which does not grow with the prompt. Time and peak come from one run. On a CPU counting costs a few
percent of time with large operators (hybrid); the many small ones of sparse selection take up to twice as long, which
`--uncounted` shows.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Literal, get_args

import torch
from peft import PeftModel

from longstraw.evidence.memory import MemoryReport, MemoryTracker, StageProgress
from methods import LongStrawSettings, longstraw_update
from small_models import LatentSize, ModelSize, Problem, adapter_gradients, build_model, build_problem, describe_latent
from tables import Machine, describe_machine, machine_lines, result_path, write_json

NUM_PROBE_CHUNKS = 3
CONV_TAIL_TOKENS = 3  # convolution width 4
BYTES_BF16, BYTES_FLOAT32, BYTES_INT64 = 2, 4, 8
LongKind = Literal["hybrid", "latent"]


@dataclass(frozen=True)
class Defaults:
    """What the command line leaves open, by kind of model."""

    num_prompt_tokens: int
    num_heads: int
    name: str


DEFAULTS: dict[LongKind, Defaults] = {
    "hybrid": Defaults(524_288, 2, "long-run"),
    "latent": Defaults(262_144, 4, "long-run-latent"),  # the index scan grows with the square
}


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    kind: LongKind
    num_prompt_tokens: int
    num_responses: int
    num_response_tokens: int
    engine: LongStrawSettings
    size: ModelSize
    is_counted: bool  # live bytes; times are a little better without
    name: str


@dataclass(frozen=True)
class GrowingBytes:
    """What grows with the prompt, by formula."""

    state: int  # keys and values, or rows of latents
    cotangents: int  # of the state, float32
    boundaries: int  # of gated DeltaNet, one per chunk
    index_keys: int
    token_ids: int

    @property
    def total(self) -> int:
        return self.state + self.cotangents + self.boundaries + self.index_keys + self.token_ids

    def named(self, kind: LongKind) -> list[tuple[str, int]]:
        """For the table."""
        if kind == "hybrid":
            own = [("keys and values", self.state), ("their cotangents", self.cotangents)]
            own.append(("DeltaNet boundaries", self.boundaries))
        else:
            own = [("rows of latents", self.state), ("their cotangents", self.cotangents)]
            own.append(("index keys", self.index_keys))
        return [*own, ("token ids", self.token_ids)]


class ProgressLine:
    """One line that shows the stage, its speed and the time left; without a terminal, a line every 30 seconds.

    Keeps the seconds of every stage.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._is_terminal = sys.stdout.isatty()
        self._stage, self._total, self._done = "", 0, 0
        self._started = self._shown = time.monotonic()

    def start(self, stage: str, total_tokens: int) -> None:
        self._stage, self._total, self._done = stage, total_tokens, 0
        self._started = self._shown = time.monotonic()

    def advance(self, num_tokens: int) -> None:
        self._done += num_tokens
        if time.monotonic() - self._shown > (0.2 if self._is_terminal else 30):
            self._show("\r" if self._is_terminal else "\n")

    def finish(self) -> None:
        self._show("\n")
        self.seconds[self._stage] = self.seconds.get(self._stage, 0.0) + time.monotonic() - self._started

    def _show(self, end: str) -> None:
        self._shown = time.monotonic()
        seconds = self._shown - self._started
        speed = self._done / max(seconds, 1e-9)
        left = (self._total - self._done) / speed if speed else 0.0
        counts = f"{self._done:>9,} of {self._total:,} tokens"
        print(
            f"{self._stage:14s} {counts}  {speed:8,.0f} tokens/s  {seconds:6.0f} s, {left:5.0f} s left",
            end=end,
            flush=True,
        )


def growing_bytes(kind: LongKind, size: ModelSize, num_prompt_tokens: int, settings: LongStrawSettings) -> GrowingBytes:
    """Formulas of docs/memory.md for the models of small_models.py."""
    exact = settings.prompt_gradient == "exact"
    index_numbers, boundaries = 0, 0
    if kind == "latent":
        latent = size.latent
        numbers_per_token = size.num_layers * (latent.latent_width + latent.rotary_width)
        index_numbers = latent.indexer_types(size.num_layers).count("full") * latent.index_width
    else:
        num_full = size.num_layers // 4
        numbers_per_token = num_full * 2 * size.num_kv_heads * size.head_dim
        channels = (2 * size.num_kv_heads + size.num_heads) * size.head_dim
        boundary = size.num_heads * size.head_dim**2 * BYTES_FLOAT32 + channels * CONV_TAIL_TOKENS * BYTES_BF16
        num_chunks = -(-num_prompt_tokens // settings.chunk_tokens)
        boundaries = (size.num_layers - num_full) * boundary * (num_chunks if exact else 1)
    return GrowingBytes(
        state=num_prompt_tokens * numbers_per_token * BYTES_BF16,
        cotangents=num_prompt_tokens * numbers_per_token * BYTES_FLOAT32 if exact else 0,
        boundaries=boundaries,
        index_keys=num_prompt_tokens * index_numbers * BYTES_BF16,
        token_ids=num_prompt_tokens * BYTES_INT64,
    )


def tracked_update(
    model: PeftModel, settings: Settings, problem: Problem, tracker: MemoryTracker
) -> tuple[MemoryReport, dict[str, float]]:
    model.zero_grad(set_to_none=True)
    tracker.watch([*model.parameters(), *model.buffers(), problem.prompt_P, *problem.responses])
    line = ProgressLine()
    with tracker:
        longstraw_update(model, settings.engine, problem, StageProgress(tracker, line))
    return tracker.report(), line.seconds


def timed_update(model: PeftModel, settings: Settings, problem: Problem) -> dict[str, float]:
    """Without counting."""
    model.zero_grad(set_to_none=True)
    line = ProgressLine()
    longstraw_update(model, settings.engine, problem, line)
    return line.seconds


def predict_peak_bytes(model: PeftModel, settings: Settings, device: torch.device) -> int:
    """A probe's peak plus what the formulas say the longer prompt adds."""
    num_probe_tokens = min(settings.num_prompt_tokens, NUM_PROBE_CHUNKS * settings.engine.chunk_tokens)
    print(f"probe: {num_probe_tokens:,} prompt tokens, G=2")
    probe, _ = tracked_update(model, settings, make_problem(settings, num_probe_tokens, 2), MemoryTracker(device))
    growing, probe_growing = (
        growing_bytes(settings.kind, settings.size, num_tokens, settings.engine).total
        for num_tokens in (settings.num_prompt_tokens, num_probe_tokens)
    )
    predicted_bytes = probe.peak_bytes + growing - probe_growing
    print(f"predicted peak: {predicted_bytes / 2**20:,.0f} MiB")
    return predicted_bytes


def make_problem(settings: Settings, num_prompt_tokens: int, num_responses: int) -> Problem:
    problem = build_problem(num_prompt_tokens, num_responses, settings.size.vocab_size)
    generator = torch.Generator().manual_seed(1)
    shape = (num_responses, settings.num_response_tokens)
    responses = torch.randint(3, settings.size.vocab_size, shape, generator=generator)
    return replace(problem, responses=tuple(row.clone() for row in responses))


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[Settings, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="hybrid", choices=get_args(LongKind))
    parser.add_argument("--prompt-tokens", type=int, default=None, help="default: 524,288 hybrid, 262,144 latent")
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--response-tokens", type=int, default=1024)
    parser.add_argument("--chunk-tokens", type=int, default=4096)
    parser.add_argument("--prompt-gradient", default="exact", choices=["exact", "stopped"])
    parser.add_argument("--graph-scope", default="layer", choices=["layer", "chunk"])
    parser.add_argument("--layers", type=int, default=4, help="hybrid: a multiple of 4, one with full attention")
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--heads", type=int, default=None, help="default: 2 hybrid, 4 latent")
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--indexers", default="FSSS", help="latent: F chooses positions, S shares the choice below")
    parser.add_argument("--topk", type=int, default=512, help="latent: positions that a query attends to")
    parser.add_argument("--index-heads", type=int, default=4)
    parser.add_argument("--index-width", type=int, default=32)
    parser.add_argument("--latent-width", type=int, default=64)
    parser.add_argument("--uncounted", action="store_true", help="no bytes, only times")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--name", default=None, help="last part of the result files' name")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    if options.model == "hybrid" and options.layers % 4:
        parser.error(f"--layers must be a multiple of 4, got {options.layers}")
    defaults = DEFAULTS[options.model]
    num_heads = options.heads or defaults.num_heads
    settings = Settings(
        kind=options.model,
        num_prompt_tokens=options.prompt_tokens or defaults.num_prompt_tokens,
        num_responses=options.responses,
        num_response_tokens=options.response_tokens,
        engine=LongStrawSettings(options.prompt_gradient, options.graph_scope, options.chunk_tokens),
        size=ModelSize(
            num_layers=options.layers,
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_heads=num_heads,
            num_kv_heads=max(1, num_heads // 2),
            head_dim=options.head_dim,
            latent=LatentSize(
                indexers=options.indexers,
                topk=options.topk,
                index_heads=options.index_heads,
                index_width=options.index_width,
                latent_width=options.latent_width,
            ),
        ),
        is_counted=not options.uncounted,
        name=options.name or defaults.name,
    )
    return settings, torch.device(options.device)


def describe_model(kind: LongKind, size: ModelSize) -> str:
    """One line for the results."""
    if kind == "hybrid":
        return (
            f"* Model: random qwen3_5_text, {size.num_layers} layers, one in four with full attention, hidden "
            f"{size.hidden_size}, {size.num_heads} heads of {size.head_dim} ({size.num_kv_heads} for keys and values), "
            "bf16, LoRA r=16 on all linear layers in float32."
        )
    return (
        f"* Model: random glm_moe_dsa, {size.num_layers} layers, {describe_latent(size)}, hidden {size.hidden_size}, "
        f"{size.num_heads} heads of {size.head_dim}, bf16, LoRA r=16 on all linear layers but the indexers' in float32."
    )


def write(machine: Machine, settings: Settings, lines: list[str], results: dict[str, object]) -> None:
    path = result_path(machine, settings.name)
    write_json(path, machine, asdict(settings), [results])
    engine = settings.engine
    text = [
        "# One long update",
        "",
        *machine_lines(machine),
        describe_model(settings.kind, settings.size),
        f"* Update: prompt {settings.num_prompt_tokens:,} tokens, G={settings.num_responses}, responses "
        f"{settings.num_response_tokens:,} tokens, chunks {engine.chunk_tokens:,}, prompt gradient "
        f"{engine.prompt_gradient}, graph scope {engine.graph_scope}, loss dapo.",
        "* Times and peaks are of the same run. Peaks: all live tensors, weights included."
        if settings.is_counted
        else "* Times without counting bytes.",
        "",
        *lines,
    ]
    path.with_name(path.name + ".md").write_text("\n".join(text) + "\n")
    print("\n".join(lines))
    print(f"written: {path}.md")


def time_lines(seconds: dict[str, float], total_seconds: float) -> list[str]:
    rows = [f"| {stage} | {stage_seconds:,.0f} |" for stage, stage_seconds in seconds.items()]
    return ["| stage | seconds |", "|---|---:|", *rows, f"| all | {total_seconds:,.0f} |"]


def result_lines(
    parts: list[tuple[str, int]],
    predicted_bytes: int,
    report: MemoryReport,
    seconds: dict[str, float],
    total_seconds: float,
) -> list[str]:
    stages = [
        f"| {stage} | {seconds.get(stage, 0.0):,.0f} | {peak / 2**20:,.0f} |"
        for stage, peak in report.stage_peak_bytes.items()
    ]
    fixed = predicted_bytes - sum(num_bytes for _, num_bytes in parts)
    parts = [
        *parts,
        ("weights, gradients and working memory, from the probe", fixed),
        ("predicted peak", predicted_bytes),
        ("measured peak", report.peak_bytes),
    ]
    largest = [
        f"| {' x '.join(map(str, record.shape))} | {record.dtype} | {record.num_bytes / 2**20:,.0f} | {record.stage} |"
        for record in report.largest[:5]
    ]
    return [
        "| stage | seconds | peak, MiB |",
        "|---|---:|---:|",
        *stages,
        f"| all | {total_seconds:,.0f} | {report.peak_bytes / 2**20:,.0f} |",
        "",
        "| bytes | MiB |",
        "|---|---:|",
        *(f"| {name} | {num_bytes / 2**20:,.1f} |" for name, num_bytes in parts),
        "",
        f"Measured / predicted peak: {report.peak_bytes / predicted_bytes:.4f}. Largest resident set of the process, "
        f"libraries included: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10:,.0f} MiB.",
        "",
        "| largest tensors | dtype | MiB | stage |",
        "|---|---|---:|---|",
        *largest,
    ]


def main() -> None:
    warnings.filterwarnings("ignore", module="transformers|peft")
    settings, device = parse_arguments()
    model = build_model(settings.kind, settings.size, device=device)
    problem = make_problem(settings, settings.num_prompt_tokens, settings.num_responses)
    results: dict[str, object] = {}
    if settings.is_counted:
        predicted_bytes = predict_peak_bytes(model, settings, device)
        started = time.perf_counter()
        report, seconds = tracked_update(model, settings, problem, MemoryTracker(device))
        total_seconds = time.perf_counter() - started
        growing = growing_bytes(settings.kind, settings.size, settings.num_prompt_tokens, settings.engine)
        lines = result_lines(growing.named(settings.kind), predicted_bytes, report, seconds, total_seconds)
        results = {
            "stage_peak_bytes": dict(report.stage_peak_bytes),
            "peak_bytes": report.peak_bytes,
            "predicted_peak_bytes": predicted_bytes,
            "growing_bytes": asdict(growing),
        }
    else:
        started = time.perf_counter()
        seconds = timed_update(model, settings, problem)
        total_seconds = time.perf_counter() - started
        lines = time_lines(seconds, total_seconds)
    gradients = adapter_gradients(model)
    assert all(bool(gradient.isfinite().all()) for gradient in gradients.values()), "every gradient is finite"
    norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
    lines += ["", f"All {len(gradients)} adapter gradients are finite; their norm is {norm:.4g}."]
    results |= {"stage_seconds": seconds, "total_seconds": total_seconds, "gradient_norm": norm}
    write(describe_machine(device), settings, lines, results)


if __name__ == "__main__":
    main()
