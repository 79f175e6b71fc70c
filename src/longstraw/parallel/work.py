"""Work and traffic of attention on the context axis, counted: what the choice of an exchange rests on.

Pure functions of ints, in the units that `Exchange` counts in, so that a test can compare the two. Bytes are those one
rank sends: a gathered or broadcast block once to each other rank. Partial outputs and cotangents travel in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Literal

from longstraw.parallel.ownership import ChunkSplit, NodeSplit, Order

ExchangeKind = Literal["send_queries", "stream_state"]
WIDE_BYTES = 4


@dataclass(frozen=True)
class AttentionWidths:
    """How wide one layer's attention is, in numbers per token, and the bytes of a number of the model's dtype.

    Grouped-query attention keeps keys and values: `state_width` = 2 * key heads * head width. In absorbed latent
    attention `query_width` = `state_width` = latent + rotary, `value_width` = latent.
    """

    num_heads: int
    query_width: int  # of one head
    value_width: int  # of one head
    state_width: int  # of all key heads, keys and values
    dtype_bytes: int = 2


def pairs_by_key_owner(split: ChunkSplit, rank: int, *, num_owned_before: int) -> int:
    """(query, key) pairs a rank computes under *send queries*: the chunk's queries with the keys it owns."""
    own = sum(_sum_of_range(split.num_tokens - p.end + 1, split.num_tokens - p.begin + 1) for p in split.pieces[rank])
    return split.num_tokens * num_owned_before + own


def pairs_by_query_owner(split: ChunkSplit, rank: int, *, num_before: int) -> int:
    """(query, key) pairs a rank computes under *stream state*: its own queries with every key of the path."""
    return sum(_sum_of_range(num_before + p.begin + 1, num_before + p.end + 1) for p in split.pieces[rank])


def send_queries_bytes(widths: AttentionWidths, split: ChunkSplit, rank: int, *, backward: bool = False) -> int:
    """Bytes a rank sends for one layer of one chunk: queries out, partial results back. The path's length is not in it.

    Backward sends queries, outputs, their cotangents and LSE, and gets the queries' cotangents back.
    """
    others, gathered = split.degree - 1, max(split.sizes)
    foreign = split.num_tokens - split.sizes[rank]
    if backward:
        numbers = widths.query_width + 2 * widths.value_width
        out = gathered * widths.num_heads * (numbers * widths.dtype_bytes + WIDE_BYTES) * others
        return out + foreign * widths.num_heads * widths.query_width * WIDE_BYTES
    out = gathered * widths.num_heads * widths.query_width * widths.dtype_bytes * others
    return out + foreign * widths.num_heads * (widths.value_width + 1) * WIDE_BYTES


def stream_state_bytes(
    widths: AttentionWidths,
    split: ChunkSplit,
    rank: int,
    *,
    num_owned_before: int,
    num_before: int,
    backward: bool = False,
) -> int:
    """Bytes a rank sends for one layer of one chunk: its rows to all others; grows with the path.

    Backward streams the rows again and sends the cotangents of all others' rows to their owners.
    """
    others = split.degree - 1
    rows = (num_owned_before + max(split.sizes)) * widths.state_width * widths.dtype_bytes * others
    if not backward:
        return rows
    foreign = num_before - num_owned_before + split.num_tokens - split.sizes[rank]
    return rows + foreign * widths.state_width * WIDE_BYTES


@dataclass(frozen=True)
class PromptTraffic:
    """Bytes that the busiest rank sends for one layer while a prompt is captured, and while it is pulled back."""

    capture_bytes: int
    pull_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.capture_bytes + self.pull_bytes


def prompt_traffic(
    widths: AttentionWidths,
    kind: ExchangeKind,
    *,
    num_prompt_tokens: int,
    chunk_tokens: int,
    degree: int,
    order: Order = "zigzag",
) -> PromptTraffic:
    """Traffic of one attention layer over all chunks of a prompt."""
    node = NodeSplit(num_prompt_tokens, chunk_tokens, degree, order)
    full = node.chunk(0)
    capture, pull = [0] * degree, [0] * degree
    for index in range(node.num_chunks):
        split = full if (index + 1) * chunk_tokens <= num_prompt_tokens else node.chunk(index)
        for rank in range(degree):
            before = {"num_owned_before": index * full.sizes[rank], "num_before": index * chunk_tokens}
            for sums, backward in ((capture, False), (pull, True)):
                if kind == "send_queries":
                    sums[rank] += send_queries_bytes(widths, split, rank, backward=backward)
                else:
                    sums[rank] += stream_state_bytes(widths, split, rank, **before, backward=backward)
    return PromptTraffic(max(capture), max(pull))


@lru_cache(maxsize=1024)
def cheaper_exchange(widths: AttentionWidths, split: ChunkSplit, num_before: int) -> ExchangeKind:
    """The exchange by which one layer moves fewer bytes for a chunk: two forwards (capture, replay) and a backward.

    A function of the chunk and of the tokens before it only, so all ranks and both forwards choose alike. Bytes are
    those of the busiest rank, with the earlier tokens dealt out evenly; `send_queries` if they are equal.
    """
    num_owned = -(-num_before // split.degree)
    sent = [
        2 * send_queries_bytes(widths, split, rank) + send_queries_bytes(widths, split, rank, backward=True)
        for rank in range(split.degree)
    ]
    stream = partial(stream_state_bytes, widths, split, num_owned_before=num_owned, num_before=num_before)
    streamed = [2 * stream(rank) + stream(rank, backward=True) for rank in range(split.degree)]
    return "stream_state" if max(streamed) < max(sent) else "send_queries"


def _sum_of_range(begin: int, end: int) -> int:
    """begin + (begin + 1) + ... + (end - 1)."""
    return (end - begin) * (begin + end - 1) // 2
