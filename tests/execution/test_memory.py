"""The promise of the project, in live tensor bytes: the peak knows neither G nor the prompt beyond its typed state."""

import gc

import pytest
import torch

from longstraw.evidence.memory import MemoryTracker
from longstraw.execution.engine import Engine
from longstraw.grpo.losses import GRPO
from longstraw.ops import index_scan
from longstraw.records import Prompt, Response, ResponseGroup
from tiny import random_ids, tiny_model

CHUNK = 32
LAYERS = 4
# Bytes per prompt token that the formula of docs/memory.md gives for the tiny models, float32: keys, values and their
# cotangents in attention layers; a boundary per chunk in DeltaNet layers; the token id itself.
KEY_VALUE = 2 * 2 * 16 * 4
BOUNDARY = 4 * 16 * 16 * 4 + 128 * 3 * 4
ROW, INDEX_KEY = (16 + 8) * 4, 16 * 4
STATE_SHAPES = [(2, 16), (24,), (16,)]  # of a token: keys or values, a row of latents, an index key
BYTES_PER_TOKEN = {
    ("glm_moe_dsa", "exact"): LAYERS * 2 * ROW + 2 * INDEX_KEY + 8,
    ("glm_moe_dsa", "stopped"): LAYERS * ROW + 2 * INDEX_KEY + 8,
    ("llama", "exact"): LAYERS * 2 * KEY_VALUE + 8,
    ("llama", "stopped"): LAYERS * KEY_VALUE + 8,
    ("qwen3", "stopped"): 2 * KEY_VALUE + 8,  # window layers keep their window
    ("qwen3", "exact"): LAYERS * 2 * KEY_VALUE + 8,
    ("qwen3_5_text", "exact"): 2 * KEY_VALUE + 3 * BOUNDARY / CHUNK + 8,
    ("qwen3_5_text", "stopped"): KEY_VALUE + 8,
}


def peak_of_update(engine, num_prompt_tokens, num_responses, on_tensor=None):
    """Peak bytes of one update above what was alive before it, and the bytes that remain after it."""
    responses = [Response(random_ids(CHUNK, index)) for index in range(num_responses)]
    prompt = Prompt(random_ids(num_prompt_tokens, 99))
    group = ResponseGroup(prompt, responses, advantages=[1.0 + index for index in range(num_responses)])
    gc.collect()
    with MemoryTracker(on_tensor=on_tensor) as tracker:
        with engine.capture(prompt) as state:
            engine.forward_backward([group], GRPO(), states=[state])
        gc.collect()
        return tracker.peak_bytes, tracker.live_bytes


@pytest.fixture(params=["llama", "qwen3", "qwen3_5_text", "glm_moe_dsa"])
def name(request):
    return request.param


@pytest.fixture(params=["exact", "stopped"])
def engine(name, request, monkeypatch):
    # One block of the index scan is the working memory that may be as long as a short prompt.
    blocks = index_scan.BlockSizes(keys_per_tile=32, tile_bytes=2**13, keys_per_strip=64)
    monkeypatch.setattr(index_scan, "CPU_BLOCKS", blocks)
    engine = Engine(tiny_model(name, max_position_embeddings=4096), chunk_tokens=CHUNK, prompt_gradient=request.param)
    peak_of_update(engine, 40, 1)  # the adapter's gradients exist from here on
    engine._gradients._starts_fresh = False
    return engine


def test_peak_of_eight_responses_is_that_of_one(engine):
    (one, _), (eight, _) = peak_of_update(engine, 200, 1), peak_of_update(engine, 200, 8)
    assert eight <= 1.001 * one


def test_a_prompt_token_costs_its_state_and_no_more(engine, name):
    (short, _), (long, _) = peak_of_update(engine, 256, 2), peak_of_update(engine, 768, 2)
    formula = BYTES_PER_TOKEN[name, engine.prompt_gradient]
    assert (long - short) / 512 <= 1.05 * formula


def test_all_bytes_are_back_after_the_with(engine):
    _, left = peak_of_update(engine, 200, 4)
    assert left == 0


def test_nothing_of_prompt_by_hidden_or_tokens_by_vocabulary_is_ever_made(engine):
    num_prompt_tokens, made = 640, []  # times hidden, more than any weight has
    peak_of_update(engine, num_prompt_tokens, 2, made.append)
    assert made
    for record in made:
        elements = record.shape.numel() if isinstance(record.shape, torch.Size) else torch.Size(record.shape).numel()
        is_state = tuple(record.shape) in [(num_prompt_tokens, *state) for state in STATE_SHAPES]
        assert is_state or elements < num_prompt_tokens * 32, record
        assert not (99 in record.shape and elements >= 128 * 99), record
