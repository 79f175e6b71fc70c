"""What a checkpoint holds of a policy, whole, whatever part of it this rank has: trained weights and optimizer moments.

A checkpoint does not depend on the topology, so a run can go on with another one. Only experts are divided; their
parts are put together here when a checkpoint is taken, and cut out again when one is read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeGuard

import torch
from torch import Tensor, nn

from longstraw.models.experts import Layout, Part, expert_parameters, joined
from longstraw.models.saving import save_trained
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.topology import Axis

Moments = dict[int, dict[str, object]]  # of every parameter, by its place in the optimizer


@dataclass(frozen=True, eq=False)
class Snapshot:
    """Weights and optimizer state of one moment, ready to be written."""

    save_weights: Callable[[Path], None]
    optimizer: dict[str, object]


@dataclass(frozen=True, eq=False)
class TrainedState:
    """A model, its optimizer, and the axis its experts are divided over (of degree 1: they are not)."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    expert: Axis = field(default_factory=Axis)
    is_written_here: bool = True

    def snapshot(self) -> Snapshot:
        """What to write now. Collective on the expert axis; where nothing is written, parts stay parts."""
        divided = self._divided()
        exchange = Exchange(self.expert)
        parameters = dict(self.model.named_parameters())
        whole = {
            name: self._whole(parameters[name].detach(), *divided[name], exchange)
            for name in divided
            if parameters[name].requires_grad
        }
        state = self.optimizer.state_dict()
        moments: Moments = dict(state["state"])
        for place, (parameter, layout) in self._divided_places(divided).items():
            if place in moments:
                moments[place] = {
                    key: self._whole(value, *layout, exchange) if _is_like(value, parameter) else value
                    for key, value in moments[place].items()
                }
        return Snapshot(lambda folder: save_trained(self.model, folder, whole), {**state, "state": moments})

    def load_optimizer(self, state: dict[str, object]) -> None:
        """Put the moments of a checkpoint back, or this rank's part of them, bit for bit."""
        part = Part(self.expert.degree, self.expert.rank)
        moments: Moments = dict(state["state"])  # type: ignore[call-overload]  # torch's own structure
        for place, (parameter, (layout, num_local)) in self._divided_places(self._divided()).items():
            if place in moments:
                moments[place] = {
                    key: part.of(value, layout, num_local * part.degree) if _is_like(value, parameter) else value
                    for key, value in moments[place].items()
                }
        self.optimizer.load_state_dict({**state, "state": moments})

    def _whole(self, part: Tensor, layout: Layout, num_local_experts: int, exchange: Exchange) -> Tensor:
        """On the CPU: a checkpoint is written from there, and the device has room for the part only."""
        parts = exchange.all_gather_tokens(part, [part.shape[0]] * exchange.degree, dim=0, kind="checkpoint")
        return joined([each.cpu() for each in parts], layout, num_local_experts) if self.is_written_here else part

    def _divided(self) -> dict[str, tuple[Layout, int]]:
        return expert_parameters(self.model) if self.expert.degree > 1 else {}

    def _divided_places(
        self, divided: dict[str, tuple[Layout, int]]
    ) -> dict[int, tuple[nn.Parameter, tuple[Layout, int]]]:
        """Where divided parameters stand in the optimizer."""
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        ordered = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        return {
            place: (parameter, divided[names[parameter]])
            for place, parameter in enumerate(ordered)
            if names[parameter] in divided
        }


def _is_like(value: object, parameter: Tensor) -> TypeGuard[Tensor]:
    """Whether it has a number for each of a parameter's, of all experts or of a part; a count of steps has not."""
    return isinstance(value, Tensor) and value.dim() == parameter.dim()
