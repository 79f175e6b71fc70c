"""Prompt state in host memory: the same results to the bit, and device memory that does not grow with the prompt."""

import gc
import re
from itertools import accumulate

import pytest
import torch

from longstraw.errors import InputError
from longstraw.evidence.memory import MemoryTracker
from longstraw.execution.engine import Engine
from longstraw.grpo.losses import GRPO
from longstraw.ops import attention, index_scan
from longstraw.ops.kernels import attend_backward
from longstraw.records import Prompt, Response, ResponseGroup, SamplingSettings
from tiny import gradients, random_ids, tiny_model

CHUNK = 16
PROMPT = random_ids(44, 1)
RESPONSES = [random_ids(n, n) for n in (18, 1)]
FAMILIES = ["llama", "mistral", "gpt_oss", "qwen3_5_text", "deepseek_v3", "deepseek_v32", "glm_moe_dsa"]
WHOLE_LAYERS = 2**20


@pytest.fixture(autouse=True)
def small_calls(monkeypatch):
    """Several kernel calls per extent and per window at test sizes."""
    monkeypatch.setattr(attention, "KEYS_PER_FORWARD_CALL", 13)
    monkeypatch.setattr(attention, "QUERIES_PER_WINDOW_CALL", 8)


def host_engine(model, staging_bytes=WHOLE_LAYERS, *, chunk_tokens=CHUNK, **options):
    return Engine(model, chunk_tokens=chunk_tokens, residency="host", staging_bytes=staging_bytes, **options)


def group_of(prompt_ids):
    responses = [Response(ids) for ids in RESPONSES]
    return ResponseGroup(Prompt(prompt_ids), responses, advantages=[1.0, -2.0])


def least_staging_bytes(model, **options):
    """What the refusals ask for until there is none."""
    staging_bytes = 1
    while True:
        try:
            with host_engine(model, staging_bytes, **options).capture(Prompt(PROMPT)):
                return staging_bytes
        except InputError as refusal:
            staging_bytes = int(re.search(r"take ([\d,]+);", str(refusal))[1].replace(",", ""))


def results(model, engine):
    """Gradients, logprobs and greedy samples."""
    model.zero_grad()
    group = group_of(PROMPT)
    with engine.capture(group.prompt) as state:
        scored = engine.score(state, group.responses)
        sampled = engine.sample(state, 2, SamplingSettings(max_new_tokens=3, temperature=0))
        engine.forward_backward([group], GRPO(), states=[state])
    return [*gradients(model).values(), *scored, *(x for r in sampled for x in (r.token_ids, r.sampling_logprobs))]


