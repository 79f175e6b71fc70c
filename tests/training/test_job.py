"""`longstraw train` as a job of several processes: the same run as in one, on any axes, and how it ends in trouble.

Most cases run inside processes that are there already; what torchrun itself does (starting, killing) is in the last
tests.
"""

import json
import os
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch

from longstraw.config_file import load_config
from longstraw.execution.progress import Silent
from longstraw.training.loop import train
from longstraw.training.setup import Surroundings, prepare
from training.small_run import EXPERTS, lines_of, run_on, tensors_of, write_run

SOFT_STEPS = {"optimizer": {"learning_rate": 0.01, "eps": 1e-2}}  # noise in a gradient stays noise in the step
ADAPTER = {"r": 2, "target_modules": ["q_proj", "o_proj"], "target_parameters": [*EXPERTS, "mlp.gate.weight"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Four rows, three of them in a step: a data axis of two has unequal shares. Trained in one process as well."""
    folder = tmp_path_factory.mktemp("job")
    prompts = ["Say it.", "Say which of the letters is odd.", "Once upon a time " * 3 + "there was", "Two words"]
    sections = {
        **SOFT_STEPS,
        "model": {"name": str(folder / "model"), "dtype": "float32", "adapter": ADAPTER},
        "evaluation": {"rows": str(folder / "rows.jsonl"), "num_generations": 2, "before": False},
    }
    write_run(folder, "qwen3_moe", prompts=prompts, sections=sections, num_experts=8, num_hidden_layers=2)
    in_one_process(folder)
    return folder


def in_one_process(folder, *overrides):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = load_config(folder / "run.yaml", overrides)
        train(*prepare(config, Surroundings(say=lambda _: None, display=Silent())))


def assert_same_run(one, other, *, metrics=("loss", "reward", "grad_norm", "completions/mean_length", "num_tokens")):
    want, got = (tensors_of(run / "checkpoints/step-000002") for run in (one, other))
    assert want.keys() == got.keys()
    for name, value in want.items():
        torch.testing.assert_close(got[name], value, rtol=2e-3, atol=2e-5, msg=lambda text, n=name: f"{n}: {text}")
    for log, keys in (
        ("completions", ("row", "completion", "reward", "num_tokens")),
        ("evaluations", ("odd_letters", "num_responses", "completions/mean_length", "completions/clipped_ratio")),
    ):
        lines = [[{key: line[key] for key in keys} for line in lines_of(run / f"{log}.jsonl")] for run in (one, other)]
        assert lines[0] == lines[1]
    for line, same in zip(*(lines_of(run / "metrics.jsonl") for run in (one, other)), strict=True):
        assert {key: same[key] for key in metrics} == pytest.approx({key: line[key] for key in metrics}, rel=2e-3)


@pytest.mark.parametrize(
    "degrees",
    [dict(context=2), dict(data=2), dict(context=2, expert=2), dict(context=2, data=2, expert=2)],
    ids=str,
)
def test_a_job_trains_what_one_process_trains(ranks, folder, degrees):
    num_ranks = degrees.get("context", 1) * degrees.get("data", 1)
    output = folder / "-".join(f"{axis}{degree}" for axis, degree in degrees.items())
    results = ranks(num_ranks).run(run_on, str(folder / "run.yaml"), degrees, [f"run.output_dir={output}"])
    assert [error for _, error in results] == [None] * num_ranks
    assert_same_run(folder / "whole", output)
    assert any(name.startswith("traffic/") for name in lines_of(output / "metrics.jsonl")[0]) == ("context" in degrees)


def test_a_run_goes_on_with_another_topology(ranks, folder):
    output = folder / "moved"
    sets = [f"run.output_dir={output}"]
    first = ranks(2).run(
        run_on,
        str(folder / "run.yaml"),
        dict(context=2, expert=2),
        [*sets, "run.max_steps=1", "evaluation.after=false"],
    )
    then = ranks(2).run(run_on, str(folder / "run.yaml"), dict(data=2), sets, True)
    assert [error for _, error in first + then] == [None] * 4
    assert_same_run(folder / "whole", output)
    assert any("parallel.expert: 2 -> 1" in line for line in then[0][0])


def test_a_resumed_job_is_bit_exact_on_the_same_topology(ranks, folder):
    """Parts of experts are put together when saved and cut out when loaded, moments too: they are one adapter's."""
    degrees = dict(context=2, expert=2)
    output = folder / "resumed"
    sets = [f"run.output_dir={output}"]
    ranks(2).run(run_on, str(folder / "run.yaml"), degrees, [*sets, "run.max_steps=1", "evaluation.after=false"])
    ranks(2).run(run_on, str(folder / "run.yaml"), degrees, sets, True)
    in_one_go = folder / "in-one-go"
    ranks(2).run(run_on, str(folder / "run.yaml"), degrees, [f"run.output_dir={in_one_go}"])
    want, got = (tensors_of(run / "checkpoints/step-000002") for run in (in_one_go, output))
    assert want.keys() == got.keys()
    assert [name for name in want if not torch.equal(want[name], got[name])] == []


def test_advantages_scaled_by_the_batch_see_the_rewards_of_all_ranks(ranks, folder):
    sets = ["grpo.scale_rewards=batch", "evaluation.after=false"]
    one, two = folder / "batch-one", folder / "batch-two"
    in_one_process(folder, *sets, f"run.output_dir={one}")
    ranks(2).run(run_on, str(folder / "run.yaml"), dict(data=2), [*sets, f"run.output_dir={two}"])
    for line, same in zip(*(lines_of(run / "completions.jsonl") for run in (one, two)), strict=True):
        assert same["advantage"] == pytest.approx(line["advantage"], rel=1e-6)
    losses = [[line["grad_norm"] for line in lines_of(run / "metrics.jsonl")] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-3)


FAULTY = """
import os, signal

def odd_letters(completions, prompts, trainer_state):
    \"\"\"Fails in the second step for one row, which one rank of a data axis has.\"\"\"
    if trainer_state.global_step == 1 and prompts[0].startswith("Say which"):
        {fault}
    return [sum(ord(letter) % 7 for letter in text) / (1 + len(text)) for text in completions]
"""


@pytest.mark.parametrize(
    ("fault", "message", "degrees"),
    [
        ("raise RuntimeError('no judge answers')", "no judge answers; raised by the reward function", dict(data=2)),
        ("raise RuntimeError('no judge answers')", "no judge answers; raised by the reward function", dict(context=2)),
        ("return [1.0]", "returned 1 rewards for the 3 responses to", dict(data=2)),
        ("return [1e308, -1e308, 0.0]", "is not finite", dict(data=2)),
    ],
)
def test_a_fault_on_one_rank_ends_the_run_on_all_with_its_message(ranks, tmp_path, fault, message, degrees):
    """The first step is saved then: it was whole."""
    sections = {**SOFT_STEPS, "run": {"save_steps": 2}, "grpo": {"scale_rewards": "none"}}
    file = write_run(tmp_path, "llama", rewards=FAULTY.format(fault=fault), sections=sections, num_hidden_layers=2)
    results = ranks(2).run(run_on, str(file), degrees)
    for _, error in results:
        assert message in error
    assert results[0][1] == results[1][1]
    assert (tmp_path / "whole/checkpoints/latest").read_text().strip() == "step-000001"
    assert len(tensors_of(tmp_path / "whole/checkpoints/step-000001")) > 0


def wrong_here(world, file):
    """A setting that only one rank finds wrong (a file missing on its machine): all are told."""
    overrides = ["data.rows=nowhere.jsonl"] if world.rank == 1 else []
    return run_on(world, file, dict(data=2), overrides)[1]


def test_what_one_rank_finds_wrong_stops_all_before_anything_is_written(ranks, tmp_path):
    file = write_run(tmp_path, "llama", num_hidden_layers=2)
    assert ranks(2).run(wrong_here, str(file)) == ["data: there is no file nowhere.jsonl."] * 2
    assert not (tmp_path / "whole").exists()


def torchrun(folder, *options, num_processes=2, seconds=240):
    """Exit status, both outputs together, and seconds of a job on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes), "--standalone"]
    command += ["-m", "longstraw", "train", str(folder / "run.yaml"), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=seconds)
    return done.returncode, done.stdout + done.stderr, time.monotonic() - started


def test_torchrun_starts_a_job_and_one_rank_speaks(tmp_path):
    write_run(tmp_path, "llama", sections={"parallel": {"context": 2}}, num_hidden_layers=2)
    status, text, _ = torchrun(tmp_path)
    assert status == 0, text
    assert text.count("step 1/2") == text.count("step 2/2") == 1
    assert text.count("report: ") == 1
    assert (tmp_path / "whole/report.html").is_file()
    assert json.loads((tmp_path / "whole/metrics.jsonl").read_text().splitlines()[1])["traffic/queries_bytes"] > 0


def test_a_killed_rank_ends_the_job_and_leaves_the_last_checkpoint(tmp_path):
    killed = FAULTY.format(fault="os.kill(os.getpid(), signal.SIGKILL)")
    write_run(tmp_path, "llama", rewards=killed, sections={"parallel": {"data": 2}}, num_hidden_layers=2)
    status, text, seconds = torchrun(tmp_path)
    assert status != 0
    assert "step 1/2" in text and "step 2/2" not in text
    assert str(-signal.SIGKILL) in text or "SIGKILL" in text
    assert seconds < 120
    checkpoint = tmp_path / "whole/checkpoints/step-000001"
    assert (tmp_path / "whole/checkpoints/latest").read_text().strip() == checkpoint.name
    assert len(tensors_of(checkpoint)) > 0


def test_a_number_of_processes_that_does_not_fit_is_told_once(tmp_path):
    write_run(tmp_path, "llama", sections={"parallel": {"context": 3}}, num_hidden_layers=2)
    status, text, _ = torchrun(tmp_path)
    assert status != 0
    assert text.count("parallel.context (3) times parallel.data (1) is 3 processes, but there are 2") == 1
    assert "torchrun --nproc-per-node 3 -m longstraw train" in text
