"""The methods as the benchmark runs them: each owns a copy of the same model and leaves the gradient in `.grad`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from peft import PeftModel
from torch import Tensor

from conventional import full_sequence_update, prefix_grouper_update
from longstraw.evidence.memory import MemoryReport, MemoryTracker, StageProgress
from longstraw.execution.engine import Engine
from longstraw.execution.progress import Progress, Silent
from longstraw.grpo.losses import GRPO
from longstraw.records import Prompt, Response, ResponseGroup
from small_models import Kind, Problem, adapter_gradients

FULL_SEQUENCE = "(a) full sequence"
PREFIX_GROUPER = "(b) prefix-grouper"
PREFIX_GROUPER_PLAIN = "(b) prefix-grouper, no checkpointing"
EXACT = "(c) exact"
EXACT_CHUNK = "(c) exact, graph of a chunk"
EXACT_HOST = "(c) exact, state in host memory"
STOPPED = "(d) stopped"
LONGSTRAW_METHODS = (EXACT, EXACT_CHUNK, EXACT_HOST, STOPPED)
HOST_STAGING_BYTES = 1 << 24  # of EXACT_HOST; the default is meant for prompts a hundred times as long
METHODS: dict[Kind, tuple[str, ...]] = {
    "hybrid": (FULL_SEQUENCE, *LONGSTRAW_METHODS),
    "dense": (FULL_SEQUENCE, PREFIX_GROUPER, PREFIX_GROUPER_PLAIN, *LONGSTRAW_METHODS),
    "latent": (FULL_SEQUENCE, *LONGSTRAW_METHODS),
}


@dataclass(frozen=True)
class LongStrawSettings:
    """As in `Engine`."""

    prompt_gradient: Literal["exact", "stopped"]
    graph_scope: Literal["layer", "chunk"]
    residency: Literal["device", "host"]
    chunk_tokens: int


@dataclass(frozen=True, eq=False)
class Method:
    """`run` makes the update's gradient and returns seconds by stage, empty where a method has no stages."""

    name: str
    model: PeftModel
    run: Callable[[Problem, Progress], dict[str, float]]
    shares_prompt: bool


def build_method(name: str, model: PeftModel, *, chunk_tokens: int) -> Method:
    """`model` becomes the method's own: some of them leave settings on it."""
    if name == FULL_SEQUENCE:
        return Method(name, model, _without_stages(partial(full_sequence_update, model)), shares_prompt=False)
    if name in (PREFIX_GROUPER, PREFIX_GROUPER_PLAIN):
        update = partial(prefix_grouper_update, model, checkpointing=name == PREFIX_GROUPER)
        return Method(name, model, _without_stages(update), shares_prompt=True)
    settings = LongStrawSettings(
        prompt_gradient="stopped" if name == STOPPED else "exact",
        graph_scope="chunk" if name == EXACT_CHUNK else "layer",
        residency="host" if name == EXACT_HOST else "device",
        chunk_tokens=chunk_tokens,
    )
    return Method(name, model, partial(longstraw_update, model, settings), shares_prompt=True)


def longstraw_update(
    model: PeftModel, settings: LongStrawSettings, problem: Problem, progress: Progress
) -> dict[str, float]:
    """Capture, replay, and the transaction's division; the step itself has a learning rate of zero."""
    engine = Engine(
        model,
        chunk_tokens=settings.chunk_tokens,
        prompt_gradient=settings.prompt_gradient,
        graph_scope=settings.graph_scope,
        residency=settings.residency,
        staging_bytes=HOST_STAGING_BYTES,
        progress=progress,
    )
    responses = [Response(token_ids) for token_ids in problem.responses]
    group = ResponseGroup(Prompt(problem.prompt_P), responses, advantages=list(problem.advantages))
    report = engine.forward_backward([group], GRPO(loss_type="dapo"))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine.optimizer_step(torch.optim.SGD(trained, lr=0.0))
    return dict(report.stage_seconds)


@dataclass(frozen=True, eq=False)
class TimedRun:
    seconds: float
    stage_seconds: dict[str, float]
    gradients: dict[str, Tensor]


def timed_run(method: Method, problem: Problem, device: torch.device) -> TimedRun:
    _forget_gradients(method, device)
    started = time.perf_counter()
    stage_seconds = method.run(problem, Silent())
    _synchronize(device)
    seconds = time.perf_counter() - started
    return TimedRun(seconds, stage_seconds, adapter_gradients(method.model))


def tracked_run(method: Method, problem: Problem, device: torch.device) -> MemoryReport:
    """The same update, untimed, with every live tensor counted: weights, gradients, state and working memory."""
    _forget_gradients(method, device)
    tracker = MemoryTracker(device)
    tracker.watch([*method.model.parameters(), *method.model.buffers()])
    with tracker:
        method.run(problem, StageProgress(tracker))
    _synchronize(device)
    return tracker.report()


def _without_stages(update: Callable[[Problem], None]) -> Callable[[Problem, Progress], dict[str, float]]:
    def run(problem: Problem, _: Progress) -> dict[str, float]:
        update(problem)
        return {}

    return run


def _forget_gradients(method: Method, device: torch.device) -> None:
    method.model.zero_grad(set_to_none=True)
    gc.collect()
    _synchronize(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