def assert_same(got, want):
    for one, other in zip(got, want, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("prompt_gradient", ["exact", "stopped"])
@pytest.mark.parametrize("name", FAMILIES)
def test_results_do_not_depend_on_residency(name, prompt_gradient):
    model = tiny_model(name)
    want = results(model, Engine(model, chunk_tokens=CHUNK, prompt_gradient=prompt_gradient))
    sizes = [least_staging_bytes(model, prompt_gradient=prompt_gradient)]
    for staging_bytes in [*sizes, WHOLE_LAYERS] if prompt_gradient == "exact" else sizes:
        assert_same(results(model, host_engine(model, staging_bytes, prompt_gradient=prompt_gradient)), want)


@pytest.mark.parametrize("name", ["qwen3_5_text", "deepseek_v3"])
def test_results_of_a_chunk_graph_do_not_depend_on_residency(name):
    model = tiny_model(name)
    want = results(model, Engine(model, chunk_tokens=CHUNK, graph_scope="chunk"))
    assert_same(results(model, host_engine(model, graph_scope="chunk")), want)


class FetchLog:
    """Which layer's state an engine fetched when, with how many rows, and whether with its cotangents."""

    def __init__(self, engine, state):
        runs = [layer.run()[0] for layer in state.node.layers]
        self._layers = {run.key_NKD.data_ptr(): number for number, run in enumerate(runs)}
        self._row_bytes = runs[0].key_NKD[0].numel() * 4
        self._stage = engine._residency.stage
        self.fetched = []
        self.num_fetched_when_left = []  # by the reader of the first, second, ... fetch
        self._stage.on_fetch = self._append
        leave = self._stage._leave

        def logged_leave(fetch):
            self.num_fetched_when_left.append(len(self.fetched))
            leave(fetch)

        self._stage._leave = logged_leave

    def _append(self, fetch):
        address = fetch.source.read[0].data_ptr()
        base = max(layer for layer in self._layers if layer <= address)
        first = (address - base) // self._row_bytes
        self.fetched.append((self._layers[base], first, len(fetch.source), bool(fetch.source.sums)))


@pytest.mark.parametrize("slices", [1, 2])
def test_a_pass_fetches_each_slice_of_each_layer_once_in_order_and_one_ahead(monkeypatch, slices):
    monkeypatch.setattr(attention, "KEYS_PER_FORWARD_CALL", CHUNK)
    model = tiny_model("llama")
    engine = host_engine(model)
    group = ResponseGroup(Prompt(random_ids(2 * CHUNK, 1)), [Response(random_ids(12, 2))], advantages=[1.0])
    with engine.capture(group.prompt) as state:
        log = FetchLog(engine, state)
        if slices == 2:
            rows = state.node.layers[0].complete_run(constant=False).rows(sums=True)
            engine._residency.stage.staging_bytes = 2 * rows.num_bytes(CHUNK)
        engine.forward_backward([group], GRPO(), states=[state])
    layers, prompt = range(4), [(0, 2 * CHUNK)] if slices == 1 else [(0, CHUNK), (CHUNK, CHUNK)]
    # The slot that holds one piece with cotangents holds more without: forwards may take the prompt at once.
    forward_prompt = [(0, 2 * CHUNK)]
    response = [(layer, *part, False) for layer in layers for part in forward_prompt]
    response += [(layer, *part, True) for layer in reversed(layers) for part in prompt]
    last_chunk = [(layer, 0, CHUNK, False) for layer in layers]
    last_chunk += [(layer, 0, CHUNK, True) for layer in reversed(layers)]
    passes = [response[:4], response[4:], last_chunk[:4], last_chunk[4:]]
    assert log.fetched == [fetch for fetches in passes for fetch in fetches]
    ahead = [1] * len(log.fetched)
    for end in accumulate(map(len, passes)):
        ahead[end - 1] = 0  # the next pass makes a plan of its own
    assert log.num_fetched_when_left == [number + 1 + ahead[number] for number in range(len(ahead))]


def peak_of_update(engine, num_prompt_tokens):
    group = ResponseGroup(Prompt(random_ids(num_prompt_tokens, 9)), [Response(RESPONSES[0])], advantages=[1.0])
    gc.collect()
    with MemoryTracker() as tracker:
        with engine.capture(group.prompt) as state:
            engine.forward_backward([group], GRPO(), states=[state])
        gc.collect()
        return tracker.peak_bytes, tracker.live_bytes


def device_bytes_per_token(monkeypatch, engine):
    """Of a prompt that is larger than a few chunks and pieces, and whose layers are larger than a slot."""
    monkeypatch.setattr(attention, "KEYS_PER_FORWARD_CALL", 64)
    monkeypatch.setattr(index_scan, "CPU_BLOCKS", index_scan.BlockSizes(128, 2**18, 128))
    peak_of_update(engine, 8)  # the adapter's gradients exist from here on
    engine._gradients._starts_fresh = False
    (short, _), (long, left) = peak_of_update(engine, 192), peak_of_update(engine, 320)
    assert left == 0
    return (long - short) / 128


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "glm_moe_dsa"])
def test_a_prompt_token_takes_at_most_64_bytes_of_the_device(monkeypatch, name):
    # A layer of the shorter prompt is larger than a slot; rows of latents are a fifth of keys, values and cotangents.
    staging_bytes = 3 * 2**13 if name == "glm_moe_dsa" else 2**16
    engine = host_engine(tiny_model(name), staging_bytes, chunk_tokens=64)
    assert device_bytes_per_token(monkeypatch, engine) <= 64
    assert engine._residency.memory.num_bytes == 0 < engine._residency.memory.peak_bytes


