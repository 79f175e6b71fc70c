"""From a configuration to a `Training`, cheapest checks first: settings, rows and rewards, tokenizer, then the model.

A mistake in any of them is found before the run folder is created or a file in it is changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from torch import Tensor, nn

from longstraw.config import GRPOConfig, ModelConfig, RunConfig, SamplingConfig
from longstraw.config_file import changed_keys, dump_config
from longstraw.errors import InputError
from longstraw.evidence.memory import MemoryTracker
from longstraw.execution.engine import Engine
from longstraw.execution.progress import Progress
from longstraw.grpo.losses import GRPO
from longstraw.models.decoder import Decoder
from longstraw.models.loading import LoraSettings, load_model, load_tokenizer
from longstraw.models.saving import load_adapter
from longstraw.parallel.topology import Topology
from longstraw.training.checkpoint import Position, find_checkpoint, load_position, restore, rewind
from longstraw.training.data import Row, load_rows
from longstraw.training.optimizer import make_optimizer
from longstraw.training.progress import MemoryTracking, StageMeter
from longstraw.training.prompts import Tokenizer, count_prompt_tokens, keep_fitting_rows, stop_ids
from longstraw.training.randomness import seed_everything
from longstraw.training.ranks import Ranks
from longstraw.training.rewards import RewardFunction, check_arguments, load_reward_functions
from longstraw.training.run import Evaluation, Training, num_steps, rows_fingerprint
from longstraw.training.run_folder import CONFIG, RunFolder, open_new, open_resumed, refuse_used_folder
from longstraw.training.trained_state import TrainedState

# A checkpoint's weights and optimizer state mean nothing under other values of these.
FIXED_ON_RESUME = ("model.adapter", "model.dtype", "model.quantization")


@dataclass(frozen=True)
class Surroundings:
    """What the caller decides: who is told, who sees progress, and where to resume."""

    say: Callable[[str], None]
    display: Progress
    is_resumed: bool = False
    resume_from: Path | None = None  # None: the latest checkpoint
    ranks: Ranks = field(default_factory=Ranks)


@dataclass(frozen=True)
class Inputs:
    """What is checked without a model or a tokenizer."""

    rows: Sequence[Row]
    rewards: Sequence[RewardFunction]
    evaluation: Evaluation | None
    objective: GRPO


@dataclass(frozen=True)
class Lengths:
    """Tokens of every prompt, counted before the model is loaded and compared with its positions after."""

    rows: Sequence[int]
    evaluation: Sequence[int]


def prepare(config: RunConfig, surroundings: Surroundings) -> tuple[Training, Position]:
    """Check everything, load the model, open the run folder; the position is where training goes on.

    Raises a `LongStrawError` that names the setting, the row or the file. In a job all ranks call it, and what one of
    them finds wrong is raised on all before anything is written.
    """
    with surroundings.ranks.together(Exception):
        found = _check(config, surroundings)
    with surroundings.ranks.together(Exception):
        policy = _load(config, surroundings, found)
    with surroundings.ranks.together(Exception):
        folder = _open_folder(config, surroundings, found.checkpoint, policy)
    training = Training(
        config=config,
        engine=policy.engine,
        tokenizer=found.tokenizer,
        optimizer=policy.trained.optimizer,
        objective=found.inputs.objective,
        rows=policy.rows,
        fingerprint=policy.fingerprint,
        rewards=found.inputs.rewards,
        evaluation=policy.evaluation,
        stop_ids=found.stop_ids,
        folder=folder,
        snapshot=policy.trained.snapshot,
        meter=policy.meter,
        say=surroundings.say,
        ranks=surroundings.ranks,
    )
    return training, policy.position


@dataclass(frozen=True)
class _Found:
    """What was checked before the model is loaded."""

    checkpoint: Path | None  # None: a new run
    inputs: Inputs
    tokenizer: Tokenizer
    lengths: Lengths
    stop_ids: tuple[int, ...]


@dataclass(frozen=True)
class _Policy:
    """The loaded model in its engine, and what only it could tell: which rows fit, and so the position in them."""

    engine: Engine
    trained: TrainedState
    meter: StageMeter
    rows: Sequence[Row]
    evaluation: Evaluation | None
    fingerprint: str
    position: Position


def _check(config: RunConfig, surroundings: Surroundings) -> _Found:
    path = Path(config.run.output_dir)
    checkpoint: Path | None = None
    if surroundings.is_resumed:
        checkpoint = find_checkpoint(path / "checkpoints", surroundings.resume_from)
        _compare_with_earlier(config, path / CONFIG, surroundings.say)
    else:
        refuse_used_folder(path)
    inputs = check_inputs(config)
    tokenizer = load_tokenizer(config.model.name, gguf_file=config.model.gguf_file)
    lengths = count_lengths(inputs, tokenizer)
    return _Found(checkpoint, inputs, tokenizer, lengths, stop_ids(tokenizer, config.sampling.stop))


def _load(config: RunConfig, surroundings: Surroundings, found: _Found) -> _Policy:
    topology = surroundings.ranks.topology
    seed_everything(config.run.seed)
    model = load_policy(config.model, found.checkpoint, topology)
    optimizer = make_optimizer(model.named_parameters(), config.optimizer)
    tracking = _memory_tracking(model, optimizer) if config.run.track_memory_steps is not None else None
    meter = StageMeter(surroundings.display, tracking)
    engine = Engine(
        model,
        chunk_tokens=config.engine.chunk_tokens,
        prompt_gradient=config.engine.prompt_gradient,
        graph_scope=config.engine.graph_scope,
        residency=config.engine.residency,
        staging_bytes=config.engine.staging_bytes,
        topology=topology,
        progress=meter,
    )
    trained = TrainedState(model, optimizer, topology.expert, is_written_here=surroundings.ranks.is_first)
    rows, evaluation = fitting_rows(config, found.inputs, found.lengths, Decoder(model).max_positions)
    fingerprint = rows_fingerprint(rows)
    position = Position()
    if found.checkpoint is not None:
        position = _resumed_position(config, found.checkpoint, rows, fingerprint)
        restore(found.checkpoint, trained.load_optimizer)
    return _Policy(engine, trained, meter, rows, evaluation, fingerprint, position)


def _open_folder(config: RunConfig, surroundings: Surroundings, checkpoint: Path | None, policy: _Policy) -> RunFolder:
    path = Path(config.run.output_dir)
    if not surroundings.ranks.is_first:
        return RunFolder(path, is_written_here=False)
    if checkpoint is None:
        return open_new(path, dump_config(config))
    for name in rewind(path / "checkpoints", checkpoint):
        surroundings.say(f"moved the newer checkpoint {name} to checkpoints/set-aside")
    return open_resumed(path, dump_config(config), step=policy.position.step)


def check_inputs(config: RunConfig) -> Inputs:
    """Load rows and reward functions and see that they go together."""
    objective = make_objective(config.grpo, config.sampling)
    rewards = load_reward_functions(config.rewards)
    rows = load_rows(config.data.rows, split=config.data.split)
    check_arguments(rewards, list(rows[0].columns))
    if config.evaluation is None:
        return Inputs(rows, rewards, None, objective)
    metrics = config.evaluation.metrics
    functions = rewards if metrics is None else load_reward_functions(metrics)
    held_out = load_rows(config.evaluation.rows, split=config.evaluation.split)[: config.evaluation.max_rows]
    check_arguments(functions, list(held_out[0].columns))
    return Inputs(rows, rewards, Evaluation(config.evaluation, held_out, functions), objective)


def make_objective(grpo: GRPOConfig, sampling: SamplingConfig) -> GRPO:
    """The configured loss."""
    return GRPO(
        loss_type=grpo.loss_type,
        epsilon=grpo.epsilon,
        epsilon_high=grpo.epsilon_high,
        delta=grpo.delta,
        beta=grpo.beta,
        importance_sampling_level=grpo.importance_sampling_level,
        scale_rewards=grpo.scale_rewards,
        mask_truncated_completions=grpo.mask_truncated_completions,
        max_completion_length=sampling.max_completion_length,
        sapo_temperature_pos=grpo.sapo_temperature_pos,
        sapo_temperature_neg=grpo.sapo_temperature_neg,
        use_bias_correction_kl=grpo.use_bias_correction_kl,
    )


def count_lengths(inputs: Inputs, tokenizer: Tokenizer) -> Lengths:
    """Encode every prompt, held-out ones too."""
    evaluation = [] if inputs.evaluation is None else count_prompt_tokens(inputs.evaluation.rows, tokenizer)
    return Lengths(count_prompt_tokens(inputs.rows, tokenizer), evaluation)


def fitting_rows(
    config: RunConfig, inputs: Inputs, lengths: Lengths, max_positions: int
) -> tuple[list[Row], Evaluation | None]:
    """Rows that leave room for a completion within the model's positions and keep to `data.max_prompt_tokens`."""
    room = max_positions - config.sampling.max_completion_length
    if room < 1:
        raise InputError(
            f"sampling.max_completion_length: {config.sampling.max_completion_length:,} tokens leave no room for a "
            f"prompt within the model's {max_positions:,} positions."
        )
    limit, limit_is = room, f"the model's {max_positions:,} positions minus sampling.max_completion_length"
    if config.data.max_prompt_tokens is not None and config.data.max_prompt_tokens <= room:
        limit, limit_is = config.data.max_prompt_tokens, "data.max_prompt_tokens"
    skips = config.data.long_prompts == "skip"
    rows = keep_fitting_rows(inputs.rows, lengths.rows, max_prompt_tokens=limit, limit_is=limit_is, skip_longer=skips)
    if inputs.evaluation is None:
        return rows, None
    held_out = keep_fitting_rows(
        inputs.evaluation.rows, lengths.evaluation, max_prompt_tokens=limit, limit_is=limit_is, skip_longer=skips
    )
    return rows, Evaluation(inputs.evaluation.config, held_out, inputs.evaluation.metrics)


