"""How one update divides over ranks: operations, bytes and memory of every rank, counted; and two processes timed.

    python benchmarks/parallel.py

Counting runs the real engine in as many processes as the degree says (gloo, one thread each), up to 32 of them on
however few cores: nothing is simulated but the machine they would have to themselves. See README.md.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.multiprocessing import start_processes
from torch.utils.flop_counter import FlopCounterMode

import longstraw as ls
from longstraw.evidence.memory import MemoryTracker
from longstraw.parallel.work import AttentionWidths, prompt_traffic
from tables import describe_machine, machine_lines, result_path

WIDTHS = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 192, "max_position_embeddings": 65536}
FAMILIES: dict[str, dict[str, object]] = {
    # 8 query heads to 2 key heads, as grouped-query attention has it.
    "qwen3": {**WIDTHS, "num_attention_heads": 8, "num_key_value_heads": 2, "use_sliding_window": False},
    # 32 heads of DeltaNet, so that 32 ranks may share them out; one layer has full attention.
    "qwen3_5_text": {
        **WIDTHS,
        "linear_num_key_heads": 32,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    # The indexers choose 256 positions; 64 experts are divided over the same ranks.
    "glm_moe_dsa": {**WIDTHS, "index_topk": 256, "n_routed_experts": 64, "num_experts_per_tok": 4},
}
QWEN_KEY_VALUE = AttentionWidths(num_heads=24, query_width=256, value_width=256, state_width=2 * 4 * 256)


@dataclass(frozen=True)
class Problem:
    """One update: G responses of equal length behind a prompt."""

    family: str
    num_prompt_tokens: int
    chunk_tokens: int
    num_responses: int = 2
    response_tokens: int = 64


@dataclass(frozen=True)
class Counted:
    """What one rank did and kept."""

    operations: int  # of matrix products and attention, multiply and add
    state_bytes: int
    peak_bytes: int
    parameter_bytes: int
    bytes_sent: dict[str, int]


class FlopCounter(FlopCounterMode):
    """With the attention kernel of CPUs, which torch's own table leaves out; a causal one is half its pairs."""

    def __init__(self) -> None:
        aten = torch.ops.aten
        forward, backward = (
            aten._scaled_dot_product_flash_attention_for_cpu,
            aten._scaled_dot_product_flash_attention_for_cpu_backward,
        )
        super().__init__(display=False, custom_mapping={forward: _forward, backward: _backward})


def _forward(q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: object, **named: object) -> int:
    is_causal = bool(named.get("is_causal", rest[1] if len(rest) > 1 else False))
    return _pairs(q, k, is_causal) * 2 * (q[3] + v[3])


def _backward(
    d_out: Sequence[int], q: Sequence[int], k: Sequence[int], v: Sequence[int], *rest: object, **named: object
) -> int:
    is_causal = bool(named.get("is_causal", rest[3] if len(rest) > 3 else False))
    return _pairs(q, k, is_causal) * 2 * (3 * q[3] + 2 * v[3])


def _pairs(q: Sequence[int], k: Sequence[int], is_causal: bool) -> int:
    pairs = q[2] * k[2] if not is_causal else q[2] * (q[2] + 1) // 2
    return q[0] * q[1] * pairs


