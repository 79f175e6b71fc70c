"""The running top-k against one sort of every score, and against the library's own indexer."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoConfig
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

from longstraw.evidence.memory import MemoryTracker
from longstraw.ops import index_scan
from longstraw.ops.index_scan import (
    BlockSizes,
    IndexQueries,
    IndexRun,
    select_positions,
    select_positions_naive,
    select_positions_per_row,
)
from longstraw.ops.staging import Stage

NUM_HEADS, WIDTH = 16, 8


def set_blocks(monkeypatch, keys_per_tile, queries_per_block, keys_per_strip):
    tile_bytes = 4 * NUM_HEADS * keys_per_tile * queries_per_block
    monkeypatch.setattr(index_scan, "CPU_BLOCKS", BlockSizes(keys_per_tile, tile_bytes, keys_per_strip))
    monkeypatch.setattr(index_scan, "STRIP_KEYS_PER_SELECTED", 1)


def cut(keys, *lengths):
    """Runs of the given lengths and one of the rest."""
    runs, start = [], 0
    for length in (*lengths, len(keys) - sum(lengths)):
        runs.append(IndexRun(keys[start : start + length], start))
        start += length
    return runs


def whole_numbers(*shape, limit=2):
    """Small enough that float32 holds every sum of products: scores are exact and many are equal."""
    return torch.randint(-limit, limit + 1, shape).float()


def make(num_queries, num_keys, numbers=torch.randn):
    queries = IndexQueries(
        numbers(num_queries, NUM_HEADS, WIDTH), numbers(num_queries, NUM_HEADS), num_keys - num_queries
    )
    return queries, numbers(num_keys, WIDTH)


@pytest.mark.parametrize("blocks", [(3, 2, 5), (64, 3, 16), (16, 1, 48), (7, 100, 1000)])
@pytest.mark.parametrize("num_queries", [1, 7, 63, 64, 65])
@pytest.mark.parametrize("topk", [1, 32])
def test_selection_is_the_stable_sort_of_every_score(monkeypatch, blocks, num_queries, topk):
    set_blocks(monkeypatch, *blocks)
    queries, keys = make(num_queries, num_queries + 70, whole_numbers)
    for runs in (cut(keys), cut(keys, 5, 1, 57)):
        selected = select_positions(queries, runs, topk=topk)
        assert selected.dtype == torch.int32
        torch.testing.assert_close(selected, select_positions_naive(queries, runs, topk=topk), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_selection_does_not_depend_on_block_size_runs_or_chunks(monkeypatch, dtype):
    queries, keys = make(65, 400)
    queries = IndexQueries(queries.q_TID.to(dtype), queries.weight_TI, queries.start)
    keys = keys.to(dtype)
    want = select_positions_naive(queries, cut(keys), topk=33)
    for blocks in ((64, 7, 64), (17, 1, 50), (256, 65, 999)):
        set_blocks(monkeypatch, *blocks)
        assert torch.equal(select_positions(queries, cut(keys, 301, 2), topk=33), want)
    for begin, end in ((0, 1), (1, 40), (40, 65)):
        chunk = IndexQueries(queries.q_TID[begin:end], queries.weight_TI[begin:end], queries.start + begin)
        assert torch.equal(select_positions(chunk, cut(keys, 20), topk=33), want[begin:end])


@pytest.mark.parametrize("staging_bytes", [2 * 32 * WIDTH * 4, 10 * 32 * WIDTH * 4])
def test_keys_in_host_memory_are_selected_alike_and_each_is_fetched_once(monkeypatch, staging_bytes):
    set_blocks(monkeypatch, 32, 7, 48)
    queries, keys = make(23, 300)
    fetched = []
    stage = Stage(torch.device("cpu"), staging_bytes, on_fetch=lambda fetch: fetched.append(len(fetch.source)))
    host = [IndexRun(keys[:250], 0, stage), IndexRun(keys[250:], 250)]
    assert torch.equal(select_positions(queries, host, topk=9), select_positions(queries, cut(keys, 250), topk=9))
    assert sum(fetched) == 250
    own = torch.randn(23, 28, WIDTH)
    selected = [select_positions_per_row(queries, runs, own, topk=9) for runs in (host[:1], cut(keys[:250]))]
    assert torch.equal(*selected)
    assert sum(fetched) == 500


def test_keys_later_than_the_query_are_never_selected_even_if_they_score_highest(monkeypatch):
    set_blocks(monkeypatch, 16, 4, 16)
    queries = IndexQueries(torch.ones(37, NUM_HEADS, WIDTH), torch.ones(37, NUM_HEADS), 8)
    keys = torch.arange(1.0, 66.0)[:, None].expand(-1, WIDTH)  # rising scores; the last 20 are after every query
    selected = select_positions(queries, cut(keys, 30), topk=9)
    assert torch.equal(selected, torch.arange(37, dtype=torch.int32)[:, None] + torch.arange(9, dtype=torch.int32))


@pytest.mark.parametrize("weight", [1.0, -1.0, 0.0])
def test_equal_scores_go_to_the_lowest_positions(monkeypatch, weight):
    set_blocks(monkeypatch, 16, 4, 16)
    queries = IndexQueries(-torch.ones(7, NUM_HEADS, WIDTH), torch.full((7, NUM_HEADS), weight), 90)
    keys = torch.rand(97, WIDTH) + 0.1  # every product is negative, so every score is zero, of either sign
    selected = select_positions(queries, cut(keys, 50), topk=21)
    assert torch.equal(selected, torch.arange(21, dtype=torch.int32).expand(7, -1))


@pytest.mark.parametrize("num_copies", [3, 8])
@pytest.mark.parametrize("blocks", [(64, 65, 64), (13, 4, 13), (512, 1, 512)])
def test_equal_keys_have_equal_scores_wherever_the_path_is_cut(monkeypatch, num_copies, blocks):
    set_blocks(monkeypatch, *blocks)
    q, weight, once = torch.randn(NUM_HEADS, WIDTH), torch.randn(NUM_HEADS) + 0.5, torch.randn(50, WIDTH)
    scores = weight.double() @ (q.double() @ once.double().T).relu()
    assert (scores > 0).sum() > 12
    # Many equal queries behind the copies; the keys there score zero.
    queries = IndexQueries(q.expand(65, -1, -1), weight.expand(65, -1), 50 * num_copies - 1)
    keys = torch.cat([once.repeat(num_copies, 1), torch.zeros(64, WIDTH)])
    for topk in (num_copies * 5, num_copies * 9 + 2):
        best = scores.argsort(descending=True)[:12, None] + 50 * torch.arange(num_copies)
        want = best.flatten()[:topk].sort().values.int().expand(65, -1)
        for lengths in ((), (31, 1, 2, 3), (7, 40)):
            assert torch.equal(select_positions(queries, cut(keys, *lengths), topk=topk), want)


def test_zeros_of_either_sign_are_equal(monkeypatch):
    set_blocks(monkeypatch, 16, 4, 16)
    # Positive keys score -1, zero keys score weight * 0 = -0.0, negative ones with no product score -0.0 or 0.0.
    queries = IndexQueries(torch.ones(1, NUM_HEADS, 1), torch.zeros(1, NUM_HEADS), 39)
    queries.weight_TI[0, 0] = -1.0
    keys = torch.ones(40, 1)
    keys[5:40:5] = 0.0
    keys[7:40:10] = -1.0
    selected = select_positions(queries, cut(keys, 13), topk=8)
    assert selected.tolist() == [[5, 7, 10, 15, 17, 20, 25, 27]]
    ranks = index_scan._ranks(torch.tensor([0.0, -0.0, -1.0, 1.0]), torch.tensor([3, 2, 1, 9]))
    assert ranks.argsort(descending=True).tolist() == [3, 1, 0, 2]


@pytest.mark.parametrize("trend", [-1.0, 1.0])
def test_rising_and_falling_scores_are_selected_alike(monkeypatch, trend):
    set_blocks(monkeypatch, 16, 4, 32)
    queries, keys = make(9, 500, whole_numbers)
    queries.q_TID[:, 0] = trend * 40
    queries.weight_TI[:, 0] = 1.0
    keys += torch.arange(500.0)[:, None] // 3
    want = select_positions_naive(queries, cut(keys), topk=31)
    assert torch.equal(select_positions(queries, cut(keys, 200, 200), topk=31), want)


def test_a_key_without_a_number_for_a_score_is_selected_last(monkeypatch):
    set_blocks(monkeypatch, 16, 4, 16)
    queries, keys = make(5, 60)
    keys[[3, 30, 54]] = float("nan")
    selected = select_positions(queries, cut(keys), topk=50)
    assert not set(selected.flatten().tolist()) & {3, 30, 54}
    everything = select_positions(queries, cut(keys), topk=56)[0]
    assert torch.equal(everything, torch.arange(56, dtype=torch.int32))


def test_keys_without_a_number_hide_no_other_key(monkeypatch):
    set_blocks(monkeypatch, 16, 4, 48)
    queries, keys = make(5, 200)
    without = torch.cat([keys[:64], keys[80:]])
    keys[64:80] = float("nan")  # one tile of the second strip
    selected = select_positions(queries, cut(keys), topk=7)
    want = select_positions_naive(replace(queries, start=queries.start - 16), cut(without), topk=7)
    assert torch.equal(selected, want + 16 * (want >= 64).int())


def test_selected_sets_are_those_of_the_stock_indexer(monkeypatch):
    set_blocks(monkeypatch, 32, 5, 48)
    config = AutoConfig.for_model(
        "glm_moe_dsa", hidden_size=32, q_lora_rank=24, qk_rope_head_dim=4, index_n_heads=NUM_HEADS,
        index_head_dim=WIDTH, index_topk=33, num_hidden_layers=1, indexer_types=["full"],
    )  # fmt: skip
    indexer = glm.GlmMoeDsaIndexer(config, 0)
    for weight in indexer.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    hidden, q_resid = torch.randn(1, 201, 32), torch.randn(1, 201, 24)
    angles = torch.randn(1, 201, 4)
    mask = torch.full((201, 201), float("-inf")).triu(1)[None]
    keys = KeptKeys()
    with torch.no_grad():
        stock = indexer(hidden, q_resid, (angles.cos(), angles.sin()), mask, None, cache=keys)[0]
        q = indexer.wq_b(q_resid).view(1, 201, NUM_HEADS, WIDTH)
        turned, _ = glm.apply_rotary_pos_emb_interleave(
            q[..., :4], q[..., :4], angles.cos(), angles.sin(), unsqueeze_dim=2
        )
        weight = indexer.weights_proj(hidden)[0] * (NUM_HEADS**-0.5 * indexer.softmax_scale)
    q_TID = torch.cat([turned, q[..., 4:]], -1)[0]
    assert (weight > 0).any() and (weight < 0).any()
    for start in (32, 100, 200):
        queries = IndexQueries(q_TID[start:], weight[start:], start)
        selected = select_positions(queries, cut(keys.key_ND, 90), topk=33)
        assert torch.equal(selected, stock[start:].sort(1).values)


class KeptKeys:
    """As much of a cache as the stock indexer uses."""

    def update_indexer(self, keys, layer_idx):
        self.key_ND = keys[0]
        return keys


@pytest.mark.parametrize("lengths", [(80, 21), (120,), ()])
@pytest.mark.parametrize("blocks", [(16, 2, 16), (256, 8, 256)])
def test_rows_decoded_together_select_as_if_each_were_alone(monkeypatch, lengths, blocks):
    set_blocks(monkeypatch, *blocks)
    num_shared = sum(lengths)
    shared = whole_numbers(num_shared, WIDTH)
    runs = cut(shared, *lengths[:-1]) if lengths else []
    own = whole_numbers(5, 40, WIDTH)
    position = num_shared + 36  # the last three own keys are after the query
    queries = IndexQueries(whole_numbers(5, NUM_HEADS, WIDTH), whole_numbers(5, NUM_HEADS), position)
    selected = select_positions_per_row(queries, runs, own, topk=23)
    for g in range(5):
        alone = IndexQueries(queries.q_TID[g : g + 1], queries.weight_TI[g : g + 1], position)
        want = select_positions(alone, [*runs, IndexRun(own[g], num_shared)], topk=23)
        assert torch.equal(selected[g : g + 1], want)


@pytest.mark.parametrize("trend", [0.0, 1.0])
def test_peak_memory_does_not_depend_on_the_length_of_the_path(monkeypatch, trend):
    set_blocks(monkeypatch, 64, 8, 128)
    peaks = []
    for num_keys in (1025, 4097):  # the last strips cut alike
        queries, keys = make(65, num_keys)
        keys += trend * torch.arange(num_keys)[:, None]
        with MemoryTracker() as tracker:
            select_positions(queries, cut(keys, num_keys // 2), topk=32)
        peaks.append(tracker.peak_bytes)
    # Strips of 128 keys: float32 scores and a few times as many int64; how many pairs are candidates varies a little.
    assert peaks[1] <= 1.05 * peaks[0]
    assert peaks[1] < 8 * NUM_HEADS * 64 * 4 + 8 * (128 + 32) * (4 + 6 * 8)


def test_a_path_with_a_gap_or_too_short_for_the_queries_is_refused():
    queries, keys = make(7, 50)
    with pytest.raises(AssertionError, match="a run starts at position 30"):
        select_positions(queries, [IndexRun(keys[:29], 0), IndexRun(keys[30:], 30)], topk=5)
    with pytest.raises(AssertionError, match="the runs end at position 49"):
        select_positions(queries, [IndexRun(keys[:49], 0)], topk=5)
    with pytest.raises(AssertionError, match="does not see 45 positions"):
        select_positions(queries, [IndexRun(keys, 0)], topk=45)
    with pytest.raises(AssertionError, match="do not reach the query"):
        select_positions_per_row(queries, [IndexRun(keys[:40], 0)], keys[None, :3].expand(7, -1, -1), topk=5)
