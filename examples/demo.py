"""The demo: a small language model learns by GRPO to find a line in a long prompt, on a CPU, with the exact gradient.

    python examples/demo.py              under 15 minutes on two cores
    python examples/demo.py --steps 2    a quick look: two steps, a few held-out rows

It prepares the model and the rows, then runs `longstraw train examples/demo.yaml` and compares held-out answers before
and after.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

from longstraw.cli import main as longstraw
from longstraw.models.loading import load_tokenizer
from retrieval_rows import make_rows, write_rows
from smollm2 import cache_folder, prepare_model

HERE = Path(__file__).resolve().parent
CONFIG = HERE / "demo.yaml"
NUM_TRAIN_ROWS = 96
NUM_HELD_OUT_ROWS = 20
NUM_QUICK_ROWS = 2
ROWS_SEED = 0
GOALS = {"contains_answer": (0.35, 0.8), "exact_match": (0.0, 0.4)}
MEANINGS = {"contains_answer": "answers that contain the code", "exact_match": "answers that are exactly the code"}


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    steps: int | None
    output: Path
    seed: int | None


def parse_options() -> Options:
    parser = argparse.ArgumentParser(description="GRPO on SmolLM2-135M over prompts of 1,024 to 2,048 tokens.")
    parser.add_argument("--steps", type=int, help="optimizer steps instead of demo.yaml's, with few held-out rows")
    parser.add_argument("--output", type=Path, default=Path("runs"), help="where the run's folder is made")
    parser.add_argument("--seed", type=int, help="seed of the adapter's first weights and of sampling")
    options = parser.parse_args()
    return Options(options.steps, options.output, options.seed)


def main() -> None:
    options = parse_options()
    started = time.perf_counter()
    print("LongStraw demo: GRPO on SmolLM2-135M-Instruct, prompts of 1,024 to 2,048 tokens, exact gradient.")
    cache = cache_folder()
    print(f"1. Model: unpacked once to {cache} ...", flush=True)
    model = prepare_model(cache)
    print(f"   {model}")

    run = new_run_folder(options.output)
    rows = run.with_name(f"{run.name}-rows")
    print(f"2. Rows: a code hidden in the Python standard library's source, written to {rows}", flush=True)
    write_all_rows(rows, model)

    print("3. Training: what the model answers before, the steps, what it answers after. Each step samples 8 answers")
    print("   to each of its prompts, rewards them, and pulls the gradient back through the whole prompt.", flush=True)
    train(options, model=model, rows=rows, run=run)

    print(summary(run))
    print(f"report: {run / 'report.html'}   ({(time.perf_counter() - started) / 60:.1f} minutes in all)")


def new_run_folder(parent: Path) -> Path:
    """A path that is not taken yet; the trainer makes the folder."""
    return (parent / f"demo-{time.strftime('%Y%m%d-%H%M%S')}").resolve()


def write_all_rows(folder: Path, model: Path) -> None:
    tokenizer = load_tokenizer(str(model))
    for name, count, held_out in (("train", NUM_TRAIN_ROWS, False), ("held_out", NUM_HELD_OUT_ROWS, True)):
        rows = make_rows(count, ROWS_SEED, tokenizer=tokenizer, held_out=held_out)
        write_rows(folder / f"{name}.jsonl", rows)


def train(options: Options, *, model: Path, rows: Path, run: Path) -> None:
    """Run the command line `longstraw train` in this process, with the paths that only this machine knows."""
    settings = {
        "model.name": model,
        "data.rows": rows / "train.jsonl",
        "evaluation.rows": rows / "held_out.jsonl",
        "rewards.0.function": f"{HERE / 'retrieval_reward.py'}:bare_code",
        "run.output_dir": run,
    }
    if options.steps is not None:
        settings |= {"run.max_steps": options.steps, "evaluation.max_rows": NUM_QUICK_ROWS}
    if options.seed is not None:
        settings |= {"run.seed": options.seed}
    arguments = ["train", str(CONFIG)]
    for key, value in settings.items():
        arguments += ["--set", f"{key}={value}"]
    try:
        longstraw(arguments)
    except SystemExit as ended:  # a command line ends the process, this one goes on unless it failed
        if ended.code:
            raise


def summary(run: Path) -> str:
    """Both held-out scores, before and after, beside the goals."""
    lines = (run / "evaluations.jsonl").read_text(encoding="utf-8").splitlines()
    before, after = json.loads(lines[0]), json.loads(lines[-1])
    table = [f"Held-out rows, {before['num_responses']} answers sampled at temperature 1:"]
    for name, (at_most, at_least) in GOALS.items():
        goal = f"(goal: from at most {at_most:.2f} to at least {at_least:.2f})"
        table.append(f"  {MEANINGS[name]:36s} {before[name]:.2f} -> {after[name]:.2f}   {goal}")
    return "\n".join(table)


if __name__ == "__main__":
    main()