def build(problem: Problem, degree: int) -> tuple[ls.Engine, ls.Prompt, ls.ResponseGroup]:
    """The same on all ranks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # indexers get no adapter
        model = ls.tiny_model(
            problem.family, dtype="bfloat16", adapter=ls.LoraSettings(r=8), **FAMILIES[problem.family]
        )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.uniform_(parameter, -0.1, 0.1, generator=torch.Generator().manual_seed(len(name)))
    has_experts = "n_routed_experts" in FAMILIES[problem.family]
    topology = ls.Topology.create(context=degree, expert=degree if has_experts else 1)
    engine = ls.Engine(model, chunk_tokens=problem.chunk_tokens, topology=topology)
    generator = torch.Generator().manual_seed(1)
    prompt = ls.Prompt(torch.randint(3, 99, (problem.num_prompt_tokens,), generator=generator))
    responses = [
        ls.Response(torch.randint(3, 99, (problem.response_tokens,), generator=generator))
        for _ in range(problem.num_responses)
    ]
    advantages = [(-1.0) ** index for index in range(problem.num_responses)]
    return engine, prompt, ls.ResponseGroup(prompt, responses, advantages=advantages)


def count(rank: int, degree: int, folder: str, problem: Problem) -> None:
    """One rank's update, counted; written to the folder."""
    with _job(rank, degree, folder):
        engine, prompt, group = build(problem, degree)
        tracker = MemoryTracker()
        with FlopCounter() as counter, tracker, engine.capture(prompt) as state:
            report = engine.forward_backward([group], ls.GRPO(), states=[state])
            state_bytes = state.num_bytes
        parameter_bytes = sum(p.numel() * p.element_size() for p in engine.model.parameters())
        counted = Counted(
            counter.get_total_flops(), state_bytes, tracker.peak_bytes, parameter_bytes, dict(report.bytes_sent)
        )
        Path(folder, f"{rank}.json").write_text(json.dumps(asdict(counted)))


def time_update(rank: int, degree: int, folder: str, problem: Problem, threads: int, repeats: int) -> None:
    """Seconds of one update, the least of several; written to the folder."""
    with _job(rank, degree, folder, threads):
        engine, _, group = build(problem, degree)
        seconds = []
        for _ in range(repeats + 1):
            started = time.perf_counter()
            engine.forward_backward([group], ls.GRPO())
            seconds.append(time.perf_counter() - started)
        Path(folder, f"{rank}.json").write_text(json.dumps(min(seconds[1:])))  # the first one warms up


class _job:
    """A gloo group over a file, and the warnings of libraries that nobody could act on left out."""

    def __init__(self, rank: int, degree: int, folder: str, threads: int = 1) -> None:
        self.rank, self.degree, self.folder, self.threads = rank, degree, folder, threads

    def __enter__(self) -> None:
        warnings.simplefilter("ignore")
        torch.set_num_threads(self.threads)
        if self.degree > 1:
            store = f"file://{self.folder}/store"
            dist.init_process_group("gloo", init_method=store, rank=self.rank, world_size=self.degree)

    def __exit__(self, *_: object) -> None:
        if self.degree > 1:
            dist.destroy_process_group()


def on_ranks(degree: int, work: Callable[..., None], *arguments: object) -> list:
    """What every rank wrote, in rank order."""
    with tempfile.TemporaryDirectory() as folder:
        start_processes(work, (degree, folder, *arguments), nprocs=degree, start_method="forkserver")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(degree)]


def counted_table(problem: Problem, degrees: Sequence[int]) -> tuple[list[str], list[dict]]:
    """One row a degree: the busiest rank beside an even share of what one process does."""
    rows, cells = [], []
    kinds: list[str] = []
    alone: list[Counted] = []
    for degree in degrees:
        started = time.perf_counter()
        ranks = [Counted(**each) for each in on_ranks(degree, count, problem)]
        alone = alone or ranks
        kinds += [kind for kind in ranks[0].bytes_sent if kind not in kinds]
        cells.append({"degree": degree, "ranks": [asdict(each) for each in ranks]})
        print(f"{problem.family}, degree {degree}: {time.perf_counter() - started:.0f} s", flush=True)
    for cell in cells:
        ranks = [Counted(**each) for each in cell["ranks"]]
        degree = cell["degree"]
        busiest = max(each.operations for each in ranks)
        sent = [max(each.bytes_sent.get(kind, 0) for each in ranks) for kind in kinds]
        rows.append(
            f"| {degree} | {busiest / 1e9:.2f} | {busiest * degree / alone[0].operations:.2f} | "
            f"{_mib(max(each.state_bytes for each in ranks))} | {_mib(max(each.peak_bytes for each in ranks))} | "
            f"{_mib(max(each.parameter_bytes for each in ranks))} | "
            f"{_mib(max(sum(each.bytes_sent.values()) for each in ranks))} | "
            + " | ".join(_mib(number) for number in sent)
            + " |"
        )
    head = "| degree | G operations | of an even share | state | peak | weights | sent | " + " | ".join(kinds) + " |"
    return [head, "|---:" * (7 + len(kinds)) + "|", *rows], cells


