"""What a training run works with, gathered in one record, and the small questions the loop asks it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from longstraw.config import EvaluationConfig, RunConfig, SamplingConfig
from longstraw.execution.engine import Engine
from longstraw.grpo.losses import GRPO
from longstraw.records import SamplingSettings
from longstraw.training.data import Row
from longstraw.training.progress import StageMeter
from longstraw.training.prompts import Tokenizer
from longstraw.training.ranks import Ranks
from longstraw.training.rewards import RewardFunction
from longstraw.training.run_folder import RunFolder
from longstraw.training.trained_state import Snapshot


@dataclass(frozen=True)
class Evaluation:
    """Held-out rows, when they are scored, and the functions whose means are reported."""

    config: EvaluationConfig
    rows: Sequence[Row]
    metrics: Sequence[RewardFunction]

    def is_due(self, step: int, *, num_taken: int, max_steps: int) -> bool:
        """Whether to evaluate after `step`, reached by the last `num_taken` optimizer steps (0: before the first)."""
        if num_taken == 0:
            return self.config.before and step == 0
        if step >= max_steps:
            return self.config.after
        every = self.config.every
        return every is not None and step // every > (step - num_taken) // every


@dataclass(frozen=True)
class Training:
    """Everything the loop needs; nothing in it changes but the engine's and the optimizer's own state."""

    config: RunConfig
    engine: Engine
    tokenizer: Tokenizer
    optimizer: torch.optim.Optimizer
    objective: GRPO
    rows: Sequence[Row]
    fingerprint: str  # of the rows as they were read, see `rows_fingerprint`
    rewards: Sequence[RewardFunction]
    evaluation: Evaluation | None
    stop_ids: tuple[int, ...]
    folder: RunFolder
    snapshot: Callable[[], Snapshot]
    meter: StageMeter
    say: Callable[[str], None]  # prints one line
    ranks: Ranks = field(default_factory=Ranks)
    said: set[str] = field(default_factory=set)

    @property
    def max_steps(self) -> int:
        return num_steps(self.config, len(self.rows))

    @property
    def advantages_need_the_whole_step(self) -> bool:
        """Whether no group can be replayed before all are sampled."""
        return self.config.grpo.scale_rewards == "batch" and self.config.run.prompts_per_step > 1

    def counts_memory(self, step: int) -> bool:
        """Whether live bytes are counted in the step after `step`. On a CPU that slows every operator."""
        every = self.config.run.track_memory_steps
        return every is not None and step % every == 0

    def say_once(self, text: str) -> None:
        if text not in self.said:
            self.said.add(text)
            self.say(text)


def num_steps(config: RunConfig, num_rows: int) -> int:
    """Optimizer steps of the whole run."""
    run = config.run
    if run.max_steps is not None:
        return run.max_steps
    assert run.epochs is not None, "the configuration has one of the two"
    num_draws = max(1, -(-round(run.epochs * num_rows) // run.prompts_per_step))
    return num_draws * run.num_iterations


def sampling_settings(config: SamplingConfig, stop_ids: tuple[int, ...], seed: int) -> SamplingSettings:
    """The configured sampling with one draw's seed."""
    return SamplingSettings(
        max_new_tokens=config.max_completion_length,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        stop_ids=stop_ids,
        seed=seed,
    )


def draw_seed(*parts: int | str) -> int:
    """A seed that follows from what it is for, so that a resumed run draws the same and no two draws are alike."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1  # torch takes 63 bits


def rows_fingerprint(rows: Sequence[Row]) -> str:
    """Changes when a row, or their order in the source, does: a position in other rows would mean nothing."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(repr((row.prompt, sorted(row.columns.items()))).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
