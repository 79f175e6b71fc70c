"""What the ranks of a job settle with one another around an update, in one place. One process settles nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from longstraw.errors import UnsupportedError
from longstraw.models.decoder import Decoder
from longstraw.parallel.exchange import Exchange, Traffic
from longstraw.parallel.gradients import ParameterClass, check_same_parameters, digest, sum_gradients
from longstraw.parallel.topology import Topology
from longstraw.records import Prompt, Response, Trajectory


class Agreement:
    """Sums, comparisons and traffic over the axes of a topology.

    Raises `UnsupportedError`, on all ranks alike and before anything is sent, if the model does not divide so.
    """

    def __init__(self, topology: Topology, decoder: Decoder) -> None:
        if topology.expert.degree > 1:
            raise UnsupportedError(
                f"expert={topology.expert.degree}: an expert axis is not supported yet; set expert to 1."
            )
        for num_key_heads, num_value_heads in decoder.delta_net_heads:
            topology.check_heads(num_key_heads, num_value_heads)
        self._traffic = Traffic()
        self.context = Exchange(topology.context, self._traffic)
        self._data = Exchange(topology.data, self._traffic)
        self._world = Exchange(topology.world, self._traffic)
        self._parameters = ParameterClass(decoder.trained_parameters, copies=topology.world)
        self._compares_copies = topology.compares_copies
        self.token_order = topology.token_order

    @property
    def may_be_idle(self) -> bool:
        """Whether a rank may have no group: others of the data axis have some."""
        return self._data.degree > 1

    def check_inputs(self, what: str, *inputs: Prompt | Trajectory | Response | Tensor) -> None:
        """Raise `LongStrawError` on all ranks of the context axis unless they were given the same."""
        if self.context.degree == 1:
            return
        mine = torch.stack([digest(tensor).cpu() for given in inputs for tensor in _tensors(given)]).sum(0)
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

    def sum_gradients(self, gradients: Mapping[str, Tensor | None]) -> Mapping[str, Tensor | None]:
        """Every parameter's gradient summed over its copies; the same bits on all ranks."""
        if self._world.degree == 1:
            return gradients
        return sum_gradients(self._parameters, gradients, self._traffic)

    def compare_copies(self) -> None:
        """Raise `LongStrawError` on all ranks if copies of a parameter differ."""
        if self._compares_copies and self._world.degree > 1:
            check_same_parameters([self._parameters], self._world)

    def bytes_sent(self, since: Mapping[str, int] | None = None) -> dict[str, int]:
        """Bytes this rank sent so far, or since an earlier count, by kind."""
        earlier = since or {}
        counted = self._traffic.report().bytes_by_kind
        return {kind: count - earlier.get(kind, 0) for kind, count in counted.items() if count > earlier.get(kind, 0)}


def _tensors(given: Prompt | Trajectory | Response | Tensor) -> list[Tensor]:
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, Prompt):
        return [given.token_ids]
    return [span.token_ids for span in given.spans]
