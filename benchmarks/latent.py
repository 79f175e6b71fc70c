"""Attention of one chunk in one sparse latent layer, part by part, as the path grows; beside dense attention.

    python benchmarks/latent.py --threads 2

A layer with an indexer scans the path's index keys and attends to the `topk` rows that they choose, so beyond `topk`
only the scan grows. Layers that share a choice skip the scan. Dense is absorbed attention over every row, as
deepseek_v3 does it, and what queries that see no more than `topk` positions get in every family. Widths are those of
GLM-5.2 unless said; rows and index keys are random, so that a query's choice lies all over the path.

Shape suffixes: H heads, T tokens of the chunk, N rows of the path before it, W row width, L latent width (the value),
I index heads, D index width, S selected positions.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from longstraw.evidence.memory import MemoryTracker
from longstraw.ops.attention import ChunkAttention, ChunkKeys, KeyRun
from longstraw.ops.index_scan import IndexQueries, IndexRun, select_positions
from longstraw.ops.sparse_latent import SelectedRows, SparseLatentAttention
from tables import Machine, describe_machine, machine_lines, result_path, write_json

SCAN, SPARSE_FORWARD, SPARSE_BACKWARD = "index scan", "selected, forward", "selected, backward"
DENSE_FORWARD, DENSE_BACKWARD = "dense, forward", "dense, backward"
KEYS_PER_BACKWARD_CALL = 4096  # the engine's default chunk; the one here is short to keep the dense parts short
PARTS = (SCAN, SPARSE_FORWARD, SPARSE_BACKWARD, DENSE_FORWARD, DENSE_BACKWARD)


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    paths: tuple[int, ...]  # tokens before and in the chunk
    chunk_tokens: int
    num_heads: int
    latent_width: int
    rotary_width: int
    topk: int
    index_heads: int
    index_width: int
    repeats: int
    repeat_below_seconds: float
    dense_tokens: int  # longest path of the dense parts
    name: str

    @property
    def row_width(self) -> int:
        return self.latent_width + self.rotary_width


@dataclass(frozen=True)
class Part:
    """Time and memory of one part at one length; memory is what it made, results included, on top of what was there."""

    num_path_tokens: int
    name: str
    seconds: tuple[float, ...]
    peak_bytes: int

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True, eq=False)
class Chunk:
    """The last chunk of a path: its projections, and the layer's state before it with buffers for cotangents."""

    q_HTW: Tensor
    own_TW: Tensor
    index_q_TID: Tensor
    index_weight_TI: Tensor
    earlier: KeyRun
    index_keys_ND: Tensor  # of the whole path
    start: int


