"""Rows fetched through a stage against rows that are on the device: the same values, sums and pieces, in little memory.

On a CPU the "device" is a second place in memory: fetching copies into a slot. Slots are poisoned with NaN when their
reader is done, so that late reads and unordered copies show.
"""

import pytest
import torch

from longstraw.errors import InputError
from longstraw.evidence.memory import MemoryTracker
from longstraw.ops import attention
from longstraw.ops.attention import ChunkAttention, ChunkKeys, KeyRun
from longstraw.ops.staging import VIEWS, Passage, Rows, Stage

CPU = torch.device("cpu")
LARGE = 2**20


class Poisoned(Stage):
    """A stage that logs its fetches and spoils what was read."""

    def __init__(self, staging_bytes):
        self.log = []
        super().__init__(CPU, staging_bytes, on_fetch=lambda fetch: self.log.append(fetch.source))

    def _leave(self, fetch):
        super()._leave(fetch)
        for tensor in fetch.staged.tensors:
            tensor.fill_(float("nan"))


def random_rows(num_rows, *, sums=False, width=5):
    read = torch.randn(num_rows, 2, width), torch.randn(num_rows, 3)
    return Rows(read, (torch.randn(num_rows, 2, width),) if sums else ())


def first_rows(stage, *rows):
    """Which rows, by the first index of their first tensor, were fetched in which order."""
    names = {}
    for number, layer in enumerate(rows):
        base = layer.tensors[0].data_ptr()
        names |= {base + 4 * i * layer.tensors[0].stride(0): (number, i) for i in range(len(layer))}
    return [names[fetched.tensors[0].data_ptr()] for fetched in stage.log]


@pytest.mark.parametrize("num_rows", [1, 7, 63, 64, 65])
@pytest.mark.parametrize("piece", [1, 5, 64])
@pytest.mark.parametrize("pieces_per_slot", [1, 2, 100])
def test_parts_hold_every_row_once_and_begin_at_pieces(num_rows, piece, pieces_per_slot):
    rows = random_rows(num_rows)
    stage = Poisoned(2 * rows.num_bytes(piece * pieces_per_slot))
    seen = []
    for begin, part in stage.parts(Passage(rows, piece)):
        assert begin % piece == 0 and begin == sum(len(x[0]) for x in seen)
        seen.append([tensor.clone() for tensor in part.read])
    for tensor, parts in zip(rows.read, zip(*seen, strict=True), strict=True):
        torch.testing.assert_close(torch.cat(parts), tensor, rtol=0, atol=0)


@pytest.mark.parametrize("staging", ["one piece", "all"])
def test_what_is_added_to_sums_reaches_their_owner_before_they_are_fetched_again(staging):
    rows = random_rows(23, sums=True)
    want = rows.sums[0].clone()
    stage = Poisoned(2 * rows.num_bytes(4 if staging == "one piece" else 23))
    for _ in range(3):
        for begin, part in stage.parts(Passage(rows, 4)):
            share = part.read[0] * (begin + 1)
            part.sums[0].add_(share)
            want[begin : begin + len(part)].add_(share)
    torch.testing.assert_close(rows.sums[0], want, rtol=0, atol=0)


def test_a_part_is_left_alone_while_the_next_is_fetched():
    rows = random_rows(20)
    stage = Poisoned(2 * rows.num_bytes(3))
    stage.plan([Passage(rows, 3), Passage(random_rows(20), 3)])
    for begin, part in stage.parts(Passage(rows, 3)):
        torch.testing.assert_close(part.read[0], rows.read[0][begin : begin + 3], rtol=0, atol=0)


def test_whole_layers_are_fetched_one_ahead():
    layers = [random_rows(10) for _ in range(3)]
    stage = Poisoned(2 * layers[0].num_bytes(10))
    stage.plan([Passage(layer, 4) for layer in layers])
    assert first_rows(stage, *layers) == [(0, 0)]  # before anyone asks
    for number, layer in enumerate(layers):
        for _ in stage.parts(Passage(layer, 4)):
            assert first_rows(stage, *layers) == [(i, 0) for i in range(min(number + 2, 3))]


