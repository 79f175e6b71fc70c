"""A fake engine and tokenizer with the real ones' interface, so that the loop is tested without a model."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from longstraw.config_file import check_config
from longstraw.grpo.losses import GRPO
from longstraw.records import ForwardBackwardReport, LossMetrics, Response, StepReport
from longstraw.training.checkpoint import Position
from longstraw.training.data import Row
from longstraw.training.optimizer import make_optimizer
from longstraw.training.progress import StageMeter
from longstraw.training.rewards import RewardFunction
from longstraw.training.run import Training, rows_fingerprint
from longstraw.training.run_folder import open_new
from longstraw.training.trained_state import Snapshot

NUM_TOKENS = 11
STOP = 10


class FakeTokenizer:
    """One token a character; the letters a to j are 0 to 9, the stop is "." (10)."""

    eos_token_id = STOP
    chat_template = None
    all_special_ids = (STOP,)

    def encode(self, text, *, add_special_tokens, verbose):
        return [(ord(letter) - ord("a")) % STOP for letter in text]

    def decode(self, token_ids, skip_special_tokens=False):
        return "".join(
            "." if i == STOP else chr(ord("a") + i) for i in token_ids if not (skip_special_tokens and i == STOP)
        )


class FakeState:
    num_alive = 0

    def __init__(self, prompt, version):
        self.prompt, self.version = prompt, version

    def __enter__(self):
        FakeState.num_alive += 1
        assert FakeState.num_alive == 1, "one prompt state at a time is alive"
        return self

    def __exit__(self, *_):
        FakeState.num_alive -= 1


class FakeEngine:
    """A policy that is one vector of logits, whatever the prompt; its gradients are real."""

    def __init__(self, progress):
        self.parameter = torch.nn.Parameter(torch.zeros(NUM_TOKENS, 1))
        self.policy_version = 0
        self.progress = progress
        self.loss_sum, self.denominator = torch.zeros(()), 0.0
        self.calls = []

    def capture(self, prompt):
        self.calls.append("capture")
        self.progress.start("capture", len(prompt))
        self.progress.advance(len(prompt))
        self.progress.finish()
        return FakeState(prompt, self.policy_version)

    def sample(self, state, num_responses, settings):
        assert state.version == self.policy_version, "a stale state was used"
        self.calls.append("sample")
        generator = torch.Generator().manual_seed(settings.seed)
        logprobs = torch.log_softmax(self.parameter[:, 0].detach(), 0)
        responses = []
        for _ in range(num_responses):
            ids = torch.multinomial(
                logprobs.exp(), settings.max_new_tokens, replacement=True, generator=generator
            ).tolist()
            ends = [ids.index(stop) for stop in settings.stop_ids if stop in ids]
            kept = ids[: min(ends) + 1] if ends else ids
            responses.append(Response(kept, logprobs[kept], truncated=not ends))
        return responses

    def forward_backward(self, groups, objective, states=None):
        assert states is None or [state.version for state in states] == [self.policy_version]
        self.calls.append(f"forward_backward {len(groups)}" + ("" if states is None else " with state"))
        loss_sum, denominator, skipped = torch.zeros(()), 0.0, 0
        for group, advantages in zip(groups, objective.group_advantages(groups), strict=True):
            if not advantages.any():
                skipped += 1
                continue
            logprobs = torch.log_softmax(self.parameter[:, 0], 0)
            for response, advantage in zip(group.responses, advantages.tolist(), strict=True):
                ratio = (logprobs[response.token_ids] - response.sampling_logprobs).exp()
                loss_sum = loss_sum - (ratio * advantage).sum()
                denominator += len(response)
        self.loss_sum, self.denominator = self.loss_sum + loss_sum, self.denominator + denominator
        num_trained = sum(len(response) for group in groups for response in group.responses)
        reasons = ("group 0: all rewards are equal",) * skipped
        return ForwardBackwardReport(
            loss_sum.item(), denominator, len(groups), skipped, 0, 0, num_trained, LossMetrics(entropy=2.0), {}, reasons
        )

    def optimizer_step(self, optimizer, max_grad_norm=None):
        self.calls.append("optimizer_step")
        if not self.denominator:
            return StepReport(False, 0.0, 0.0, self.policy_version, "nothing gave a gradient")
        optimizer.zero_grad()
        (self.loss_sum / self.denominator).backward()
        self.loss_sum, self.denominator = torch.zeros(()), 0.0
        optimizer.step()
        self.policy_version += 1
        return StepReport(True, 1.0, self.parameter.grad.norm().item(), self.policy_version)


def share_of_a(completions):
    """A reward that teaches the fake policy to write the letter a."""
    return [text.count("a") / max(len(text), 1) for text in completions]


class Runner:
    """Builds a `Training` around fakes, keeps what it said, and can stop and resume it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lines: list[str] = []

    def config(self, **sections):
        tree = {
            "model": {"name": "fake"},
            "data": {"rows": "rows.jsonl"},
            "rewards": [{"function": "exact_match"}],
            "sampling": {"num_generations": 4, "max_completion_length": 6},
            "optimizer": {"learning_rate": 0.1},
            "run": {"output_dir": str(self.folder), "max_steps": 4, "prompts_per_step": 2, "save_steps": 2},
        }
        for name, values in sections.items():
            tree[name] = {**tree.get(name, {}), **values}
        return check_config(tree)

    def training(self, rewards=None, rows=None, folder=None, **sections):
        config = self.config(**sections)
        meter = StageMeter()
        engine = FakeEngine(meter)
        rows = [Row(i, f"row {i}", "abcdefgh"[: i + 2], {"answer": "a"}) for i in range(5)] if rows is None else rows

        def save_weights(target):
            torch.save(engine.parameter.detach(), target / "weights.pt")

        optimizer = make_optimizer([("logits", engine.parameter)], config.optimizer)
        return Training(
            config=config,
            engine=engine,
            tokenizer=FakeTokenizer(),
            optimizer=optimizer,
            objective=GRPO(scale_rewards=config.grpo.scale_rewards),
            rows=rows,
            fingerprint=rows_fingerprint(rows),
            rewards=rewards or [RewardFunction("share_of_a", share_of_a, 1.0, {})],
            evaluation=None,
            stop_ids=(STOP,),
            folder=folder or open_new(self.folder, "config"),
            snapshot=lambda: Snapshot(save_weights, optimizer.state_dict()),
            meter=meter,
            say=self.lines.append,
        )

    start = Position()

    @staticmethod
    def with_evaluation(training, evaluation):
        return dataclasses.replace(training, evaluation=evaluation)


@pytest.fixture
def runner(tmp_path):
    FakeState.num_alive = 0
    return Runner(tmp_path / "run")


@pytest.fixture
def fake_tokenizer():
    return FakeTokenizer()
