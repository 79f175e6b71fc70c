"""What the ranks of a job settle with one another around an update, in one place. One process settles nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from longstraw.errors import UnsupportedError
from longstraw.grpo.advantages import rewards_only
from longstraw.models.decoder import Decoder
from longstraw.models.experts import (
    DividedExperts,
    Part,
    divide_experts,
    divided_experts,
    expert_parameters,
)
from longstraw.parallel.exchange import Exchange, Traffic
from longstraw.parallel.expert import run_experts
from longstraw.parallel.gradients import ParameterClass, check_same_parameters, digest, global_norm, sum_gradients
from longstraw.parallel.topology import Topology
from longstraw.records import Prompt, Response, ResponseGroup, Trajectory


class Agreement:
    """Sums, comparisons and traffic over the axes of a topology.

    With an expert axis the model's routed experts are divided, in place, unless they were when it was loaded. Raises
    `UnsupportedError`, on all ranks alike and before anything is sent or changed, if the model does not divide so.
    """

    def __init__(self, topology: Topology, decoder: Decoder) -> None:
        for num_key_heads, num_value_heads in decoder.delta_net_heads:
            topology.check_heads(num_key_heads, num_value_heads)
        self._traffic = Traffic()
        self.context = Exchange(topology.context, self._traffic)
        self._data = Exchange(topology.data, self._traffic)
        self._world = Exchange(topology.world, self._traffic)
        _connect_experts(decoder, Exchange(topology.expert, self._traffic))
        self._classes = _parameter_classes(topology, decoder)
        self._compares_copies = topology.compares_copies
        self.token_order = topology.token_order

    @property
    def may_be_idle(self) -> bool:
        """Whether a rank may have no group: others of the data axis have some."""
        return self._data.degree > 1

    def check_inputs(self, what: str, *inputs: Prompt | Trajectory | Response | Tensor) -> None:
        """Raise `JointError` on all ranks of the context axis unless they were given the same."""
        if self.context.degree == 1:
            return
        digests = [digest(tensor).cpu() for given in inputs for tensor in _tensors(given)]
        mine = torch.stack([place * each for place, each in enumerate(digests, start=1)]).sum(0)
        mine = mine.to(self.context.axis.device)
        everyone = self.context.all_gather_tokens(mine[None], [1] * self.context.degree, dim=0, kind="agreement")
        if any(not torch.equal(other, everyone[0]) for other in everyone):
            self.context.raise_together(
                f"the ranks of a context axis were given different inputs ({what}); they must all make the same calls."
            )

    def sum_over_data(self, denominator: float, has_gradient: bool) -> tuple[float, bool]:
        """The denominator of all groups of the job, and whether any rank has a gradient."""
        if self._data.degree == 1:
            return denominator, has_gradient
        mine = torch.tensor([denominator, float(has_gradient)], dtype=torch.float64, device=self._data.axis.device)
        total, num_with = self._data.all_reduce_sum(mine, kind="agreement").tolist()
        return total, num_with > 0

    def groups_of_others(self, groups: Sequence[ResponseGroup]) -> list[ResponseGroup]:
        """One more group with the rewards that the other ranks of the data axis have, if they have any.

        For advantages that the rewards of a whole batch decide.
        """
        if self._data.degree == 1:
            return []
        given = [group.rewards for group in groups if group.rewards is not None]
        mine = torch.cat([torch.zeros(0, dtype=torch.float64), *given]).to(self._data.axis.device)
        size = torch.tensor([len(mine)], device=mine.device)
        sizes = self._data.all_gather_tokens(size, [1] * self._data.degree, dim=0, kind="agreement")
        everyone = self._data.all_gather_tokens(mine, [int(n) for n in sizes], dim=0, kind="agreement")
        theirs = torch.cat([*everyone[: self._data.rank], *everyone[self._data.rank + 1 :]]).tolist()
        return [rewards_only(theirs)] if theirs else []

    def sum_gradients(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Every parameter's gradient summed over its copies; the same bits on all ranks."""
        if self._world.degree == 1:
            return gradients
        sums: dict[str, Tensor | None] = {}
        for kind in self._classes:
            sums |= sum_gradients(kind, gradients, self._traffic)
        return sums

    def norm(self, gradients: Mapping[str, Tensor | None]) -> float:
        """L2 norm of the final gradients over all parameters of the job, each counted once; the same on all ranks.

        Raises `JointError` on all ranks, naming the first parameter whose gradient is not finite.
        """
        return global_norm(
            [(kind, {name: gradients[name] for name in kind.parameters}) for kind in self._classes], self._world
        )

    def compare_copies(self) -> None:
        """Raise `JointError` on all ranks if copies of a parameter differ."""
        if self._compares_copies and self._world.degree > 1:
            check_same_parameters(self._classes, self._world)

    def bytes_sent(self, since: Mapping[str, int] | None = None) -> dict[str, int]:
        """Bytes this rank sent so far, or since an earlier count, by kind."""
        earlier = since or {}
        counted = self._traffic.report().bytes_by_kind
        return {kind: count - earlier.get(kind, 0) for kind, count in counted.items() if count > earlier.get(kind, 0)}


def _connect_experts(decoder: Decoder, exchange: Exchange) -> None:
    """Divide the model's routed experts over the axis, or see that they are divided so, and connect the parts."""
    part = Part.of_axis(exchange.axis, decoder.model)
    divided = divided_experts(decoder.model)
    if any(forward.part != part for forward in divided):
        held = divided[0].part
        raise UnsupportedError(
            f"the model was loaded with part {held.rank} of {held.degree} of its experts, but expert={part.degree} and "
            f"this is rank {part.rank} of that axis; give Engine the topology the model was loaded with."
        )
    if part.degree == 1:
        return
    if not divided:
        divide_experts(decoder.model, part)

    def dispatch(layer: DividedExperts, hidden_NE: Tensor, choice_NK: Tensor, weight_NK: Tensor) -> Tensor:
        num_local = layer.num_local_experts
        return run_experts(
            hidden_NE, choice_NK, weight_NK, layer.run_local, num_local_experts=num_local, exchange=exchange
        )

    for forward in divided_experts(decoder.model):
        forward.dispatch = dispatch


def _parameter_classes(topology: Topology, decoder: Decoder) -> list[ParameterClass]:
    """What every rank has a copy of, and what only the ranks with the same experts have."""
    trained = decoder.trained_parameters
    of_experts = expert_parameters(decoder.model) if topology.expert.degree > 1 else {}
    shared = {name: parameter for name, parameter in trained.items() if name not in of_experts}
    divided = {name: parameter for name, parameter in trained.items() if name in of_experts}
    classes = [ParameterClass(shared, copies=topology.world)]
    if divided:
        classes.append(ParameterClass(divided, copies=topology.expert_copies, parts=topology.expert))
    return classes


def _tensors(given: Prompt | Trajectory | Response | Tensor) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, Prompt):
        return [given.token_ids]
    return [span.token_ids for span in given.spans]