def test_slices_are_fetched_one_ahead_and_the_next_layer_after_the_last():
    layers = [random_rows(10) for _ in range(2)]
    stage = Poisoned(2 * layers[0].num_bytes(4))
    stage.plan([Passage(layer, 4) for layer in layers])
    order = [(number, begin) for number in range(2) for begin in (0, 4, 8)]
    read = 0
    for layer in layers:
        for _ in stage.parts(Passage(layer, 4)):
            read += 1
            assert first_rows(stage, *layers) == order[: read + 1]


def test_a_plan_is_a_hint_and_nothing_else():
    planned, other = random_rows(9), random_rows(9)
    stage = Poisoned(2 * planned.num_bytes(4))
    stage.plan([Passage(planned, 4), Passage(planned, 4)])
    for rows in (other, planned, other):
        for begin, part in stage.parts(Passage(rows, 4)):
            torch.testing.assert_close(part.read[1], rows.read[1][begin : begin + 4], rtol=0, atol=0)


def test_sums_go_home_even_if_the_plan_was_to_read_them_only():
    a, b = torch.randn(9, 4), torch.randn(9, 4)
    want = b + 1
    stage = Poisoned(2 * Rows((a, b)).num_bytes(9))
    stage.plan([Passage(Rows((a, b)), 9)])
    for _, part in stage.parts(Passage(Rows((a,), (b,)), 9)):
        part.sums[0].add_(1)
    assert torch.equal(b, want)


def test_a_pass_broken_off_by_an_error_leaves_the_stage_usable():
    rows = random_rows(9)
    stage = Poisoned(2 * rows.num_bytes(2))
    broken = stage.parts(Passage(rows, 2))
    next(broken)
    stage.plan([Passage(rows, 2)])
    got = [part.read[0].clone() for _, part in stage.parts(Passage(rows, 2))]
    torch.testing.assert_close(torch.cat(got), rows.read[0], rtol=0, atol=0)


@pytest.mark.parametrize("staging", ["one piece", "whole layer"])
def test_no_more_than_staging_bytes_are_on_the_device(staging):
    layers = [random_rows(50, sums=True) for _ in range(3)]
    staging_bytes = 2 * layers[0].num_bytes(7 if staging == "one piece" else 50)
    with MemoryTracker() as tracker:
        stage = Stage(CPU, staging_bytes)
        stage.plan([Passage(layer, 7) for layer in layers])
        for layer in layers:
            for num_rows in (20, 50):
                live = [tracker.live_bytes for _ in stage.parts(Passage(layer.cut(0, num_rows), 7))]
                assert max(live) <= staging_bytes
        assert 0 < tracker.peak_bytes <= staging_bytes
        stage.rest()
        assert tracker.live_bytes == 0


def test_too_little_staging_is_refused_with_the_number_that_is_enough():
    rows = random_rows(50)
    with pytest.raises(InputError, match="staging_bytes is 100, but two pieces of 7 tokens") as refusal:
        list(Stage(CPU, 100).parts(Passage(rows, 7)))
    needed_bytes = 2 * rows.num_bytes(7)
    assert f"take {needed_bytes:,};" in str(refusal.value)
    with pytest.raises(InputError):
        list(Stage(CPU, needed_bytes - 1).parts(Passage(rows, 7)))
    assert len(list(Stage(CPU, needed_bytes).parts(Passage(rows, 7)))) == 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows_per_slot", [1, 3, 100])
def test_gathered_rows_and_scattered_shares_are_those_of_views(dtype, rows_per_slot):
    state, total = torch.randn(17, 32, dtype=dtype), torch.randn(17, 32)
    index = torch.randint(2, 15, (40,))
    share = torch.randn(40, 32)
    want = total.clone()
    VIEWS.scatter_add(want, index, share)
    stage = Poisoned(2 * Rows((total,)).num_bytes(rows_per_slot))
    torch.testing.assert_close(stage.gather(state, index), VIEWS.gather(state, index), rtol=0, atol=0)
    stage.scatter_add(total, index, share)
    torch.testing.assert_close(total, want, rtol=0, atol=0)


def test_a_row_named_often_travels_once():
    stage = Poisoned(LARGE)
    stage.gather(torch.randn(100, 8), torch.tensor([7, 3, 7, 7, 99]))
    assert [len(fetched) for fetched in stage.log] == [3]