def load_policy(config: ModelConfig, checkpoint: Path | None, topology: Topology) -> nn.Module:
    """The model to train, with the checkpoint's weights if there is one; of routed experts this rank's part."""
    adapter = config.adapter
    if adapter is None:
        is_from_checkpoint = checkpoint is not None
        return load_model(
            str(checkpoint) if is_from_checkpoint else config.name,
            dtype=config.dtype,
            gguf_file=None if is_from_checkpoint else config.gguf_file,
            device=config.device,
            topology=topology,
        )
    model = load_model(
        config.name,
        dtype=config.dtype,
        adapter=LoraSettings(
            r=adapter.r,
            alpha=adapter.alpha,
            target_modules=adapter.target_modules,
            target_parameters=adapter.target_parameters,
        ),
        quantization=config.quantization,
        gguf_file=config.gguf_file,
        device=config.device,
        topology=topology,
    )
    if checkpoint is not None:
        load_adapter(model, checkpoint)
    return model


def _memory_tracking(model: nn.Module, optimizer: torch.optim.Optimizer) -> MemoryTracking:
    """Count live bytes of each step anew, on top of what is alive before it begins."""
    device = next(model.parameters()).device

    @contextmanager
    def tracked() -> Iterator[MemoryTracker]:
        parameters = list(model.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
        tracker = MemoryTracker(device)
        tracker.watch([*parameters, *model.buffers(), *gradients, *moments])
        with tracker:
            yield tracker

    return tracked


def _compare_with_earlier(config: RunConfig, path: Path, say: Callable[[str], None]) -> None:
    """Say which settings changed since the run was started; refuse those under which its checkpoints mean nothing."""
    if not path.is_file():
        return
    earlier = yaml.safe_load(path.read_text(encoding="utf-8"))
    changes = changed_keys(earlier, config.model_dump(mode="json"))
    for change in changes:
        if change.startswith(FIXED_ON_RESUME):
            raise InputError(f"resume: {change} cannot change within a run; start a new one in another output_dir.")
    if changes:
        say(f"changed since the run was started: {'; '.join(changes)}")


def _resumed_position(config: RunConfig, checkpoint: Path, rows: Sequence[Row], fingerprint: str) -> Position:
    position, earlier_fingerprint = load_position(checkpoint)
    if fingerprint != earlier_fingerprint:
        raise InputError(
            f"resume: data.rows ({config.data.rows}) are not the rows {checkpoint.name} was trained on; give those, or "
            "start a new run in another output_dir."
        )
    max_steps = num_steps(config, len(rows))
    if position.step >= max_steps:
        raise InputError(
            f"resume: {checkpoint.name} is already at step {position.step} of {max_steps}; raise run.max_steps "
            "(or run.epochs) to go on."
        )
    if position.step % config.run.num_iterations:
        raise InputError(
            f"resume: {checkpoint.name} is not at a multiple of run.num_iterations ({config.run.num_iterations})."
        )
    return position
