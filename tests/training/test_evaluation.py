import json
import random

import pytest
import torch

from longstraw.config import EvaluationConfig
from longstraw.training.checkpoint import Position
from longstraw.training.data import Row
from longstraw.training.evaluation import evaluate
from longstraw.training.loop import train
from longstraw.training.rewards import RewardFunction
from longstraw.training.run import Evaluation


def share_of_a(completions):
    random.random()  # a reward function that draws from a global generator
    return [text.count("a") / max(len(text), 1) for text in completions]


def evaluation(**settings):
    rows = [Row(index, f"held-out row {index}", "abc", {}) for index in range(2)]
    config = EvaluationConfig(rows="held_out.jsonl", num_generations=3, **settings)
    return Evaluation(config, rows, [RewardFunction("share_of_a", share_of_a, 1.0, {})])


def evaluated_steps(training):
    path = training.folder.path / "evaluations.jsonl"
    return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []


def test_means_are_over_all_responses_to_all_rows(runner):
    training = runner.training()
    with torch.no_grad():
        training.engine.parameter[0] = 50.0  # always "a"
    metrics = evaluate(training, evaluation(), Position(step=7))
    assert metrics == {
        "step": 7,
        "num_rows": 2,
        "num_responses": 6,
        "share_of_a": 1.0,
        "completions/mean_length": 6.0,
        "completions/clipped_ratio": 1.0,
    }
    assert evaluated_steps(training) == [7]
    assert "held-out after step 7: share_of_a 1.000" in runner.lines[-1]


def test_nothing_is_trained_on_held_out_rows(runner):
    training = runner.training()
    before = training.engine.parameter.clone()
    evaluate(training, evaluation(), Position())
    assert set(training.engine.calls) == {"capture", "sample"}
    assert torch.equal(before, training.engine.parameter)


def test_the_same_policy_gets_the_same_score_at_any_step(runner):
    training = runner.training()
    first, second = (evaluate(training, evaluation(), Position(step=step)) for step in (0, 9))
    assert {**first, "step": 9} == second


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({}, [0, 4]),
        ({"before": False}, [4]),
        ({"after": False}, [0]),
        ({"every": 1}, [0, 1, 2, 3, 4]),
        ({"every": 3, "after": False}, [0, 3]),
        ({"before": False, "after": False}, []),
    ],
)
def test_it_happens_when_it_is_due(runner, settings, steps):
    training = runner.with_evaluation(runner.training(), evaluation(**settings))
    train(training, Position())
    assert evaluated_steps(training) == steps


def test_it_is_due_at_the_first_chance_after_every_so_many_steps():
    due = [step for step in range(4, 40, 4) if evaluation(every=10).is_due(step, num_taken=4, max_steps=40)]
    assert due == [12, 20, 32]


def test_a_resumed_run_is_not_evaluated_as_before(runner):
    training = runner.with_evaluation(runner.training(), evaluation(after=False))
    train(training, Position(step=2, rows_drawn=4))
    assert evaluated_steps(training) == []


def test_training_draws_the_same_with_and_without_evaluation(runner, tmp_path):
    def with_noise(completions):
        return [len(text) + random.random() for text in completions]

    def completions(settings, name):
        runner.folder = tmp_path / name
        training = runner.training(rewards=[RewardFunction("with_noise", with_noise, 1.0, {})])
        random.seed(5)
        train(runner.with_evaluation(training, settings), Position())
        return (training.folder.path / "completions.jsonl").read_text()

    assert completions(None, "without") == completions(evaluation(every=1), "with")
