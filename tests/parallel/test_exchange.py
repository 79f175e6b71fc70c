"""The collectives with uneven and empty blocks, their dtypes, what they count, and errors that all ranks agree on."""

import pytest
import torch

from longstraw.errors import LongStrawError
from longstraw.parallel.exchange import Exchange, Traffic
from longstraw.parallel.topology import Axis


def fresh(world):
    return Exchange(world.axis)


def total(world):
    return world.traffic.report().total_bytes


def gathers_uneven_blocks(world, sizes, dtype):
    world = fresh(world)
    blocks = [(torch.randn(3, size, 2) * 9).to(dtype) for size in sizes]
    got = world.all_gather_tokens(blocks[world.rank], sizes, dim=1, kind="x")
    assert all(mine.equal(block) for mine, block in zip(got, blocks, strict=True))
    return total(world)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 0, 1), (0, 0, 5), (0, 0, 0)])
def test_all_gather_takes_uneven_and_empty_blocks(ranks, sizes, dtype):
    widest = max(sizes) * 3 * 2 * dtype.itemsize
    assert ranks(3).run(gathers_uneven_blocks, sizes, dtype) == [2 * widest] * 3


def sends_back(world, sizes):
    world = fresh(world)
    blocks = [torch.full((2, size, 3), 10.0 * world.rank + s) for s, size in enumerate(sizes)]
    got = world.send_back(blocks, kind="x")
    for source, block in enumerate(got):
        assert block.equal(torch.full((2, sizes[world.rank], 3), 10.0 * source + world.rank))
    return total(world)


@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 0, 1), (0, 0, 5)])
def test_send_back_delivers_what_was_computed_for_a_rank(ranks, sizes):
    sent = ranks(3).run(sends_back, sizes)
    assert sent == [(sum(sizes) - size) * 2 * 3 * 4 for size in sizes]


def sums_half_precision(world):
    world = fresh(world)
    small = torch.tensor([1.0, 2.0**-9], dtype=torch.bfloat16)
    got = world.all_reduce_sum(small, kind="x")
    assert got.dtype == torch.float32
    assert got.tolist() == [world.degree, world.degree * 2.0**-9]
    assert small.tolist() == [1.0, 2.0**-9]
    mixed = world.all_reduce_sum(torch.tensor(256.0 if world.rank == 0 else 1.0, dtype=torch.bfloat16), kind="x")
    assert mixed.item() == 256 + world.degree - 1  # bfloat16 would have lost the ones
    assert world.all_reduce_sum(torch.tensor([2**40]), kind="x").tolist() == [world.degree * 2**40]
    return total(world)


def test_sums_are_made_in_float32_and_integers_stay_exact(ranks):
    assert ranks(2).run(sums_half_precision) == [2 * 4 + 4 + 8] * 2


def streams_and_reduces(world, num_rows):
    world = fresh(world)
    sent = []
    for owner in range(world.degree):
        rows = torch.full((num_rows, 4), float(owner)) if world.rank == owner else torch.empty(num_rows, 4)
        arrived = world.start_broadcast(rows, owner, kind="down").wait()
        assert arrived.equal(torch.full((num_rows, 4), float(owner)))
        reduced = world.reduce_to_owner(arrived + world.rank, owner, kind="up")
        assert (reduced is None) == (world.rank != owner)
        if reduced is not None:
            want = sum(owner + rank for rank in range(world.degree))
            assert reduced.equal(torch.full((num_rows, 4), float(want)))
        sent.append(world.traffic.report().bytes_by_kind)
    return dict(sent[-1])


@pytest.mark.parametrize("num_rows", [0, 1, 5])
def test_a_slice_streams_from_its_owner_and_its_cotangent_returns(ranks, num_rows):
    num_bytes = num_rows * 4 * 4
    want = {"down": 2 * num_bytes, "up": 2 * num_bytes} if num_rows else {}
    assert ranks(3).run(streams_and_reduces, num_rows) == [want] * 3


def agrees(world, failing):
    message = f"rank {world.rank} broke – it said so" if world.rank in failing else None
    try:
        world.raise_together(message)
    except LongStrawError as error:
        return str(error)
    return None


@pytest.mark.parametrize("failing", [(), (0,), (2,), (1, 2)])
def test_an_error_on_one_rank_is_raised_on_all(ranks, failing):
    want = f"rank {failing[0]} broke – it said so" if failing else None
    assert ranks(3).run(agrees, failing) == [want] * 3


def test_an_axis_of_one_rank_communicates_nothing():
    alone = Exchange(Axis(), Traffic())
    x = torch.randn(3, 2)
    assert alone.all_gather_tokens(x, [3], dim=0, kind="x") == [x]
    assert alone.send_back([x], kind="x") == [x]
    assert alone.all_reduce_sum(x, kind="x").equal(x)
    assert alone.start_broadcast(x, 0, kind="x").wait() is x
    assert alone.reduce_to_owner(x, 0, kind="x") is x
    with pytest.raises(LongStrawError, match="only one"):
        alone.raise_together("only one")
    assert alone.traffic.report().total_bytes == 0
