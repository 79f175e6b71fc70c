"""A run folder as a real run leaves it: a small model that learns to find an access code in long prompts."""

import json
import math
import random

import pytest

CONFIG = """\
model:
  name: /home/someone/models/SmolLM2-135M-Instruct
  dtype: bfloat16
  adapter:
    r: 16
    target_modules: all-linear
engine:
  chunk_tokens: 1024
  prompt_gradient: exact
  graph_scope: layer
rewards:
- function: examples/rewards.py:contains_code
  weight: 1.0
- function: examples/rewards.py:exact_code
  weight: 1.0
sampling:
  num_generations: 8
  max_completion_length: 24
grpo:
  loss_type: dapo
  beta: 0.02
run:
  output_dir: runs/retrieval
  prompts_per_step: 4
"""

COLOURS = ("amber", "blue", "crimson", "green", "silver", "violet")


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def step_metrics(step, num_steps, rng):
    share = 1 / (1 + math.exp(-8 * (step / num_steps - 0.45)))
    contains = min(0.28 + 0.64 * share + rng.gauss(0, 0.03), 1.0)
    exact = max(0.72 * share - 0.05 + rng.gauss(0, 0.04), 0.0)
    seconds = {"capture": 7.1, "sample": 9.4, "score": 2.2, "reference": 6.8, "replay": 5.9, "prompt_replay": 19.5}
    taken = {stage: value * rng.uniform(0.92, 1.08) for stage, value in seconds.items()}
    peak = {"capture": 391, "sample": 468, "score": 431, "reference": 388, "replay": 502, "prompt_replay": 611}
    stages = {f"time/{stage}_seconds": value for stage, value in taken.items()}
    stages |= {f"memory/{stage}_peak_bytes": int(value * 2**20 * rng.uniform(0.99, 1)) for stage, value in peak.items()}
    return {
        "step": step,
        "loss": rng.gauss(0, 0.01),
        "reward": 0.4 * contains + 0.6 * exact,
        "reward_std": 0.08 + 0.5 * share * (1 - share),
        "rewards/contains_code/mean": contains,
        "rewards/contains_code/std": 0.3,
        "rewards/exact_code/mean": exact,
        "rewards/exact_code/std": 0.2,
        "frac_reward_zero_std": round(4 * 0.4 * (1 - share)) / 4,
        "learning_rate": 3e-4 * min(step / 2, 1.0),
        "grad_norm": 0.9 + rng.uniform(-0.3, 0.6),
        "entropy": 1.1 - 0.75 * share + rng.gauss(0, 0.03),
        "kl": 0.09 * share * rng.uniform(0.8, 1.2),
        "clip_ratio/low_mean": 0.0011 * rng.random(),
        "clip_ratio/high_mean": 0.0019 * rng.random(),
        "clip_ratio/region_mean": 0.0031 * rng.random(),
        "completions/mean_length": 17 - 9 * share,
        "completions/min_length": 6,
        "completions/max_length": 24,
        "completions/clipped_ratio": 0.22 * (1 - share),
        "num_tokens": 52_000 * step,
        "step_time": sum(taken.values()) + 1.3,
        "sampling/sampling_logp_difference/mean": 0.004 + 0.001 * rng.random(),
        "sampling/sampling_logp_difference/max": 0.05 + 0.04 * rng.random(),
        "memory/peak_bytes": 611 * 2**20,
        "skipped_groups": 0,
        "stepped": True,
        **stages,
    }


def step_completions(step, num_steps, rng):
    for row in range(4):
        colour, code = rng.choice(COLOURS), rng.randint(1000, 9999)
        tail = f"        return self._cache[key]\n\nWhat is the {colour} access code? Answer with the number only."
        for _ in range(8):
            quality = rng.random() * step / num_steps
            text = "The code for the system is not given in the file, but <b>you</b> can find it in"
            reward = 0.0
            if quality > 0.2:
                text, reward = f"The {colour} access code is {code}.", 0.4
            if quality > 0.5:
                text, reward = str(code), 1.0
            yield {
                "step": step,
                "row": 4 * step + row,
                "prompt_tail": tail,
                "completion": text,
                "reward": reward,
                "advantage": rng.gauss(0, 1),
                "truncated": reward == 0.0,
            }


@pytest.fixture
def make_run(tmp_path):
    """A function that writes a run folder of any number of steps and returns it."""

    def make(num_steps=14, name="retrieval"):
        rng = random.Random(1)
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.yaml").write_text(CONFIG, encoding="utf-8")
        steps = range(1, num_steps + 1)
        write_lines(folder / "metrics.jsonl", [step_metrics(step, num_steps, rng) for step in steps])
        rows = [row for step in steps for row in step_completions(step, num_steps, rng)]
        write_lines(folder / "completions.jsonl", rows)
        counts = {"num_rows": 16, "num_responses": 128, "completions/mean_length": 9.5}
        scores = [{"step": 0, **counts, "contains_code": 0.31, "exact_code": 0.0}]
        if num_steps:
            scores.append({"step": num_steps, **counts, "contains_code": 0.86, "exact_code": 0.58})
        write_lines(folder / "evaluations.jsonl", scores)
        return folder

    return make
