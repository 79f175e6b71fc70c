import io
from contextlib import contextmanager

from rich.console import Console

from longstraw.execution.progress import Silent
from longstraw.training.progress import StageMeter, stage_display


class Memory:
    def __init__(self):
        self.events = []
        self.peak_bytes, self.stage_peak_bytes = 7, {"capture": 7}

    def begin_stage(self, name):
        self.events.append(f"begin {name}")

    def end_stage(self, name):
        self.events.append(f"end {name}")

    def pause(self):
        self.events.append("pause")

    def resume(self):
        self.events.append("resume")


def stage(meter, name):
    meter.start(name, 10)
    meter.advance(10)
    meter.finish()


def test_a_step_is_measured_stage_by_stage():
    memory = Memory()

    @contextmanager
    def track():
        yield memory

    meter = StageMeter(track_memory=track)
    with meter.measure() as costs:
        stage(meter, "capture")
        stage(meter, "replay")
        stage(meter, "capture")
    assert set(costs.seconds) == {"capture", "replay"}
    assert all(seconds >= 0 for seconds in costs.seconds.values())
    assert (costs.peak_bytes, costs.stage_peak_bytes) == (7, {"capture": 7})
    assert memory.events == [f"{edge} {name}" for name in ("capture", "replay", "capture") for edge in ("begin", "end")]


def test_memory_is_not_counted_in_other_steps():
    meter = StageMeter(track_memory=lambda: 1 / 0)
    with meter.measure(counts_memory=False) as costs:
        stage(meter, "capture")
    assert costs.peak_bytes is None


def test_memory_is_not_counted_while_sampling():
    memory = Memory()

    @contextmanager
    def track():
        yield memory

    meter = StageMeter(track_memory=track)
    with meter.measure() as costs:
        stage(meter, "sample")
    assert memory.events == ["pause", "resume"]
    assert set(costs.seconds) == {"sample"}


def test_each_step_is_measured_anew():
    meter = StageMeter()
    with meter.measure() as first:
        stage(meter, "capture")
    with meter.measure() as second:
        stage(meter, "replay")
    assert set(first.seconds) == {"capture"}
    assert set(second.seconds) == {"replay"}
    assert second.peak_bytes is None


def test_stages_outside_a_measurement_are_shown_and_not_kept():
    meter = StageMeter()
    stage(meter, "capture")
    with meter.measure() as costs:
        pass
    assert costs.seconds == {}


def test_nothing_is_drawn_where_there_is_no_terminal():
    text = io.StringIO()
    with stage_display(Console(file=text)) as display:
        assert isinstance(display, Silent)
        stage(display, "capture")
    assert text.getvalue() == ""


def test_a_terminal_shows_the_stage_and_its_tokens():
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=100)
    with stage_display(console) as display:
        display.start("prompt_replay", 2000)
        display.advance(1000)
        display._progress.refresh()
        display.finish()
        stage(display, "capture")
    assert "prompt replay" in text.getvalue()
    assert "1,000/2,000" in text.getvalue()
