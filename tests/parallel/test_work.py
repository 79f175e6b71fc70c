"""Counted work and traffic against numbers worked out by hand."""

from operator import attrgetter

import pytest

from longstraw.parallel.ownership import ChunkSplit
from longstraw.parallel.work import (
    AttentionWidths,
    cheaper_exchange,
    pairs_by_key_owner,
    pairs_by_query_owner,
    prompt_traffic,
    send_queries_bytes,
    stream_state_bytes,
)

SMALL = AttentionWidths(num_heads=2, query_width=8, value_width=8, state_width=16, dtype_bytes=2)
GLM_LATENT = AttentionWidths(num_heads=64, query_width=576, value_width=512, state_width=576)
QWEN_KEY_VALUE = AttentionWidths(num_heads=24, query_width=256, value_width=256, state_width=2048)
LONG = 2_097_152
CAPTURE, PULL = attrgetter("capture_bytes"), attrgetter("pull_bytes")


def test_pairs_of_both_exchanges_cover_the_triangle_once():
    split = ChunkSplit(10, 3)
    # Rank 0 owns tokens 0, 1 and 9 of the chunk; before it there are 30 tokens, 10 of them its own.
    assert pairs_by_query_owner(split, 0, num_before=30) == 31 + 32 + 40
    assert pairs_by_key_owner(split, 0, num_owned_before=10) == 10 * 10 + (10 + 9 + 1)
    total = 10 * 30 + 55
    assert sum(pairs_by_query_owner(split, rank, num_before=30) for rank in range(3)) == total
    assert sum(pairs_by_key_owner(split, rank, num_owned_before=10) for rank in range(3)) == total


def test_bytes_of_sent_queries_by_hand():
    split = ChunkSplit(8, 2)
    # 4 tokens x 2 heads x 8 numbers of 2 bytes to one other rank; 4 foreign tokens x 2 heads x (8 + LSE) of 4 bytes.
    assert send_queries_bytes(SMALL, split, 0) == 128 + 288
    # Queries, outputs, cotangents and LSE out; the queries' cotangents back.
    assert send_queries_bytes(SMALL, split, 0, backward=True) == 4 * 2 * (24 * 2 + 4) + 4 * 2 * 8 * 4


def test_bytes_of_streamed_state_by_hand():
    split = ChunkSplit(8, 2)
    sizes = dict(num_owned_before=50, num_before=100)
    assert stream_state_bytes(SMALL, split, 0, **sizes) == (50 + 4) * 16 * 2
    assert stream_state_bytes(SMALL, split, 0, **sizes, backward=True) == (50 + 4) * 16 * 2 + (50 + 4) * 16 * 4


def test_one_rank_sends_nothing():
    split = ChunkSplit(8, 1)
    for backward in (False, True):
        assert send_queries_bytes(SMALL, split, 0, backward=backward) == 0
        sent = stream_state_bytes(SMALL, split, 0, num_owned_before=100, num_before=100, backward=backward)
        assert sent == 0


def test_sent_queries_do_not_depend_on_the_prompt_and_streamed_state_does():
    per_chunk = [
        [
            prompt_traffic(SMALL, kind, num_prompt_tokens=64 * n, chunk_tokens=64, degree=4).total_bytes / n
            for n in (1, 8)
        ]
        for kind in ("send_queries", "stream_state")
    ]
    assert per_chunk[0][0] == per_chunk[0][1]
    assert per_chunk[1][1] > 3 * per_chunk[1][0]


def ratio_of_streaming(chunk_tokens, part):
    settings = dict(num_prompt_tokens=LONG, chunk_tokens=chunk_tokens, degree=32)
    sent, streamed = (prompt_traffic(GLM_LATENT, kind, **settings) for kind in ("send_queries", "stream_state"))
    return part(streamed) / part(sent)


def test_streaming_latents_pays_when_each_rank_has_a_whole_chunk_of_queries():
    """Section 7's eighth holds at 4,096 tokens a rank, for the last chunk; with 4,096 a chunk sending is cheaper."""
    assert ratio_of_streaming(32 * 4096, CAPTURE) == pytest.approx(1 / 21, rel=0.01)
    assert ratio_of_streaming(32 * 4096, PULL) == pytest.approx(1 / 12, rel=0.01)
    assert ratio_of_streaming(4096, CAPTURE) == pytest.approx(1.44, rel=0.01)
    assert ratio_of_streaming(4096, PULL) == pytest.approx(2.51, rel=0.01)
    split = ChunkSplit(32 * 4096, 32)
    last = stream_state_bytes(GLM_LATENT, split, 0, num_owned_before=LONG // 32 - 4096, num_before=LONG - 32 * 4096)
    assert last / send_queries_bytes(GLM_LATENT, split, 0) == pytest.approx(0.0899, abs=1e-4)
    in_half_precision = 31 * 4096 * 64 * (576 + 512) * 2
    assert last / in_half_precision == pytest.approx(1 / 7.6, rel=0.01)


def test_the_cheaper_exchange_is_chosen():
    """Latents stream while the path is short beside the chunk; then a chunk's queries are less than the path."""
    assert cheaper_exchange(GLM_LATENT, ChunkSplit(32 * 4096, 32), LONG) == "stream_state"
    assert cheaper_exchange(GLM_LATENT, ChunkSplit(4096, 32), 4 * 4096) == "stream_state"
    assert cheaper_exchange(GLM_LATENT, ChunkSplit(4096, 32), LONG) == "send_queries"
    assert cheaper_exchange(QWEN_KEY_VALUE, ChunkSplit(8 * 4096, 8), LONG) == "send_queries"


@pytest.mark.parametrize("split", [ChunkSplit(10, 2), ChunkSplit(5, 3), ChunkSplit(7, 3)], ids=str)
def test_the_choice_changes_where_the_counted_bytes_cross(split):
    def total(num_before, send):
        busiest = []
        for rank in range(split.degree):
            before = dict(num_owned_before=-(-num_before // split.degree), num_before=num_before)
            parts = [
                send_queries_bytes(SMALL, split, rank, backward=backward)
                if send
                else stream_state_bytes(SMALL, split, rank, **before, backward=backward)
                for backward in (False, False, True)
            ]
            busiest.append(sum(parts))
        return max(busiest)

    chosen = [cheaper_exchange(SMALL, split, num_before) for num_before in range(60)]
    assert chosen == ["stream_state" if total(n, False) < total(n, True) else "send_queries" for n in range(60)]
    assert len(set(chosen)) == 2