def formula_table() -> list[str]:
    """Keys and values of Qwen3.6-27B at 2,097,152 tokens, 4,096 tokens of a chunk on each rank."""
    rows = [
        "| degree | state a rank, GiB | sent by a rank in capture, GiB | in the pull, GiB |",
        "|---:|---:|---:|---:|",
    ]
    layers, prompt = 16, 2_097_152
    for degree in (1, 2, 4, 8, 16):
        traffic = prompt_traffic(
            QWEN_KEY_VALUE, "send_queries", num_prompt_tokens=prompt, chunk_tokens=4096 * degree, degree=degree
        )
        state = layers * prompt * QWEN_KEY_VALUE.state_width * QWEN_KEY_VALUE.dtype_bytes / degree
        sent = (layers * traffic.capture_bytes, layers * traffic.pull_bytes)
        rows.append(f"| {degree} | {state / 2**30:.1f} | " + " | ".join(f"{x / 2**30:.1f}" for x in sent) + " |")
    return rows


def timed_table(problem: Problem, repeats: int) -> list[str]:
    """One process with one thread and with two, and two processes with one thread each."""
    settings = {"one process, one thread": (1, 1), "one process, two threads": (1, 2), "two processes": (2, 1)}
    seconds = {}
    for name, (degree, threads) in settings.items():
        seconds[name] = max(on_ranks(degree, time_update, problem, threads, repeats))
        print(f"{problem.family}, {name}: {seconds[name]:.2f} s", flush=True)
    alone = seconds["one process, one thread"]
    rows = [f"| {problem.family} | {name} | {each:.2f} | {alone / each:.2f} |" for name, each in seconds.items()]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--degrees", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32], help="none: do not count")
    parser.add_argument("--prompt", type=int, default=2048, help="prompt tokens where work is counted")
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--timed-prompt", type=int, default=8192, help="prompt tokens where two processes are timed")
    parser.add_argument("--repeats", type=int, default=2, help="timed updates, of which the fastest counts; 0: none")
    parser.add_argument("--name", default="parallel")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    multiprocessing.set_forkserver_preload(["longstraw.execution.engine", "longstraw.models.tiny", "peft"])
    machine = describe_machine(torch.device("cpu"))
    lines = ["# One update over several ranks", "", *machine_lines(machine)]
    lines += [
        f"* Counted: the engine itself in so many processes on this machine, a prompt of {options.prompt:,} tokens, "
        f"two responses of 64, chunks of {options.chunk:,}; random 2-layer models of width 64, bf16, LoRA r=8.",
        "* Each number is the busiest rank's. Operations: matrix products and attention, capture, replay and pull; of "
        "an even share: times the degree, over those of one process. Bytes in MiB; sent: in the whole update.",
    ]
    cells = {}
    for family in options.families if options.degrees else ():
        problem = Problem(family, options.prompt, options.chunk)
        table, cells[family] = counted_table(problem, options.degrees)
        lines += ["", f"## {family}", "", *table]
    lines += ["", "## By formula: keys and values of Qwen3.6-27B at 2,097,152 tokens (`parallel/work.py`)", ""]
    lines += ["16 attention layers; 4,096 tokens of a chunk on each rank.", "", *formula_table()]
    if options.repeats > 0:
        lines += ["", f"## Two processes on two cores, a prompt of {options.timed_prompt:,} tokens", ""]
        lines += ["| model | processes | seconds | faster than one thread |", "|---|---|---:|---:|"]
    for family in options.families if options.repeats > 0 else ():
        lines += timed_table(Problem(family, options.timed_prompt, 2048), options.repeats)
    path = result_path(machine, options.name)
    path.with_name(path.name + ".md").write_text("\n".join(lines) + "\n")
    path.with_name(path.name + ".json").write_text(json.dumps({"counted": cells}, indent=1) + "\n")
    print("\n".join(lines))


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.2f}"


if __name__ == "__main__":
    main()
