import gc

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from longstraw.errors import InputError
from longstraw.evidence.memory import MemoryTracker, StageProgress
from longstraw.execution.engine import Engine
from longstraw.records import Prompt
from tiny import random_ids, tiny_model

F32 = 4


def test_counts_a_tensor_from_its_making_to_its_death():
    with MemoryTracker() as tracker:
        a = torch.ones(7, 63)
        assert tracker.live_bytes == 7 * 63 * F32
        b = a.to(torch.bfloat16)
        assert tracker.live_bytes == 7 * 63 * (F32 + 2)
        del a
        assert tracker.live_bytes == 7 * 63 * 2
        torch.ones(1)
        del b
    assert tracker.live_bytes == 0
    assert tracker.peak_bytes == 7 * 63 * (F32 + 2)


def test_a_view_keeps_the_bytes_of_its_whole_base():
    with MemoryTracker() as tracker:
        base = torch.zeros(65, 3)
        row = base[4].detach().unsqueeze(0)
        assert tracker.live_bytes == 65 * 3 * F32
        del base
        assert tracker.live_bytes == 65 * 3 * F32
        del row
        assert tracker.live_bytes == 0


def test_operators_that_write_into_a_tensor_add_nothing():
    before = torch.zeros(5, 5)
    with MemoryTracker() as tracker:
        made = torch.zeros(5, 5)
        made.add_(1).mul_(2)
        torch.add(made, 1, out=made)
        before.add_(made)
        torch._foreach_add_([before, made], 1.0)
        made[1:3].copy_(before[1:3])
        assert tracker.peak_bytes == 25 * F32


@pytest.mark.parametrize("made_inside", [True, False])
def test_growth_and_shrinking_of_a_storage_are_counted(made_inside):
    outside = torch.zeros(3)
    with MemoryTracker() as tracker:
        target = torch.zeros(3) if made_inside else outside
        first = 3 * F32 if made_inside else 0
        target.resize_(100)
        assert tracker.live_bytes == first + 97 * F32
        target.resize_(0)
        torch.add(torch.ones(1000), 1, out=target)
        assert tracker.live_bytes == first + 997 * F32
        target.set_(torch.zeros(2))
        assert tracker.live_bytes == 2 * F32


def test_tensors_from_before_and_their_views_do_not_count_until_watched():
    weight = torch.nn.Parameter(torch.randn(11, 13))
    with MemoryTracker() as tracker:
        views = [weight.t(), weight.view(-1), weight.detach().expand(4, 11, 13), weight.reshape(13, 11)]
        assert tracker.peak_bytes == 0
        tracker.watch([weight, *views])
        tracker.watch([weight.t()])
        assert tracker.live_bytes == tracker.peak_bytes == 11 * 13 * F32
        del weight, views
        assert tracker.live_bytes == 0


def test_tensors_held_and_freed_by_autograd_nodes_are_counted():
    with MemoryTracker() as tracker:
        x = torch.zeros(101, requires_grad=True)
        loss = x.exp().sin().sum()  # exp keeps its output, sin its input: the same storage; sin's output is freed
        assert tracker.live_bytes == 2 * 101 * F32 + F32
        loss.backward()
        assert tracker.live_bytes == 2 * 101 * F32 + F32  # exp's output went, the gradient came
        del loss, x
        gc.collect()
        assert tracker.live_bytes == 0


class _Doubled(torch.autograd.Function):
    """Keeps a scratch tensor from forward to backward, where it makes another one."""

    @staticmethod
    def forward(ctx, x):
        ctx.scratch = torch.ones(50)
        return x * 2

    @staticmethod
    def backward(ctx, d_out):
        scratch = torch.ones(1000)
        return d_out * 2 + 0 * scratch[0]


def test_custom_autograd_functions_are_counted_in_both_directions():
    with MemoryTracker() as tracker:
        x = torch.zeros(10, requires_grad=True)
        out = _Doubled.apply(x)
        assert tracker.live_bytes == (10 + 50 + 10) * F32
        with tracker.stage("backward"):
            out.backward(torch.ones(10))
        assert tracker.stage_peak_bytes["backward"] >= (10 + 50 + 10 + 10 + 1000) * F32
        assert tracker.largest(1)[0].shape == (1000,)
        assert tracker.largest(1)[0].stage == "backward"


def _step(model, x):
    hidden = checkpoint(model[0], x, use_reentrant=False)
    loss = model[1](hidden.tanh()).float().square().sum()
    loss.backward()


def _small_model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(63, 65), torch.nn.Linear(65, 1))


def test_live_bytes_equal_the_allocations_the_profiler_sees():
    model, x = _small_model(), torch.randn(7, 63)
    _step(model, x)
    model.zero_grad(set_to_none=True)
    gc.collect()
    with MemoryTracker() as tracker, profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        _step(model, x)
        kept = model[0](x)
    events = profiler.events()
    allocated = sum(event.cpu_memory_usage for event in events if event.name == "[memory]")
    top_level = sum(event.self_cpu_memory_usage for event in events if event.name != "[memory]")
    assert tracker.live_bytes == allocated + top_level
    assert tracker.live_bytes == kept.untyped_storage().nbytes() + sum(p.numel() * F32 for p in model.parameters())


def test_the_count_is_the_same_in_every_run():
    reports = []
    for _ in range(3):
        model, x = _small_model(), torch.randn(7, 63)
        with MemoryTracker() as tracker:
            _step(model, x)
            reports.append(tracker.report())
    assert reports[0] == reports[1] == reports[2]


def test_tracking_changes_no_gradient():
    gradients = []
    for tracked in (False, True):
        model, x = _small_model(), torch.linspace(-1, 1, 7 * 63).view(7, 63)
        if tracked:
            with MemoryTracker():
                _step(model, x)
        else:
            _step(model, x)
        gradients.append(model[0].weight.grad)
    assert torch.equal(*gradients)


