"""What the ranks of a training run settle with one another besides gradients: who writes, who scores, how a run ends.

One process settles nothing, and errors pass through untouched. In a job an error that one rank can see alone is raised
on all of them as `JointError`; the rank where it happened prints its traceback, unless its text says everything.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch.distributed as dist

from longstraw.errors import JointError, LongStrawError
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.topology import Axis, Topology

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes of a training run, as one of them sees the others."""

    topology: Topology = field(default_factory=Topology.single)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the run folder, prints and shows progress."""
        return self.topology.world.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """The items that this rank's context axis works on, dealt out over the data axis; may be empty."""
        return list(items[self.topology.data.rank :: self.topology.data.degree])

    def gather_shares(self, mine: Sequence[T]) -> list[T]:
        """What all ranks of the data axis made of their shares, in the order of the items. Plain values only."""
        shares = _gather(mine, self.topology.data)
        longest = max(map(len, shares))
        return [share[place] for place in range(longest) for share in shares if place < len(share)]

    def gather(self, mine: T) -> list[T]:
        """Everyone's value, in rank order."""
        return _gather(mine, self.topology.world)

    def once(self, compute: Callable[[], T]) -> T:
        """What `compute` returns on the first rank of the context axis, on all of its ranks; they do not run it.

        An error there is a `JointError` on all ranks of the axis.
        """
        axis = self.topology.context
        if self.topology.world.degree == 1:
            return compute()
        answer: list[object] = [None, None]
        if axis.rank == 0:
            try:
                answer = [compute(), None]
            except Exception as error:  # noqa: BLE001 (a user's function: whatever it is, all ranks are told)
                answer = [None, self._sentence(error)]
                _show(error)
        if axis.degree > 1:
            dist.broadcast_object_list(answer, group=axis.group, group_src=0, device=axis.device)
        value, problem = answer
        if problem is not None:
            raise JointError(str(problem))
        return cast(T, value)

    def can_save_after(self, error: Exception) -> bool:
        """Whether all ranks are there to take a checkpoint after an error; after others than `JointError` some wait."""
        return self.topology.world.degree == 1 or isinstance(error, JointError)

    @contextmanager
    def together(self, *errors: type[Exception]) -> Iterator[None]:
        """Errors of these types, raised inside on any rank, are raised on all ranks as they leave the block.

        Inside nothing may wait for a rank that has raised one: errors of one rank alone must be of other types there,
        or come from code without collectives. Collective, at the end of the block.
        """
        if self.topology.world.degree == 1:
            yield
            return
        problem: Exception | None = None
        try:
            yield
        except errors as error:
            problem = error
        mine = None if problem is None else self._sentence(problem)
        try:
            Exchange(self.topology.world).raise_together(mine)
        except JointError as told:
            if problem is not None and str(told) == mine:
                _show(problem)
            raise

    def _sentence(self, error: Exception) -> str:
        if isinstance(error, LongStrawError):
            return str(error)
        notes = "".join(f"; {note}" for note in getattr(error, "__notes__", []))
        return f"rank {self.topology.world.rank}: {type(error).__name__}: {error}{notes}"


def _show(error: Exception) -> None:
    """The traceback of an error whose text does not say everything."""
    if not isinstance(error, LongStrawError):
        traceback.print_exception(error)


def _gather(mine: T, axis: Axis) -> list[T]:
    if axis.degree == 1:
        return [mine]
    everyone: list[T | None] = [None] * axis.degree
    dist.all_gather_object(everyone, mine, group=axis.group)
    return cast("list[T]", everyone)