@dataclass(frozen=True, eq=False)
class Bench:
    """Runs parts on one device and keeps what they took."""

    settings: Settings
    device: torch.device
    parts: list[Part] = field(default_factory=list)

    def measure(self, num_path_tokens: int) -> list[Part]:
        chunk = make_chunk(self.settings, num_path_tokens, self.device)
        first = len(self.parts)
        # Queries that see no more positions than they may choose attend densely, without a scan.
        if num_path_tokens > self.settings.topk:
            selected_TS = self._run(num_path_tokens, SCAN, lambda: self._select(chunk))
            keys = self._selected_rows(chunk, selected_TS)
            self._run_both_ways(
                num_path_tokens,
                (SPARSE_FORWARD, SPARSE_BACKWARD),
                chunk,
                lambda q_HTW, own_TW: SparseLatentAttention.apply(q_HTW, own_TW, keys),
            )
        if num_path_tokens <= self.settings.dense_tokens:
            self._run_both_ways(
                num_path_tokens,
                (DENSE_FORWARD, DENSE_BACKWARD),
                chunk,
                lambda q_HTW, own_TW: self._attend_densely(chunk, q_HTW, own_TW),
            )
        return self.parts[first:]

    def _select(self, chunk: Chunk) -> Tensor:
        queries = IndexQueries(chunk.index_q_TID, chunk.index_weight_TI, chunk.start)
        return select_positions(queries, [IndexRun(chunk.index_keys_ND, 0)], topk=self.settings.topk)

    def _selected_rows(self, chunk: Chunk, selected_TS: Tensor) -> SelectedRows:
        return SelectedRows(
            earlier=[chunk.earlier],
            start=chunk.start,
            selected_TS=selected_TS,
            scale=self.settings.row_width**-0.5,
            value_width=self.settings.latent_width,
        )

    def _attend_densely(self, chunk: Chunk, q_HTW: Tensor, own_TW: Tensor) -> Tensor:
        keys = ChunkKeys(
            earlier=[chunk.earlier],
            start=chunk.start,
            scale=self.settings.row_width**-0.5,
            keys_per_backward_call=max(self.settings.chunk_tokens, KEYS_PER_BACKWARD_CALL),
        )
        out_HTW, _ = ChunkAttention.apply(q_HTW, own_TW[None], own_TW[None], None, keys)
        return out_HTW[..., : self.settings.latent_width]

    def _run_both_ways(
        self,
        num_path_tokens: int,
        names: tuple[str, str],
        chunk: Chunk,
        attend: Callable[[Tensor, Tensor], Tensor],
    ) -> None:
        q_HTW, own_TW = (x.detach().requires_grad_() for x in (chunk.q_HTW, chunk.own_TW))
        out_HTL = self._run(num_path_tokens, names[0], lambda: attend(q_HTW, own_TW))
        d_out_HTL = torch.randn_like(out_HTL)
        # Cotangents of earlier rows are added up over the repeats; their number changes nothing here.
        self._run(
            num_path_tokens,
            names[1],
            lambda: torch.autograd.grad(out_HTL, (q_HTW, own_TW), d_out_HTL, retain_graph=True)[0],
        )

    def _run(self, num_path_tokens: int, name: str, part: Callable[[], Tensor]) -> Tensor:
        """Time a part, then count its bytes in a run of its own: counting slows many small operators."""
        seconds = []
        while len(seconds) < self.settings.repeats:
            result, taken = self._timed(part)
            seconds.append(taken)
            if taken > self.settings.repeat_below_seconds:
                break
        del result
        gc.collect()
        tracker = MemoryTracker(self.device)
        with tracker:
            result, _ = self._timed(part)
        self.parts.append(Part(num_path_tokens, name, tuple(seconds), tracker.peak_bytes))
        return result

    def _timed(self, part: Callable[[], Tensor]) -> tuple[Tensor, float]:
        self._synchronize()
        started = time.perf_counter()
        result = part()
        self._synchronize()
        return result, time.perf_counter() - started

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def make_chunk(settings: Settings, num_path_tokens: int, device: torch.device) -> Chunk:
    """Random bf16 state and projections of the last chunk of a path of so many tokens, the chunk included."""
    generator = torch.Generator(device).manual_seed(num_path_tokens)
    num_tokens = min(settings.chunk_tokens, num_path_tokens)
    start = num_path_tokens - num_tokens

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    rows_NKW = draw(start, 1, settings.row_width)
    d_rows_NKW = torch.zeros(rows_NKW.shape, device=device)
    return Chunk(
        q_HTW=draw(settings.num_heads, num_tokens, settings.row_width),
        own_TW=draw(num_tokens, settings.row_width),
        index_q_TID=draw(num_tokens, settings.index_heads, settings.index_width),
        index_weight_TI=draw(num_tokens, settings.index_heads).float(),
        earlier=KeyRun(rows_NKW, rows_NKW, 0, d_rows_NKW, d_rows_NKW),
        index_keys_ND=draw(num_path_tokens, settings.index_width),
        start=start,
    )