def test_a_stage_peak_counts_all_that_lives_in_it_and_outer_stages_include_inner_ones():
    with MemoryTracker() as tracker:
        kept = torch.zeros(10)
        with tracker.stage("outer"):
            torch.zeros(20)
            with tracker.stage("inner"):
                torch.zeros(100)
            torch.zeros(5)
            with tracker.stage("inner"):
                pass
        torch.zeros(300)
        with tracker.stage("later"):
            pass
        assert tracker.stage_peak_bytes == {"outer": 110 * F32, "inner": 110 * F32, "later": 10 * F32}
        assert tracker.peak_bytes == 310 * F32
        assert [record.stage for record in tracker.largest(3)] == ["", "inner", "outer"]
    assert kept.numel() == 10


def test_a_stage_ends_when_its_block_raises():
    with MemoryTracker() as tracker:
        with pytest.raises(RuntimeError, match="boom"), tracker.stage("capture"):
            raise RuntimeError("boom")
        torch.zeros(9)
    assert tracker.stage_peak_bytes == {"capture": 0}


def test_the_largest_records_survive_thousands_of_small_ones():
    seen = []
    with MemoryTracker(on_tensor=seen.append) as tracker:
        torch.zeros(77, 1000)
        for size in (*range(500, 1000), *range(499, 0, -1)):
            torch.zeros(size)
        torch.zeros(3, 2000, dtype=torch.float64)
    assert [record.shape for record in tracker.largest(3)] == [(77, 1000), (3, 2000), (999,)]
    assert len(tracker.largest(1000)) <= 64
    assert len(seen) == 1001


def test_a_forbidden_shape_stops_the_line_that_makes_it():
    def refuse(record):
        assert record.shape[0] != 4096, f"{record.operator} made a tensor of {record.shape}"

    with MemoryTracker(on_tensor=refuse):
        torch.zeros(4095, 2)
        with pytest.raises(AssertionError, match=r"aten.zeros.default made a tensor of \(4096, 2\)"):
            torch.zeros(4096, 2)


def test_what_is_freed_after_the_block_is_still_subtracted():
    with MemoryTracker() as tracker:
        a = torch.zeros(10)
    b = torch.zeros(1000)
    assert tracker.live_bytes == 10 * F32
    del a, b
    assert tracker.live_bytes == 0
    with tracker:
        torch.zeros(20)
    assert tracker.peak_bytes == 20 * F32


def test_a_stage_without_a_name_is_refused():
    with pytest.raises(InputError, match="needs a name"):
        MemoryTracker().begin_stage("")


class _Calls:
    def __init__(self):
        self.calls = []

    def start(self, stage, total_tokens):
        self.calls.append((stage, total_tokens))

    def advance(self, num_tokens):
        self.calls.append(num_tokens)

    def finish(self):
        self.calls.append("finish")


def test_the_stages_of_a_progress_become_stages_of_the_tracker_and_are_handed_on():
    inner = _Calls()
    with MemoryTracker() as tracker:
        progress = StageProgress(tracker, inner)
        for stage, size in (("capture", 7), ("replay", 9), ("capture", 8)):
            progress.start(stage, 2 * size)
            torch.zeros(size)
            progress.advance(size)
            progress.finish()
        torch.zeros(100)
    assert tracker.stage_peak_bytes == {"capture": 8 * F32, "replay": 9 * F32}
    assert inner.calls == [("capture", 14), 7, "finish", ("replay", 18), 9, "finish", ("capture", 16), 8, "finish"]


@pytest.mark.gpu
def test_cuda_reads_the_allocator_with_the_same_interface():
    weight = torch.zeros(1 << 20, device="cuda")
    seen = []
    tracker = MemoryTracker("cuda", on_tensor=seen.append)
    tracker.watch([weight])
    with tracker:
        assert tracker.live_bytes == weight.nbytes
        with tracker.stage("outer"):
            kept = torch.zeros(1 << 21, device="cuda")
            with tracker.stage("inner"):
                torch.zeros(1 << 22, device="cuda")
        torch.zeros(1 << 19, device="cuda")
        assert tracker.stage_peak_bytes == {"outer": 7 * (1 << 22), "inner": 7 * (1 << 22)}
        assert tracker.live_bytes == 3 * (1 << 22)
        del kept
    assert tracker.live_bytes == weight.nbytes
    assert tracker.peak_bytes == 7 * (1 << 22)
    assert [record.num_bytes >> 20 for record in seen] == [8, 16, 2]


def test_what_is_made_during_a_pause_is_not_counted_and_what_dies_in_it_is():
    with MemoryTracker() as tracker:
        kept, dying = torch.zeros(100), torch.zeros(50)
        tracker.pause()
        unseen = torch.zeros(1000)
        del dying
        tracker.resume()
        assert tracker.live_bytes == kept.numel() * 4
        seen = torch.zeros(10)
        assert tracker.live_bytes == (kept.numel() + seen.numel()) * 4
    assert tracker.peak_bytes == 600 and unseen.numel() == 1000


def test_bytes_in_host_memory_and_on_the_device_add_up_to_those_of_a_resident_state():
    model = tiny_model("qwen3_5_text")
    live = {}
    for residency in ("device", "host"):
        engine = Engine(model, chunk_tokens=16, residency=residency)
        with MemoryTracker() as tracker, engine.capture(Prompt(random_ids(50, 1))):
            if residency == "host":
                engine._residency.stage.rest()
                assert engine._residency.memory.num_bytes > 0
                live["in host memory"] = engine._residency.memory.num_bytes
            gc.collect()
            live[residency] = tracker.live_bytes
    assert live["device"] == live["host"] + live["in host memory"]
