"""What every stage runs with, and which tokens of a chunk this process runs.

On a context axis token ids are known to every rank; a rank runs its share of each chunk through the layers and keeps
the state of those tokens. One process has all tokens of every chunk.

Shape suffixes: T tokens of a share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from longstraw.execution.progress import Stopwatch
from longstraw.models.decoder import Decoder
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.ownership import ChunkSplit, NodeSplit, Order
from longstraw.parallel.topology import Axis
from longstraw.state.node import Chunk, NodeState, Reader
from longstraw.state.residency import ON_DEVICE, Residency


@dataclass(frozen=True)
class Runner:
    """Decoder, chunk size, where prompts' state lives, the context axis, and who is told of progress."""

    decoder: Decoder
    chunk_tokens: int
    graph_scope: str
    residency: Residency
    watch: Stopwatch
    context: Exchange = field(default_factory=lambda: Exchange(Axis()))
    order: Order = "zigzag"

    def new_node(self, token_ids: Tensor, parent: NodeState | None, *, constant: bool) -> NodeState:
        split = self.node_split(len(token_ids))
        rank = self.context.rank
        return NodeState(
            token_ids.to(self.decoder.device),
            parent,
            chunk_tokens=self.chunk_tokens,
            num_own_tokens=[split.chunk(index).sizes[rank] for index in range(split.num_chunks)],
            own_in_window=cache(partial(split.most_in_window, rank)),
            kinds=self.decoder.kinds,
            constant=constant,
            residency=self.residency if parent is None else ON_DEVICE,
        )

    @property
    def is_divided(self) -> bool:
        """Whether other ranks run other tokens of every chunk."""
        return self.context.degree > 1

    def node_split(self, num_tokens: int) -> NodeSplit:
        """How so many tokens of a node are divided over the context axis."""
        return NodeSplit(num_tokens, self.chunk_tokens, self.context.degree, self.order)

    def split(self, chunk: Chunk) -> ChunkSplit:
        """How a chunk's tokens are."""
        return ChunkSplit(chunk.num_tokens, self.context.degree, self.order)

    def owns_last(self, node: NodeState) -> bool:
        """Whether this rank ran the node's last token, whose hidden state predicts what follows."""
        return self.last_owner(node) == self.context.rank

    def last_owner(self, node: NodeState) -> int:
        """The rank that ran the node's last token."""
        last = node.chunks[-1]
        return self.split(last).owner(last.num_tokens - 1)

    def as_on_first_rank(self, tensor: Tensor) -> Tensor:
        """What the first rank of the context axis has, on all of them; of one process, itself.

        Ranks that compute the same may round differently (other ranks' tokens beside theirs in a product), and a
        sampled token must be the same everywhere.
        """
        if not self.is_divided:
            return tensor
        return self.context.start_broadcast(tensor.contiguous(), 0, kind="samples").wait()

    def sum_over_context(self, share: Tensor, *, kind: str) -> Tensor:
        """The sum of what the ranks of the context axis have; of one process, itself."""
        return self.context.all_reduce_sum(share, kind=kind) if self.is_divided else share

    def plan(self, node: NodeState, layers: Iterable[int], chunk: Chunk, reader: Reader) -> None:
        """Let state in host memory look ahead. Exchanges between ranks fetch as they go."""
        if not self.is_divided:
            node.plan(layers, chunk, reader)

    def tokens_to_run(self, node: NodeState, chunk: Chunk) -> Tensor:
        """`own_tokens`, or where this rank has none the node's first: stock layers want a token.

        The seams leave this stand-in out, its output is never read and its cotangent is zero.
        """
        tokens = self.own_tokens(node, chunk)
        return tokens if len(tokens) > 0 else tokens.new_zeros(1)

    def own_tokens(self, node: NodeState, chunk: Chunk) -> Tensor:
        """Which of the node's tokens this rank runs of a chunk: int64 `[T]` on the model's device, ascending."""
        pieces = self.split(chunk).pieces[self.context.rank]
        ranges = [
            torch.arange(chunk.begin + p.begin, chunk.begin + p.end, device=node.token_ids.device) for p in pieces
        ]
        if len(ranges) == 1:
            return ranges[0]
        return torch.cat(ranges) if ranges else node.token_ids.new_empty(0)
