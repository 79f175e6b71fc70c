"""The training loop: rows, capture, sampling, rewards, replay, transaction, log, checkpoint.

One prompt state is alive at a time. Everything a step draws follows from the seed and the position, so that a resumed
run takes the same steps. In a job the rows of a step are dealt out over the data axis; the ranks of a context axis do
the same things with the same rows, and the first of them calls the reward functions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from longstraw.errors import LongStrawError
from longstraw.grpo.advantages import rewards_only
from longstraw.records import ForwardBackwardReport, Prompt, Response, ResponseGroup, StepReport
from longstraw.training.checkpoint import Position, save_checkpoint
from longstraw.training.data import Row, rows_at
from longstraw.training.evaluation import evaluate
from longstraw.training.metrics import Rollout, StepOutcome, completion_records, step_line, step_metrics
from longstraw.training.optimizer import learning_rate_at, set_learning_rate
from longstraw.training.progress import StageCosts
from longstraw.training.prompts import completion_text, encode_prompt
from longstraw.training.randomness import RandomState, random_state, undisturbed_randomness
from longstraw.training.rewards import Completions, TrainerState, score_group
from longstraw.training.run import Training, draw_seed, sampling_settings

PROMPT_TAIL_TOKENS = 128  # of a prompt that go into completions.jsonl


def train(training: Training, start: Position) -> Position:
    """Train from `start` to the last step and return where it ended.

    If an error stops the run in the middle of a step or an evaluation (a reward, memory), the steps before it are saved
    first.
    """
    position = saved = start
    _evaluate_if_due(training, position, num_taken=0)
    while position.step < training.max_steps:
        with _saving_if_it_fails(training, position, saved):
            position = train_on_next_rows(training, position)
        if _is_save_due(training, position):
            _save(training, position, random_state())
            saved = position
        with _saving_if_it_fails(training, position, saved):
            _evaluate_if_due(training, position, num_taken=training.config.run.num_iterations)
    return position


@contextmanager
def _saving_if_it_fails(training: Training, position: Position, saved: Position) -> Iterator[None]:
    """If what is done inside fails before it changes a weight, save the position from before, unless it was saved."""
    randomness, stamp = random_state(), _weights_stamp(training.optimizer)
    try:
        yield
    except Exception as error:
        is_whole = _weights_stamp(training.optimizer) == stamp
        if position.step > saved.step and is_whole and training.ranks.can_save_after(error):
            _save(training, position, randomness)
        raise


def train_on_next_rows(training: Training, position: Position) -> Position:
    """Sample responses to the next rows and take one optimizer step on them, or `num_iterations`."""
    engine, objective, ranks = training.engine, training.objective, training.ranks
    rows = _next_rows(training, position)
    rollouts: list[Rollout] = []
    groups: list[ResponseGroup] = []
    reports: list[ForwardBackwardReport] = []
    with training.meter.measure(counts_memory=training.counts_memory(position.step)) as costs:
        started = time.perf_counter()
        with ranks.together(LongStrawError):
            for place, row in ranks.share(list(enumerate(rows))):
                prompt = encode_prompt(training.tokenizer, row)
                with engine.capture(prompt) as state:
                    seed = draw_seed(training.config.run.seed, position.step, position.rows_drawn + place, row.index)
                    settings = sampling_settings(training.config.sampling, training.stop_ids, seed)
                    responses = engine.sample(state, training.config.sampling.num_generations, settings)
                    rollout = _score(training, position, row, prompt, responses)
                    group = ResponseGroup(prompt, responses, rewards=rollout.scored.totals)
                    if not training.advantages_need_the_whole_step:
                        reports.append(engine.forward_backward([group], objective, states=[state]))
                rollouts.append(rollout)
                groups.append(group)
        if training.advantages_need_the_whole_step:
            reports.append(engine.forward_backward(groups, objective))
        step_report, learning_rate = _optimizer_step(training, position)
    seconds = time.perf_counter() - started
    rollouts = ranks.gather_shares(rollouts)
    outcome = _outcome(training, rollouts, reports, (step_report, learning_rate), seconds, costs)
    position = _log(training, replace(position, rows_drawn=position.rows_drawn + len(rows)), outcome)
    _log_completions(training, position.step, rollouts)
    for _ in range(1, training.config.run.num_iterations):
        position = _train_again(training, position, rollouts, groups)
    return position


def _train_again(
    training: Training, position: Position, rollouts: Sequence[Rollout], groups: Sequence[ResponseGroup]
) -> Position:
    """One more step on the same responses. The policy has moved, so their prompts are captured anew."""
    together = [groups] if training.advantages_need_the_whole_step else [[group] for group in groups]
    with training.meter.measure(counts_memory=training.counts_memory(position.step)) as costs:
        started = time.perf_counter()
        with training.ranks.together(LongStrawError):
            reports = [training.engine.forward_backward(batch, training.objective) for batch in together]
        taken = _optimizer_step(training, position)
    seconds = time.perf_counter() - started
    return _log(training, position, _outcome(training, rollouts, reports, taken, seconds, costs))


def _outcome(
    training: Training,
    rollouts: Sequence[Rollout],
    reports: Sequence[ForwardBackwardReport],
    taken: tuple[StepReport, float],
    seconds: float,
    costs: StageCosts,
) -> StepOutcome:
    """What the ranks did together: everyone's reports, this rank's times, the highest peaks."""
    ranks = training.ranks
    step_report, learning_rate = taken
    costs = costs.with_peaks_of(ranks.gather(costs))
    return StepOutcome(rollouts, ranks.gather_shares(reports), step_report, learning_rate, seconds, costs)


def _next_rows(training: Training, position: Position) -> list[Row]:
    data = training.config.data
    return rows_at(
        training.rows,
        position.rows_drawn,
        training.config.run.prompts_per_step,
        shuffle_seed=data.shuffle_seed if data.shuffle else None,
    )


def _score(training: Training, position: Position, row: Row, prompt: Prompt, responses: Sequence[Response]) -> Rollout:
    tokenizer = training.tokenizer
    texts = [completion_text(tokenizer, response) for response in responses]
    completions = Completions(texts, [response.token_ids.tolist() for response in responses])
    state = TrainerState(position.step, training.max_steps, position.rows_drawn / len(training.rows))
    return Rollout(
        row_index=row.index,
        num_prompt_tokens=len(prompt),
        prompt_tail=tokenizer.decode(prompt.token_ids[-PROMPT_TAIL_TOKENS:].tolist()),
        texts=texts,
        lengths=[len(response) for response in responses],
        truncated=[response.truncated for response in responses],
        scored=training.ranks.once(lambda: score_group(training.rewards, row, completions, state)),
    )


def _optimizer_step(training: Training, position: Position) -> tuple[StepReport, float]:
    config = training.config.optimizer
    learning_rate = learning_rate_at(position.step + 1, max_steps=training.max_steps, config=config)
    set_learning_rate(training.optimizer, learning_rate)
    return training.engine.optimizer_step(training.optimizer, max_grad_norm=config.max_grad_norm), learning_rate


def _log(training: Training, position: Position, outcome: StepOutcome) -> Position:
    """Write and print the step, say once why something was skipped, and return the position after it."""
    tokens_of_step = sum(rollout.num_tokens for rollout in outcome.rollouts)
    position = replace(
        position,
        step=position.step + 1,
        num_tokens=position.num_tokens + tokens_of_step,
        num_skipped_groups=position.num_skipped_groups + outcome.num_skipped_groups,
        num_skipped_steps=position.num_skipped_steps + (not outcome.step_report.stepped),
    )
    metrics = step_metrics(outcome, step=position.step, num_tokens=position.num_tokens)
    training.folder.append("metrics", metrics)
    training.say(step_line(metrics, max_steps=training.max_steps, tokens_of_step=tokens_of_step))
    for reason in dict.fromkeys(reason for report in outcome.reports for reason in report.skipped_reasons):
        what = reason.partition(": ")[2] or reason  # without the group's number in its call
        training.say_once(f"  a group was skipped: {what} (said once; skipped_groups in metrics.jsonl counts them)")
    if not outcome.step_report.stepped:
        training.say_once(
            f"  no parameter was changed: {outcome.step_report.reason} (said once; stepped in metrics.jsonl)"
        )
    return position


def _log_completions(training: Training, step: int, rollouts: Sequence[Rollout]) -> None:
    if not training.config.run.log_completions:
        return
    advantages = training.objective.group_advantages([rewards_only(rollout.scored.totals) for rollout in rollouts])
    for rollout, advantages_G in zip(rollouts, advantages, strict=True):
        for record in completion_records(rollout, advantages_G, step=step):
            training.folder.append("completions", record)


def _save(training: Training, position: Position, randomness: RandomState) -> None:
    snapshot = training.snapshot()
    with training.ranks.together(Exception):
        if not training.ranks.is_first:
            return
        training.folder.flush()
        path = save_checkpoint(
            training.folder.checkpoints,
            position,
            snapshot=snapshot,
            randomness=randomness,
            fingerprint=training.fingerprint,
            keep=training.config.run.keep_checkpoints,
        )
        training.say(f"saved {path}")


def _weights_stamp(optimizer: torch.optim.Optimizer) -> int:
    """Changes whenever a trained parameter is written: an error may come after some of them were."""
    return sum(parameter._version for group in optimizer.param_groups for parameter in group["params"])


def _is_save_due(training: Training, position: Position) -> bool:
    save_steps = training.config.run.save_steps
    is_last = position.step >= training.max_steps
    return is_last or (save_steps is not None and position.step % save_steps == 0)


def _evaluate_if_due(training: Training, position: Position, *, num_taken: int) -> None:
    evaluation = training.evaluation
    if evaluation is not None and evaluation.is_due(position.step, num_taken=num_taken, max_steps=training.max_steps):
        with undisturbed_randomness():
            evaluate(training, evaluation, position)
