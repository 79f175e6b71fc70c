"""State in host memory beside state on the device: the same numbers, counted where they are."""

import gc

import pytest
import torch

from longstraw.evidence.memory import MemoryTracker
from longstraw.ops.staging import Passage
from longstraw.state.key_value import KeyValueState
from longstraw.state.latent import LatentState
from longstraw.state.recurrent import Boundary, RecurrentState
from longstraw.state.residency import ON_DEVICE, HostMemory, InHostMemory

CPU = torch.device("cpu")


@pytest.fixture
def host():
    return InHostMemory(CPU, 2**20)


def fetched(run):
    """Keys and values of a run as operators get them."""
    parts = [part for _, part in run.staging.parts(Passage(run.rows(sums=True), len(run)))]
    return [tensor.clone() for tensor in parts[0].tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_and_values_come_back_as_they_were_written(host, dtype):
    states = [KeyValueState(start=5, num_tokens=10, residency=residency) for residency in (ON_DEVICE, host)]
    for num_tokens in (7, 3):
        k, v = torch.randn(2, num_tokens, 4).to(dtype), torch.randn(2, num_tokens, 6).to(dtype)
        for state in states:
            state.write(k, v)
    for state in states:
        state.open_cotangents()
    runs = [state.run(9)[0] for state in states]
    assert [run.start for run in runs] == [5, 5] and [len(run) for run in runs] == [9, 9]
    assert runs[1].staging is host.stage
    for one, other in zip(fetched(runs[1]), fetched(runs[0]), strict=True):
        assert torch.equal(one, other)
    assert states[0].num_bytes == states[1].num_bytes == host.memory.num_bytes


def test_cotangents_of_own_tokens_are_what_was_sent_there(host):
    state = LatentState(start=0, num_tokens=6, residency=host)
    state.write(torch.randn(6, 4), torch.randn(6, 2))
    state.open_cotangents()
    share = torch.randn(3, 4)
    run = state.run()[0]
    run.staging.scatter_add(run.d_key_NKD[:, 0], torch.tensor([1, 5, 1]), share)
    own = state.own_cotangents(1, 4)
    torch.testing.assert_close(own, torch.stack([share[0] + share[2], torch.zeros(4), torch.zeros(4)]))
    own.fill_(7)  # a copy on the device
    assert not (state.own_cotangents(0, 6) == 7).any()


def test_a_window_that_is_a_constant_stays_on_the_device(host):
    state = KeyValueState(start=0, num_tokens=50, keep_tokens=8, residency=host)
    state.write(torch.randn(2, 20, 4), torch.randn(2, 20, 4))
    state.write(torch.randn(2, 5, 4), torch.randn(2, 5, 4))
    assert host.memory.num_bytes == 0 and state.run()[0].staging is ON_DEVICE.staging


def test_only_the_starts_of_a_recurrent_state_leave_the_device(host):
    boundaries = [Boundary(torch.randn(1, 6, 3), torch.randn(1, 2, 4, 4)) for _ in range(3)]
    state = RecurrentState(Boundary(), keep_starts=True, residency=host)
    for boundary in boundaries:
        state.advance(boundary)
    assert state.end is boundaries[2]
    assert state.start(0) == Boundary() or state.start(0).matrix_BHKV is None
    for chunk in (1, 2):
        start = state.start(chunk)
        assert torch.equal(start.matrix_BHKV, boundaries[chunk - 1].matrix_BHKV)
        assert torch.equal(start.conv_tail_BCW, boundaries[chunk - 1].conv_tail_BCW)
        start.matrix_BHKV.zero_()  # a copy: replay may not change the state
        assert torch.equal(state.start(chunk).matrix_BHKV, boundaries[chunk - 1].matrix_BHKV)
    assert host.memory.num_bytes == 2 * boundaries[0].num_bytes
    assert state.num_bytes == 3 * boundaries[0].num_bytes


def test_host_memory_is_counted_until_it_is_freed_and_never_as_the_devices():
    memory = HostMemory(CPU)
    with MemoryTracker() as tracker:
        buffer = memory.empty((100, 4), torch.float32)
        view = buffer[3:5]
        buffer.zero_()
        buffer[:50].copy_(torch.ones(50, 4))
        assert memory.num_bytes == memory.peak_bytes == 1600
        del buffer
        assert memory.num_bytes == 1600  # a view holds it
        copy = view.clone()
        assert tracker.live_bytes == copy.numel() * 4
        del view
        gc.collect()
        assert memory.num_bytes == 0 and memory.peak_bytes == 1600
    assert tracker.peak_bytes <= 50 * 4 * 4


def test_what_is_checked_is_the_complete_state(host):
    state = KeyValueState(start=3, num_tokens=40, residency=host)
    state.write(torch.randn(2, 7, 4), torch.randn(2, 7, 6))
    rows = state.complete_run(constant=False).rows(sums=True)
    assert len(rows) == 40 and [tuple(x.shape) for x in rows.tensors] == [(40, 2, 4), (40, 2, 6)] * 2
    assert state.complete_run(constant=True).rows(sums=True).sums == ()
    latents = LatentState(start=3, num_tokens=40, residency=host)
    latents.write(torch.randn(7, 5), None)
    rows = latents.complete_run(constant=False).rows(sums=True)
    assert [tuple(x.shape) for x in rows.tensors] == [(40, 1, 5)] * 2