def time_table(parts: Sequence[Part]) -> list[str]:
    """Seconds of one chunk; `selected` is what a layer that shares a choice takes, `with scan` one that makes it."""
    rows = [
        "| path | index scan | selected, forward | selected, backward | selected | with scan | dense, forward "
        "| dense, backward | dense | dense / with scan |",
        "|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for num_tokens in dict.fromkeys(part.num_path_tokens for part in parts):
        found = {part.name: part.median_seconds for part in parts if part.num_path_tokens == num_tokens}
        selected = _sum(found, SPARSE_FORWARD, SPARSE_BACKWARD)
        with_scan = _sum(found, SCAN, SPARSE_FORWARD, SPARSE_BACKWARD)
        dense = _sum(found, DENSE_FORWARD, DENSE_BACKWARD)
        ratio = f"{dense / with_scan:.2f}" if dense and with_scan else ""
        numbers = [found.get(name) for name in (SCAN, SPARSE_FORWARD, SPARSE_BACKWARD)]
        numbers += [selected, with_scan, found.get(DENSE_FORWARD), found.get(DENSE_BACKWARD), dense]
        columns = [f"{num_tokens:,}", *("" if number is None else f"{number:.3f}" for number in numbers), ratio]
        rows.append("| " + " | ".join(columns) + " |")
    return rows


def memory_table(parts: Sequence[Part]) -> list[str]:
    """MiB that each part made at its peak."""
    rows = ["| path | " + " | ".join(PARTS) + " |", "|---:|" + "---:|" * len(PARTS)]
    for num_tokens in dict.fromkeys(part.num_path_tokens for part in parts):
        found = {part.name: part.peak_bytes for part in parts if part.num_path_tokens == num_tokens}
        columns = [f"{found[name] / 2**20:,.1f}" if name in found else "" for name in PARTS]
        rows.append(f"| {num_tokens:,} | " + " | ".join(columns) + " |")
    return rows


def growth_lines(parts: Sequence[Part]) -> list[str]:
    """How time and bytes of each part grew from its shortest path to its longest."""
    lines = []
    for name in PARTS:
        own = [part for part in parts if part.name == name]
        if len(own) > 1:
            first, last = own[0], own[-1]
            lines.append(
                f"* {name}: {last.median_seconds / first.median_seconds:.2f} times the seconds and "
                f"{last.peak_bytes / first.peak_bytes:.2f} times the bytes at {last.num_path_tokens:,} tokens as at "
                f"{first.num_path_tokens:,}"
            )
    return lines


def write(machine: Machine, settings: Settings, parts: Sequence[Part]) -> None:
    path = result_path(machine, settings.name)
    write_json(path, machine, asdict(settings), [asdict(part) for part in parts])
    lines = [
        "# Attention of one chunk in one sparse latent layer",
        "",
        *machine_lines(machine),
        f"* Layer: {settings.num_heads} heads, latent {settings.latent_width} + rotary {settings.rotary_width}, top "
        f"{settings.topk:,} by {settings.index_heads} index heads of {settings.index_width}; bf16, random.",
        f"* Chunk: the last {settings.chunk_tokens:,} tokens of the path, which counts them; gradients of queries, own "
        "rows and every earlier row.",
        f"* Up to {settings.topk:,} tokens every position is chosen: such queries attend densely, without a scan.",
        "* Seconds: median of the runs, one where it is long. Bytes: live tensors that the part made, its results "
        "included, counted in a run that is not timed.",
        "",
        "Seconds of one chunk:",
        "",
        *time_table(parts),
        "",
        "MiB made, at the peak:",
        "",
        *memory_table(parts),
        "",
        *growth_lines(parts),
    ]
    path.with_name(path.name + ".md").write_text("\n".join(lines) + "\n")


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[Settings, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    paths = [2048, 4096, 16384, 65536, 262_144]
    parser.add_argument("--paths", nargs="+", type=int, default=paths, help="tokens before and in the chunk")
    parser.add_argument("--chunk-tokens", type=int, default=256)
    parser.add_argument("--heads", type=int, default=64)
    parser.add_argument("--latent-width", type=int, default=512)
    parser.add_argument("--rotary-width", type=int, default=64)
    parser.add_argument("--topk", type=int, default=2048)
    parser.add_argument("--index-heads", type=int, default=32)
    parser.add_argument("--index-width", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of a short part")
    parser.add_argument("--repeat-below", type=float, default=2.0, help="seconds that make a part short")
    parser.add_argument("--dense-tokens", type=int, default=262_144, help="longest path of the dense parts")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--name", default="latent", help="last part of the result files' name")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    for num_tokens in options.paths:
        if options.topk < num_tokens < options.topk + options.chunk_tokens - 1:
            parser.error(f"--paths {num_tokens}: the first queries of its last chunk would attend densely, others not")
    settings = Settings(
        paths=tuple(sorted(options.paths)),
        chunk_tokens=options.chunk_tokens,
        num_heads=options.heads,
        latent_width=options.latent_width,
        rotary_width=options.rotary_width,
        topk=options.topk,
        index_heads=options.index_heads,
        index_width=options.index_width,
        repeats=options.repeats,
        repeat_below_seconds=options.repeat_below,
        dense_tokens=options.dense_tokens,
        name=options.name,
    )
    return settings, torch.device(options.device)


def _sum(found: dict[str, float], *names: str) -> float | None:
    return sum(found[name] for name in names) if all(name in found for name in names) else None


def main() -> None:
    settings, device = parse_arguments()
    bench = Bench(settings, device)
    machine = describe_machine(device)
    warm_up = Bench(replace(settings, repeats=1, topk=64), device)
    warm_up.measure(64 + settings.chunk_tokens)
    for num_path_tokens in settings.paths:
        for part in bench.measure(num_path_tokens):
            peak = f"{part.peak_bytes / 2**20:9,.1f} MiB"
            print(f"{num_path_tokens:>9,} tokens  {part.name:20s} {part.median_seconds:9.3f} s {peak}", flush=True)
        write(machine, settings, bench.parts)
    print("\n".join(growth_lines(bench.parts)))
    print(f"written: {result_path(machine, settings.name)}.md")


if __name__ == "__main__":
    main()