def attention_results(staging, *, window, latent, dtype):
    torch.manual_seed(0)
    runs, start = [], 0
    for number, length in enumerate((23, 4)):
        k = torch.randn(length, 1 if latent else 2, 8, dtype=dtype)
        v = k if latent else torch.randn(length, 2, 8, dtype=dtype)
        d_k = torch.randn(k.shape)
        d_v = d_k if latent else torch.randn(v.shape)
        runs.append(KeyRun(k, v, start, d_k, d_v, VIEWS if number else staging))
        start += length
    q = torch.randn(4, 9, 8, dtype=dtype, requires_grad=True)
    k, v = (torch.randn(runs[0].key_NKD.shape[1], 9, 8, dtype=dtype, requires_grad=True) for _ in range(2))
    keys = ChunkKeys(runs, start, 0.3, 5, window)
    out, lse = ChunkAttention.apply(q, k, v, None, keys)
    out.sum().backward()
    return [out, lse, q.grad, k.grad, v.grad, *(x for run in runs for x in (run.d_key_NKD, run.d_value_NKD))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("window", [None, 1, 6, 20, 100])
@pytest.mark.parametrize("staging_bytes", [2 * 5 * 2 * 8 * 16 + 2048, LARGE])
def test_attention_over_a_staged_extent_is_bit_equal(monkeypatch, dtype, latent, window, staging_bytes):
    monkeypatch.setattr(attention, "KEYS_PER_FORWARD_CALL", 7)
    monkeypatch.setattr(attention, "QUERIES_PER_WINDOW_CALL", 4)
    stage = Poisoned(max(staging_bytes, 19 * 384 * 2 if window == 20 else 0))
    want = attention_results(VIEWS, window=window, latent=latent, dtype=dtype)
    got = attention_results(stage, window=window, latent=latent, dtype=dtype)
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)
    if window != 1:  # which sees nothing earlier
        assert {len(fetched.read) for fetched in stage.log} == {1 if latent else 2}


@pytest.mark.parametrize("window", [None, 6])
def test_attention_announces_what_it_passes_over(monkeypatch, window):
    monkeypatch.setattr(attention, "KEYS_PER_FORWARD_CALL", 7)
    run = KeyRun(*(torch.randn(23, 2, 8) for _ in range(2)), 0, *(torch.zeros(23, 2, 8) for _ in range(2)))
    stage = Poisoned(2 * run.rows(sums=True).num_bytes(5))
    on_device = KeyRun(run.key_NKD, run.value_NKD, 23)
    run = KeyRun(run.key_NKD, run.value_NKD, 0, run.d_key_NKD, run.d_value_NKD, stage)
    q = torch.randn(4, 9, 8, requires_grad=True)
    k, v = (torch.randn(2, 9, 8) for _ in range(2))
    keys = ChunkKeys([run] if window else [run, on_device], 23 if window else 46, 0.3, 5, window)
    stage.plan([*keys.passages(9, backward=False, staging=stage), *keys.passages(9, backward=True, staging=stage)])
    out, _ = ChunkAttention.apply(q, k, v, None, keys)
    out.sum().backward()
    fetched = [(rows.read[0].data_ptr(), len(rows.sums)) for rows in stage.log]
    assert len(fetched) == len(set(fetched)), "a fetch that was looked ahead for was not used"
    assert {num_sums for _, num_sums in fetched} == {0, 2}


@pytest.mark.gpu
def test_copies_on_a_stream_of_their_own_arrive_in_time():
    device = torch.device("cuda")
    rows = Rows(tuple(torch.randn(4096, 256).pin_memory() for _ in range(2)), (torch.zeros(4096, 256).pin_memory(),))
    stage = Stage(device, 2 * rows.num_bytes(256))
    load = torch.randn(2048, 2048, device=device)
    want = torch.zeros(4096, 256)
    for _ in range(3):
        for begin, part in stage.parts(Passage(rows, 64)):
            for _ in range(4):  # keeps the device busy while the host runs ahead
                load = (load @ load).clamp_(-1, 1)
            part.sums[0].add_(part.read[0] * 2 + part.read[1])
            assert part.read[0].device.type == "cuda"
            chunk = slice(begin, begin + len(part))
            want[chunk] += rows.read[0][chunk] * 2 + rows.read[1][chunk]
    stage.copies.finish()
    torch.testing.assert_close(rows.sums[0], want, rtol=0, atol=1e-5)
    stage.rest()