@pytest.mark.parametrize("name", ["llama", "qwen3_5_text", "glm_moe_dsa"])
def test_the_state_has_the_same_bytes_in_host_memory(name):
    model = tiny_model(name)
    with Engine(model, chunk_tokens=CHUNK).capture(Prompt(PROMPT)) as state:
        want = state.num_bytes
    engine = host_engine(model)
    with engine.capture(Prompt(PROMPT)) as state:
        assert state.num_bytes == want
        # But for the hidden state of the last token and the boundaries of the end, all of it.
        on_device = want - engine._residency.memory.num_bytes
        ends = [state.node.recurrent(i).end.num_bytes for i in range(4) if name == "qwen3_5_text" and i != 3]
        assert on_device == state.node.last_hidden.numel() * 4 + sum(ends)


def test_too_little_staging_is_refused_after_the_first_chunk_and_leaves_nothing_behind():
    model = tiny_model("llama")
    engine = host_engine(model, 1000)
    done = []
    engine._progress.advance = done.append
    with pytest.raises(InputError, match="staging_bytes is 1,000, but two pieces of 13 tokens of one layer's state"):
        engine.capture(Prompt(PROMPT))
    assert done == []
    gc.collect()
    assert engine._residency.memory.num_bytes == 0


def test_states_share_one_stage_and_outlive_each_other():
    model = tiny_model("llama")
    groups = [group_of(PROMPT), group_of(random_ids(45, 7))]
    Engine(model, chunk_tokens=CHUNK).forward_backward(groups, GRPO())
    want = list(gradients(model).values())
    engine = host_engine(model)
    states = [engine.capture(group.prompt) for group in groups]
    for group, state in zip(groups, states, strict=True):
        engine.forward_backward([group], GRPO(), states=[state])
        state.free()
    assert_same(gradients(model).values(), want)
    assert [slot.numel() for slot in engine._residency.stage._slots] == [0, 0]


def test_an_error_in_the_middle_of_an_update_leaves_the_engine_as_it_was(monkeypatch):
    model = tiny_model("llama")
    want = results(model, Engine(model, chunk_tokens=CHUNK))
    engine = host_engine(model)
    num_calls = 0

    def fails_once(*args, **options):
        nonlocal num_calls
        num_calls += 1
        if num_calls == 20:
            raise RuntimeError("out of memory")
        return attend_backward(*args, **options)

    monkeypatch.setattr(attention, "attend_backward", fails_once)
    with engine.capture(Prompt(PROMPT)) as state:
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.forward_backward([group_of(PROMPT)], GRPO(), states=[state])
        model.zero_grad()
        engine.forward_backward([group_of(PROMPT)], GRPO(), states=[state])
        assert_same(gradients(model).values(), want[: len(gradients(model))])
    assert_same(results(model, engine), want)


@pytest.mark.parametrize(("option", "value"), [("residency", "disk"), ("staging_bytes", 0), ("staging_bytes", 1.5)])
def test_wrong_settings_are_refused(option, value):
    with pytest.raises(InputError, match=option):
        Engine(tiny_model("llama"), **{option: value})


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAMILIES)
def test_cuda_gradients_agree_and_device_bytes_do_not_grow(name):
    model = tiny_model(name).cuda()
    want = results(model, Engine(model, chunk_tokens=CHUNK))
    engine = host_engine(model, 2**16)
    for one, other in zip(results(model, engine), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)  # index_add_ sums in no fixed order on CUDA
    peaks = []
    for num_prompt_tokens in (192, 192, 448):  # the first one makes what stays
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        peak_of_update(engine, num_prompt_tokens)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert (peaks[2] - peaks[1]) / 256 <= 64
