"""Times one GRPO update, and counts its live bytes, by every method on the same small models. See README.md.

    python benchmarks/update.py --threads 2

Methods alternate within one run. Peaks come from separate untimed runs, so that counting does not disturb the times.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace

import torch
from torch import Tensor

from estimates import Estimate, Size, estimate_bytes, estimate_seconds
from methods import (
    FULL_SEQUENCE,
    LONGSTRAW_METHODS,
    METHODS,
    PREFIX_GROUPER,
    Method,
    build_method,
    timed_run,
    tracked_run,
)
from small_models import Kind, LatentSize, ModelSize, Problem, build_model, build_problem, describe_latent
from tables import (
    Cell,
    Machine,
    available_bytes,
    comparison_table,
    describe_machine,
    gradient_table,
    machine_lines,
    result_path,
    summary_table,
    write_json,
)

MEMORY_SHARE = 0.8  # of what is free; beyond it a cell is not run


@dataclass(frozen=True)
class Settings:
    """What the command line asked for."""

    models: tuple[Kind, ...]
    prompts: tuple[int, ...]
    groups: tuple[int, ...]
    methods: tuple[str, ...]  # beginnings of method names; empty runs all
    chunk_tokens: int
    budget_seconds: float  # of one timed run of one cell
    total_budget_seconds: float  # of everything
    repeats: int
    repeat_below_seconds: float
    size: ModelSize
    name: str


@dataclass
class Measured:
    """What earlier cells of one method took."""

    seconds: dict[Size, float] = field(default_factory=dict)
    peak_bytes: dict[Size, int] = field(default_factory=dict)


class Comparison:
    """One model kind: its methods, what they took so far, and the cells of the table."""

    def __init__(self, kind: Kind, settings: Settings, device: torch.device, deadline: float) -> None:
        self.kind, self.settings, self.device = kind, settings, device
        self.deadline = deadline
        self.methods = [self._build(name, torch.bfloat16) for name in self._names()]
        self._measured: dict[str, Measured] = defaultdict(Measured)

    def warm_up(self) -> None:
        problem = build_problem(512, 2, self.settings.size.vocab_size)
        for method in self.methods:
            timed_run(method, problem, self.device)

    def check_gradients(self) -> list[Cell]:
        """Every method in float32, where rounding hides nothing, and in bf16, against (a) in float32."""
        problem = build_problem(1024, 2, self.settings.size.vocab_size)
        want = None
        cells = []
        for dtype, precision in ((torch.float32, "float32"), (torch.bfloat16, "bf16")):
            for name in self._names():
                got = timed_run(self._build(name, dtype), problem, self.device).gradients
                cell = replace(self._cell(name, problem), precision=precision)
                if want is None:
                    want = got
                else:
                    cell = _with_agreement(cell, got, want, f"{self._names()[0]}, float32")
                cells.append(cell)
        return cells

    def measure(self, num_prompt_tokens: int, num_responses: int) -> list[Cell]:
        problem = build_problem(num_prompt_tokens, num_responses, self.settings.size.vocab_size)
        refusals = {method.name: self._refusal(method, problem) for method in self.methods}
        running = [method for method in self.methods if not refusals[method.name]]
        seconds: dict[str, list[float]] = defaultdict(list)
        gradients: dict[str, dict[str, Tensor]] = {}
        stages: dict[str, dict[str, float]] = {}
        for repeat in range(self.settings.repeats):
            for method in running:
                if repeat and min(seconds[method.name]) > self.settings.repeat_below_seconds:
                    continue
                run = timed_run(method, problem, self.device)
                seconds[method.name].append(run.seconds)
                gradients[method.name], stages[method.name] = run.gradients, run.stage_seconds
        cells = []
        for method in self.methods:
            cell = self._cell(method.name, problem)
            if method in running:
                times = seconds[method.name]
                self._measured[method.name].seconds[_size(problem)] = min(times)
                cell = replace(cell, seconds=tuple(times), stage_seconds=stages[method.name])
                reference = next(iter(gradients))  # (a), where it ran
                if method.name != reference:
                    cell = _with_agreement(cell, gradients[method.name], gradients[reference], reference)
                cell = self._with_peak(cell, method, problem)
            else:
                cell = replace(cell, note=refusals[method.name])
            cells.append(cell)
        return cells

    def _names(self) -> list[str]:
        known, asked = METHODS[self.kind], self.settings.methods
        beginnings = tuple(text for text in asked if text not in known)
        return [name for name in known if not asked or name in asked or name.startswith(beginnings)]

    def _build(self, name: str, dtype: torch.dtype) -> Method:
        model = build_model(self.kind, self.settings.size, dtype=dtype, device=self.device)
        return build_method(name, model, chunk_tokens=self.settings.chunk_tokens)

    def _cell(self, name: str, problem: Problem) -> Cell:
        num_prompt, num_response = len(problem.prompt_P), len(problem.responses[0])
        return Cell(self.kind, num_prompt, num_response, len(problem.responses), name)

    def _refusal(self, method: Method, problem: Problem) -> str:
        """Why a cell is not run, or an empty string."""
        measured, size = self._measured[method.name], _size(problem)
        seconds = estimate_seconds(measured.seconds, size, shares_prompt=method.shares_prompt)
        left = self.deadline - time.monotonic()
        if seconds is not None and seconds.value > min(self.settings.budget_seconds, left):
            return f"not run (estimated {seconds.value:,.0f} s: {seconds.basis})"
        if left < 0:
            return "not run (out of time)"
        memory = self._estimate_bytes(method, size)
        if memory is not None and memory.value > MEMORY_SHARE * available_bytes(self.device):
            return f"not run ({_describe(memory)})"
        return ""

    def _estimate_bytes(self, method: Method, size: Size) -> Estimate | None:
        measured = self._measured[method.name].peak_bytes
        if self.kind == "latent" and method.name == FULL_SEQUENCE:
            return _estimate_dense_index(self.settings.size, size)
        return estimate_bytes(measured, _peak_size(method, size))

    def _with_peak(self, cell: Cell, method: Method, problem: Problem) -> Cell:
        """Full-sequence training works on one response at a time: its peak at G=2, gradients kept, is that of any G."""
        size = _peak_size(method, _size(problem))
        peaks = self._measured[method.name].peak_bytes
        if size not in peaks:
            count = size.num_responses
            first = replace(problem, responses=problem.responses[:count], advantages=problem.advantages[:count])
            peaks[size] = tracked_run(method, first, self.device).peak_bytes
        note = "" if size == _size(problem) else f"peak tracked at G={size.num_responses}"
        return replace(cell, peak_bytes=peaks[size], note=note)


def _estimate_dense_index(model_size: ModelSize, size: Size) -> Estimate:
    """Of the stock latent model: what its indexer makes at once of every pair of tokens."""
    num_tokens = size.num_prompt_tokens + size.num_response_tokens
    # Float32 scores of every head and their ReLU, then their weighted sum, that sum under the mask, and masks.
    bytes_per_pair = 4 * (2 * model_size.latent.index_heads + 3)
    return Estimate(num_tokens**2 * bytes_per_pair, f"index scores of {num_tokens:,} x {num_tokens:,} tokens")


def _describe(memory: Estimate) -> str:
    return f"estimated peak {memory.value / 2**30:,.1f} GiB: {memory.basis}"


def _size(problem: Problem) -> Size:
    return Size(len(problem.prompt_P), len(problem.responses), len(problem.responses[0]))


def _peak_size(method: Method, size: Size) -> Size:
    return size if method.shares_prompt else replace(size, num_responses=min(size.num_responses, 2))


def _with_agreement(cell: Cell, got: dict[str, Tensor], want: dict[str, Tensor], reference: str) -> Cell:
    names = sorted(want)
    assert names == sorted(got), "every method trains the same adapters"
    want_all = torch.cat([want[name].flatten().double() for name in names])
    got_all = torch.cat([got[name].flatten().double() for name in names])
    return replace(
        cell,
        gradient_cosine=float(torch.cosine_similarity(got_all, want_all, 0)),
        gradient_relative_error=float((got_all - want_all).norm() / want_all.norm()),
        reference=reference,
    )


def parse_arguments(arguments: Sequence[str] | None = None) -> tuple[Settings, torch.device]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["hybrid", "dense"], choices=list(METHODS))
    parser.add_argument("--prompts", nargs="+", type=int, default=[4096, 16384, 65536], help="prompt tokens")
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 2, 8], help="responses per prompt")
    parser.add_argument(
        "--methods", nargs="+", default=[], help="names of methods, or beginnings such as '(c)'; default all"
    )
    parser.add_argument("--chunk-tokens", type=int, default=2048)
    parser.add_argument("--budget", type=float, default=900.0, help="seconds of a timed run; longer ones are estimated")
    parser.add_argument("--total-budget", type=float, default=86400.0, help="seconds after which no cell begins")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of a short cell")
    parser.add_argument("--repeat-below", type=float, default=30.0, help="seconds that make a cell short")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--kv-heads", type=int, default=1, help="key/value heads for 4 query heads (GQA 4:1)")
    parser.add_argument("--vocab", type=int, default=4096)
    parser.add_argument("--indexers", default="FSSF", help="latent: F chooses positions, S shares the choice below")
    parser.add_argument("--topk", type=int, default=512, help="latent: positions that a query attends to")
    parser.add_argument("--index-heads", type=int, default=16, help="latent; few of them tie at the cut")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads; default: torch's own choice")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--name", default="update", help="last part of the result files' name")
    options = parser.parse_args(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    settings = Settings(
        models=tuple(options.models),
        prompts=tuple(sorted(options.prompts)),
        groups=tuple(sorted(options.groups)),
        methods=tuple(options.methods),
        chunk_tokens=options.chunk_tokens,
        budget_seconds=options.budget,
        total_budget_seconds=options.total_budget,
        repeats=options.repeats,
        repeat_below_seconds=options.repeat_below,
        size=ModelSize(
            num_layers=options.layers,
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_kv_heads=options.kv_heads,
            vocab_size=options.vocab,
            latent=LatentSize(indexers=options.indexers, topk=options.topk, index_heads=options.index_heads),
        ),
        name=options.name,
    )
    return settings, torch.device(options.device)


KINDS: dict[Kind, str] = {
    "hybrid": "Hybrid: qwen3_5_text, one full-attention layer in four.",
    "dense": "Dense: qwen3.",
    "latent": "Latent: glm_moe_dsa, see below.",
}


def latent_lines(settings: Settings) -> list[str]:
    if "latent" not in settings.models:
        return []
    return [
        f"* Latent: {describe_latent(settings.size)}; no adapter on indexers. (a) makes index scores and a mask of "
        "every pair of tokens. In bf16 rounding may change which positions are chosen and which experts a token takes."
    ]


def write(machine: Machine, settings: Settings, checks: list[Cell], cells: list[Cell]) -> None:
    path = result_path(machine, settings.name)
    results = [asdict(cell) for cell in [*checks, *cells]]
    write_json(path, machine, asdict(settings), results)
    size = settings.size
    lines = [
        "# One update, several methods",
        "",
        *machine_lines(machine),
        f"* Models: random, {size.num_layers} layers, hidden {size.hidden_size}, {size.num_heads} heads of "
        f"{size.head_dim} ({size.num_kv_heads} for keys and values), vocabulary {size.vocab_size}, bf16, LoRA r=16 on "
        f"all linear layers in float32. {' '.join(KINDS[kind] for kind in settings.models)}",
        *latent_lines(settings),
        f"* Chunks of {settings.chunk_tokens} tokens; responses are 1/64 of the prompt; loss dapo, ratio 1.",
        "* Time: median of the runs and their range; a single run where it is long. Peak: all live tensors, weights "
        "included, tracked in a run that is not timed. (a) works on one response at a time, so its peak is tracked at "
        "G=2 at most.",
        f"* A run estimated at more than {settings.budget_seconds:,.0f} s, or at more than {MEMORY_SHARE:.0%} of the "
        "free memory, is not made.",
        "* Cosine and relative error: all adapter gradients as one vector, against (a), or the first method that ran. "
        "Every method rounds differently in bf16: the last table tells rounding from error. (d) is biased by design.",
        "",
        *comparison_table(cells, FULL_SEQUENCE),
        "",
        "## LongStraw's ratios",
        "",
        *summary_table(cells, LONGSTRAW_METHODS, FULL_SEQUENCE, PREFIX_GROUPER),
        "",
        "## Gradients against (a) in float32 (1,024-token prompt, G=2)",
        "",
        *gradient_table(checks),
    ]
    path.with_name(path.name + ".md").write_text("\n".join(lines) + "\n")


def main() -> None:
    warnings.filterwarnings("ignore", module="transformers|peft|torch.utils.checkpoint")
    settings, device = parse_arguments()
    machine = describe_machine(device)
    deadline = time.monotonic() + settings.total_budget_seconds
    checks: list[Cell] = []
    cells: list[Cell] = []
    for kind in settings.models:
        comparison = Comparison(kind, settings, device, deadline)
        checks += comparison.check_gradients()
        print("\n".join(gradient_table(checks)), flush=True)
        comparison.warm_up()
        for num_prompt_tokens in settings.prompts:
            for num_responses in settings.groups:
                new = comparison.measure(num_prompt_tokens, num_responses)
                cells += new
                print("\n".join(comparison_table(new, FULL_SEQUENCE)[2:]), flush=True)
                write(machine, settings, checks, cells)
    print(f"written: {result_path(machine, settings.name)}.md")


if __name__ == "__main__":
    main()
