"""AdamW over what is trained, and the learning rate as a function of the step (so it needs no state of its own)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from longstraw.config import OptimizerConfig
from longstraw.errors import InputError


def make_optimizer(
    named_parameters: Iterable[tuple[str, torch.nn.Parameter]], config: OptimizerConfig
) -> torch.optim.AdamW:
    """AdamW over the parameters that require grad; those with fewer than two axes (norms, biases) are not decayed.

    Raises `InputError` if nothing would be trained.
    """
    trained = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    if not trained:
        raise InputError("model.adapter: no parameter would be trained; check target_modules and target_parameters.")
    decayed = [parameter for parameter in trained if parameter.dim() >= 2]
    others = [parameter for parameter in trained if parameter.dim() < 2]
    groups = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decayed, config.weight_decay), (others, 0.0))
        if parameters
    ]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, eps=config.eps)


def learning_rate_at(step: int, *, max_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step`, counted from 1.

    Rises to the peak over `warmup_steps`, reached at the last of them; then constant, or lowered so that it would be 0
    one step after the last.
    """
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(max_steps - config.warmup_steps, 1)
    if config.lr_scheduler_type == "linear":
        return config.learning_rate * (1 - done)
    if config.lr_scheduler_type == "cosine":
        return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))
    return config.learning_rate


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """For all parameter groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate
