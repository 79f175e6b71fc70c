"""The tree of a group: prompt at the root, spans as nodes; trajectories with a common beginning share its nodes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from longstraw.records import Response, Span, Trajectory


@dataclass(eq=False)
class SpanNode:
    """One span, shared by every trajectory that has it at this place.

    While a group is replayed it holds the span's current logprobs and entropies, and collects their cotangents from the
    trajectories that run through it.
    """

    span: Span
    parent: SpanNode | None
    children: list[SpanNode] = field(default_factory=list)
    ending: list[int] = field(default_factory=list)  # trajectories whose last span this is
    logprobs_T: Tensor | None = None
    entropies_T: Tensor | None = None
    d_logprobs_T: Tensor | None = None
    d_entropies_T: Tensor | None = None

    def path(self) -> list[SpanNode]:
        """First span of the trajectory first, this one last."""
        return [self] if self.parent is None else [*self.parent.path(), self]

    def trained_path(self) -> list[SpanNode]:
        return [node for node in self.path() if node.span.trained]

    def hold(self, logprobs_T: Tensor, entropies_T: Tensor) -> None:
        self.logprobs_T, self.entropies_T = logprobs_T, entropies_T
        self.d_logprobs_T, self.d_entropies_T = torch.zeros_like(logprobs_T), torch.zeros_like(entropies_T)

    def release(self) -> None:
        """The span was replayed: its numbers are not needed again."""
        self.logprobs_T = self.entropies_T = self.d_logprobs_T = self.d_entropies_T = None

    def has_cotangent(self) -> bool:
        """Whether any trajectory through the span sent a gradient to its own logprobs."""
        if self.d_logprobs_T is None or self.d_entropies_T is None:
            return False
        return bool(self.d_logprobs_T.any()) or bool(self.d_entropies_T.any())


def build_tree(trajectories: Sequence[Trajectory | Response]) -> list[SpanNode]:
    """The children of the prompt. Spans are shared whole: same tokens, kind and temperature after the same spans."""
    roots: list[SpanNode] = []
    for index, trajectory in enumerate(trajectories):
        node: SpanNode | None = None
        for span in trajectory.spans:
            siblings = roots if node is None else node.children
            found = next((sibling for sibling in siblings if _same(sibling.span, span)), None)
            if found is None:
                found = SpanNode(span, node)
                siblings.append(found)
            node = found
        assert node is not None, "a trajectory has at least one span"
        node.ending.append(index)
    return roots


def walk(roots: Sequence[SpanNode]) -> Iterator[SpanNode]:
    """Every node, parents before children."""
    for node in roots:
        yield node
        yield from walk(node.children)


def _same(first: Span, second: Span) -> bool:
    return (
        first.trained == second.trained
        and first.temperature == second.temperature
        and torch.equal(first.token_ids, second.token_ids)
    )
