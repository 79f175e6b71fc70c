import json

import pytest
import torch

from longstraw.config import EvaluationConfig
from longstraw.errors import InputError
from longstraw.training.checkpoint import Position, find_checkpoint, load_position, restore
from longstraw.training.loop import train
from longstraw.training.rewards import RewardFunction
from longstraw.training.run import Evaluation
from longstraw.training.run_folder import open_resumed


def metrics_of(training):
    return [json.loads(line) for line in (training.folder.path / "metrics.jsonl").read_text().splitlines()]


def test_training_raises_the_reward(runner):
    training = runner.training(run={"max_steps": 20})
    train(training, Position())
    metrics = metrics_of(training)
    assert [line["step"] for line in metrics] == list(range(1, 21))
    assert metrics[-1]["reward"] > metrics[0]["reward"] + 0.3


def test_each_group_is_replayed_from_the_state_that_sampled_it(runner):
    training = runner.training(run={"max_steps": 1})
    train(training, Position())
    group = ["capture", "sample", "forward_backward 1 with state"]
    assert training.engine.calls == [*group, *group, "optimizer_step"]


def test_batch_scaled_advantages_wait_for_all_groups_of_the_step(runner):
    training = runner.training(run={"max_steps": 1}, grpo={"scale_rewards": "batch"})
    train(training, Position())
    assert training.engine.calls == ["capture", "sample"] * 2 + ["forward_backward 2", "optimizer_step"]


def test_further_iterations_use_the_same_responses_without_the_stale_state(runner):
    training = runner.training(run={"max_steps": 6, "num_iterations": 3, "save_steps": 3})
    train(training, Position())
    again = ["forward_backward 1", "forward_backward 1", "optimizer_step"]
    assert training.engine.calls[7:13] == again * 2
    assert training.engine.calls.count("sample") == 4
    assert len(metrics_of(training)) == 6


def test_a_resumed_run_equals_an_uninterrupted_one(runner, tmp_path):
    whole = runner.training(run={"max_steps": 6})
    train(whole, Position())
    runner.folder = tmp_path / "two"
    first = runner.training(run={"max_steps": 3, "save_steps": 3})
    train(first, Position())
    checkpoint = find_checkpoint(first.folder.checkpoints)
    position, _ = load_position(checkpoint)
    second = runner.training(run={"max_steps": 6}, folder=open_resumed(runner.folder, "config", step=position.step))
    second.engine.parameter.data.copy_(torch.load(checkpoint / "weights.pt"))
    restore(checkpoint, second.optimizer.load_state_dict)
    train(second, position)
    assert torch.equal(second.engine.parameter, whole.engine.parameter)
    assert str(second.optimizer.state_dict()) == str(whole.optimizer.state_dict())
    completions = [run.folder.path / "completions.jsonl" for run in (second, whole)]
    assert completions[0].read_text() == completions[1].read_text()


def test_no_two_draws_have_the_same_seed(runner):
    training = runner.training(run={"max_steps": 8})  # 16 draws from 5 rows
    seeds = []
    sample = training.engine.sample
    training.engine.sample = lambda state, count, settings: (
        seeds.append(settings.seed),
        sample(state, count, settings),
    )[1]
    train(training, Position())
    assert len(set(seeds)) == 16


def test_equal_rewards_skip_the_step_and_are_explained_once(runner):
    training = runner.training(rewards=[RewardFunction("same", lambda completions: [1.0] * len(completions), 1.0, {})])
    before = training.engine.parameter.clone()
    end = train(training, Position())
    assert torch.equal(before, training.engine.parameter)
    assert (end.num_skipped_groups, end.num_skipped_steps) == (8, 4)
    assert [(line["skipped_groups"], line["stepped"], line["reward_std"]) for line in metrics_of(training)] == [
        (2, False, 0.0)
    ] * 4
    assert sum("a group was skipped: all rewards are equal" in line for line in runner.lines) == 1
    assert sum("no parameter was changed" in line for line in runner.lines) == 1


@pytest.mark.parametrize(
    ("fails", "error", "sentence"),
    [
        (lambda: float("nan"), InputError, "breaks_later: it returned nan for response 0 to row"),
        (lambda: {}["x"], KeyError, "x"),
    ],
)
def test_an_error_stops_the_run_after_the_steps_before_it_were_saved(runner, fails, error, sentence):
    calls = []

    def breaks_later(completions):
        calls.append(1)
        return [fails() if len(calls) > 7 else float(len(text)) for text in completions]

    rewards = [RewardFunction("breaks_later", breaks_later, 1.0, {})]
    training = runner.training(rewards=rewards, run={"save_steps": None})
    with pytest.raises(error, match=sentence):
        train(training, Position())
    checkpoint = find_checkpoint(training.folder.checkpoints)
    position, _ = load_position(checkpoint)
    assert position.step == 3
    assert len(metrics_of(training)) == 3
    assert torch.equal(torch.load(checkpoint / "weights.pt"), training.engine.parameter.detach())


def test_a_half_taken_step_is_not_saved(runner):
    training = runner.training(run={"save_steps": None})
    step = training.engine.optimizer_step

    def breaks_on_the_way(optimizer, max_grad_norm=None):
        report = step(optimizer, max_grad_norm)
        if training.engine.policy_version > 2:
            raise RuntimeError("out of memory")
        return report

    training.engine.optimizer_step = breaks_on_the_way
    with pytest.raises(RuntimeError, match="out of memory"):
        train(training, Position())
    assert not training.folder.checkpoints.exists()


def test_completions_carry_reward_and_advantage_of_every_response(runner):
    training = runner.training(run={"max_steps": 1})
    train(training, Position())
    lines = [json.loads(line) for line in (training.folder.path / "completions.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert {"step", "row", "prompt_tail", "completion", "reward", "advantage", "truncated"} <= set(lines[0])
    assert sum(line["advantage"] for line in lines[:4]) == pytest.approx(0, abs=1e-6)


def test_checkpoints_are_saved_every_save_steps_and_at_the_end(runner):
    training = runner.training(run={"max_steps": 5, "save_steps": 2, "keep_checkpoints": None})
    train(training, Position())
    names = sorted(path.name for path in training.folder.checkpoints.iterdir())
    assert names == ["latest", "step-000002", "step-000004", "step-000005"]


def test_an_error_in_an_evaluation_stops_the_run_after_its_steps_were_saved(runner):
    def fails_at_step_two(completions, trainer_state):
        if trainer_state.global_step == 2:
            raise RuntimeError("no judge answers")
        return [0.0] * len(completions)

    training = runner.training(run={"max_steps": 4, "save_steps": None})
    function = RewardFunction("fails_at_step_two", fails_at_step_two, 1.0, {})
    held_out = Evaluation(EvaluationConfig(rows="x.jsonl", every=1, before=False), training.rows[:1], [function])
    with pytest.raises(RuntimeError, match="no judge answers"):
        train(runner.with_evaluation(training, held_out), Position())
    position, _ = load_position(find_checkpoint(training.folder.checkpoints))
    assert position.step == 2
