"""Ownership of tokens as tables: every token has one owner, shares are even, zigzag balances the causal triangle."""

from itertools import pairwise

import pytest
from torch import arange, tensor

from longstraw.parallel.ownership import ChunkSplit, NodeSplit, Piece
from longstraw.parallel.work import pairs_by_key_owner, pairs_by_query_owner

DEGREES = range(1, 9)
LENGTHS = range(41)


def all_splits(order):
    return [ChunkSplit(length, degree, order) for degree in DEGREES for length in LENGTHS]


@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
def test_every_token_has_exactly_one_owner(order):
    for split in all_splits(order):
        tokens = [t for pieces in split.pieces for p in pieces for t in range(p.begin, p.end)]
        assert sorted(tokens) == list(range(split.num_tokens)), split
        for rank, pieces in enumerate(split.pieces):
            owned = [t for p in pieces for t in range(p.begin, p.end)]
            assert all(split.owner(t) == rank for t in owned), split
            assert [split.local_index(t) for t in owned] == list(range(len(owned))), split


@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
def test_pieces_ascend_and_are_few(order):
    for split in all_splits(order):
        assert len(split.pieces) == split.degree
        for pieces in split.pieces:
            assert len(pieces) <= (1 if order == "block_cyclic" else 2), split
            assert all(len(p) > 0 for p in pieces), split
            assert all(left.end < right.begin for left, right in pairwise(pieces)), split


@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
def test_shares_differ_by_at_most_one_token(order):
    for split in all_splits(order):
        assert max(split.sizes) - min(split.sizes) <= 1, split
        assert sum(split.sizes) == split.num_tokens
        if split.num_tokens < split.degree:
            assert split.sizes == (1,) * split.num_tokens + (0,) * (split.degree - split.num_tokens), split


def test_zigzag_balances_the_causal_triangle_by_keys_and_by_queries():
    for split in all_splits("zigzag"):
        for work in (
            [pairs_by_query_owner(split, rank, num_before=0) for rank in range(split.degree)],
            [pairs_by_key_owner(split, rank, num_owned_before=0) for rank in range(split.degree)],
        ):
            assert sum(work) == split.num_tokens * (split.num_tokens + 1) // 2, split
            slack = 0 if split.num_tokens % (2 * split.degree) == 0 else 2 * split.num_tokens
            assert max(work) - min(work) <= slack, split
    blocks = ChunkSplit(40, 4, "block_cyclic")
    assert [pairs_by_query_owner(blocks, rank, num_before=0) for rank in range(4)] == [55, 155, 255, 355]


@pytest.mark.parametrize(
    ("num_tokens", "degree", "order", "want"),
    [
        (10, 3, "block_cyclic", [[(0, 4)], [(4, 7)], [(7, 10)]]),
        (10, 3, "zigzag", [[(0, 2), (9, 10)], [(2, 4), (8, 9)], [(4, 8)]]),
        (8, 2, "zigzag", [[(0, 2), (6, 8)], [(2, 6)]]),
        (3, 2, "zigzag", [[(0, 1)], [(1, 3)]]),
        (1, 4, "zigzag", [[(0, 1)], [], [], []]),
        (5, 1, "zigzag", [[(0, 5)]]),
    ],
)
def test_splits_by_hand(num_tokens, degree, order, want):
    split = ChunkSplit(num_tokens, degree, order)
    assert split.pieces == tuple(tuple(Piece(*piece) for piece in pieces) for pieces in want)


@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("degree", [1, 2, 3, 5])
@pytest.mark.parametrize(("num_tokens", "chunk_tokens"), [(1, 4), (7, 4), (8, 4), (45, 16), (0, 4)])
def test_a_node_is_divided_chunk_by_chunk(order, degree, num_tokens, chunk_tokens):
    node = NodeSplit(num_tokens, chunk_tokens, degree, order)
    for num_chunks in range(node.num_chunks + 1):
        begun = node.first_chunks(num_chunks)
        owned = []
        for rank in range(degree):
            positions = begun.positions(rank, start=100)
            assert positions.equal(node.positions(rank, start=100)[: len(positions)])
            assert positions.tolist() == sorted(positions.tolist())
            assert len(positions) == begun.sizes[rank]
            assert all(node.owner(position - 100) == rank for position in positions.tolist())
            owned += positions.tolist()
        assert sorted(owned) == list(range(100, 100 + min(num_chunks * chunk_tokens, num_tokens)))


@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize("degree", DEGREES)
def test_every_token_is_located_where_its_owner_keeps_it(order, degree):
    for num_tokens in LENGTHS:
        for chunk_tokens in (1, 4, 13, 40):
            node = NodeSplit(num_tokens, chunk_tokens, degree, order)
            for rank in range(degree):
                positions = node.positions(rank)
                owners, rows = node.locate(positions)
                assert owners.eq(rank).all(), (node, rank)
                assert rows.equal(arange(len(positions))), (node, rank)


def test_positions_by_hand():
    node = NodeSplit(11, 8, 2, "zigzag")
    assert node.positions(0, start=50).equal(tensor([50, 51, 56, 57, 58]))
    assert node.positions(1, start=50).equal(tensor([52, 53, 54, 55, 59, 60]))
    assert node.first_chunks(1).positions(1, start=50).equal(tensor([52, 53, 54, 55]))


def test_a_token_outside_its_chunk_has_no_owner():
    with pytest.raises(IndexError, match="token 4 of a chunk of 4"):
        ChunkSplit(4, 2).owner(4)


@pytest.mark.parametrize("order", ["block_cyclic", "zigzag"])
@pytest.mark.parametrize(("num_tokens", "chunk_tokens", "degree"), [(45, 16, 2), (7, 16, 3), (64, 8, 4), (33, 5, 1)])
def test_a_window_needs_no_more_than_is_counted(order, num_tokens, chunk_tokens, degree):
    split = NodeSplit(num_tokens, chunk_tokens, degree, order)
    ends = [min(begin + chunk_tokens, num_tokens) for begin in range(0, num_tokens, chunk_tokens)]
    for rank in range(degree):
        owned = set(split.positions(rank).tolist())
        for width in (0, 1, 3, 11, 100):
            counted = [sum(end - width <= token < end for token in owned) for end in ends]
            assert split.most_in_window(rank, width) == max(counted)
