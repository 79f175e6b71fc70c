"""One update over a context axis is the update of one process: gradients, parameters, samples, memory."""

import gc
import warnings

import pytest
import torch

from longstraw.errors import LongStrawError
from longstraw.evidence.memory import MemoryTracker
from longstraw.execution.engine import Engine
from longstraw.grpo.losses import GRPO
from longstraw.parallel.exchange import Exchange
from longstraw.parallel.topology import Axis, Topology
from longstraw.records import Prompt, Response, ResponseGroup, SamplingSettings, Span, Trajectory
from tiny import gradients, random_ids, tiny_model, worst_error

CHUNK = 16
MANY = "qwen3_5_text with 12 heads"
TOLERANCE = {"qwen3_5_text": 1e-4, "qwen3_next": 1e-4, MANY: 1e-4}
NAMES = ["llama", "mistral", "gpt_oss", "qwen3_5_text", "deepseek_v3", "glm_moe_dsa"]


def objective(logprobs):
    weights = [(-1.0) ** index * (1 + index / 3) for index in range(len(logprobs))]
    return sum(weight * part.sum() for weight, part in zip(weights, logprobs, strict=True)) / 10


def group_of(prompt_tokens, lengths):
    return ResponseGroup(Prompt(random_ids(prompt_tokens, 1)), [Response(random_ids(n, n)) for n in lengths])


def tree():
    action, tool = Span(random_ids(9, 11)), Span(random_ids(5, 12), False)
    trajectories = [
        Trajectory([action, tool, Span(random_ids(11, 14))]),
        Trajectory([action, tool, Span(random_ids(2, 15), temperature=0.7)]),
        Trajectory([action]),
        Trajectory([Span(random_ids(4, 17), False), Span(random_ids(20, 18))]),
    ]
    return ResponseGroup(Prompt(random_ids(21, 1)), trajectories)


GROUPS = {
    "odd lengths": lambda: group_of(45, (1, 7, 45)),
    "prompt shorter than the axis": lambda: group_of(1, (2, 15, 1)),
    "boundaries at chunks": lambda: group_of(CHUNK + 1, (CHUNK - 1, CHUNK, CHUNK + 1)),
    "tree": tree,
}


def two_steps(engine, model, group):
    """Gradients of two steps and the parameters after them."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3, eps=1e-3)
    seen = []
    for _ in range(2):
        engine.forward_backward([group], objective)
        report = engine.optimizer_step(optimizer, max_grad_norm=0.5)
        assert report.stepped
        seen.append(gradients(model))
    return seen, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


# Heads of DeltaNet layers that 3 and 4 ranks can share out. With four such layers, weights changed by 1e-7 change the
# second step's gradients of one process by 1e-3.
MANY_HEADS = dict(linear_num_key_heads=12, linear_num_value_heads=12, linear_key_head_dim=8, linear_value_head_dim=8)
MANY_HEADS |= dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])


def well_conditioned(name):
    """At std 0.3 two orders of the same float32 sums give gradients up to 2.4e-5 apart; at 0.2, below 1e-5."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what pyproject.toml excepts is not known to the ranks
        layers = {} if name in TOLERANCE else {"num_hidden_layers": 2}
        is_scaled = name not in ("qwen3_5_text", "qwen3_next")  # whose weights are of std 0.2 anyway
        name, _, heads = name.partition(" with ")
        model = tiny_model(name, **layers, **(MANY_HEADS if heads else {}))
    if is_scaled:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data *= 2 / 3
    return model


def divided_steps(world, name, case, settings):
    topology = Topology.create(context=world.degree)
    model = well_conditioned(name)
    engine = Engine(model, chunk_tokens=CHUNK, topology=topology, **settings)
    return two_steps(engine, model, GROUPS[case]())


ALL = [(name, case, 2) for name in NAMES for case in GROUPS]
MORE = [(name, "odd lengths", 3) for name in NAMES if name not in TOLERANCE]
MORE += [("llama", "prompt shorter than the axis", 3)]
MOST = [(name, "odd lengths", 4) for name in ("llama", "mistral", "glm_moe_dsa")]
ONCE = [(name, "odd lengths", 2) for name in ("qwen3_moe", "qwen3_next", "deepseek_v32")]
MANY_RANKS = [(MANY, "odd lengths", degree) for degree in (3, 4)]


@pytest.mark.parametrize(("name", "case", "degree"), ALL + MORE + MOST + ONCE + MANY_RANKS)
def test_every_gradient_over_two_steps_is_that_of_one_process(ranks, name, case, degree):
    model = well_conditioned(name)
    want, _ = two_steps(Engine(model, chunk_tokens=CHUNK), model, GROUPS[case]())
    results = ranks(degree).run(divided_steps, name, case, {})
    for seen, parameters in results:
        for step in (0, 1):
            error, tensor = worst_error(seen[step], want[step])
            assert error <= TOLERANCE.get(name, 1e-5), f"step {step}, {tensor}: relative error {error:.1e}"
        for parameter, value in parameters.items():
            assert torch.equal(value, results[0][1][parameter]), f"{parameter} differs between ranks"


@pytest.mark.parametrize(
    "settings", [{"prompt_gradient": "stopped"}, {"graph_scope": "chunk"}, {"residency": "host"}], ids=str
)
@pytest.mark.parametrize("name", ["mistral", "qwen3_5_text", "glm_moe_dsa"])
def test_engine_settings_mean_the_same_on_an_axis(ranks, name, settings):
    model = well_conditioned(name)
    want, _ = two_steps(Engine(model, chunk_tokens=CHUNK, **settings), model, GROUPS["odd lengths"]())
    for seen, _ in ranks(2).run(divided_steps, name, "odd lengths", settings):
        assert worst_error(seen[1], want[1])[0] <= TOLERANCE.get(name, 1e-5)


def long_steps(world, name):
    """Chunks of 4 tokens behind up to 150: rows stream at first, then the chunk's queries are fewer bytes."""
    model = well_conditioned(name)
    engine = Engine(model, chunk_tokens=4, topology=Topology.create(context=world.degree))
    report = engine.forward_backward([group_of(150, (3, 9))], objective)
    engine.optimizer_step(torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0))
    return gradients(model), dict(report.bytes_sent)


def test_dense_latents_stream_or_get_the_queries_whichever_is_fewer_bytes(ranks):
    model = well_conditioned("deepseek_v3")
    engine = Engine(model, chunk_tokens=4)
    engine.forward_backward([group_of(150, (3, 9))], objective)
    want = gradients(model)
    for got, sent in ranks(2).run(long_steps, "deepseek_v3"):
        assert worst_error(got, want)[0] <= 1e-5
        assert sent["rows"] > 0 and sent["queries"] > 0


def blocks(world, name):
    topology = Topology.create(context=world.degree, token_order="block_cyclic")
    model = well_conditioned(name)
    seen, _ = two_steps(Engine(model, chunk_tokens=CHUNK, topology=topology), model, GROUPS["odd lengths"]())
    return seen


@pytest.mark.parametrize("name", ["mistral", "glm_moe_dsa"])
def test_the_order_of_tokens_over_ranks_does_not_matter(ranks, name):
    model = well_conditioned(name)
    want, _ = two_steps(Engine(model, chunk_tokens=CHUNK), model, GROUPS["odd lengths"]())
    for seen in ranks(2).run(blocks, name):
        assert worst_error(seen[1], want[1])[0] <= 1e-5


def sampled(engine):
    with engine.capture(Prompt(random_ids(45, 1))) as state:
        responses = engine.sample(state, 3, SamplingSettings(max_new_tokens=12, temperature=0))
        scores = engine.score(state, responses)
    return [r.token_ids for r in responses], [r.sampling_logprobs for r in responses], scores


def sampled_on_ranks(world, name):
    return sampled(Engine(well_conditioned(name), chunk_tokens=CHUNK, topology=Topology.create(context=world.degree)))


@pytest.mark.parametrize("name", NAMES)
def test_greedy_samples_and_scores_equal_those_of_one_process(ranks, name):
    want_ids, _, want_scores = sampled(Engine(well_conditioned(name), chunk_tokens=CHUNK))
    for ids, logprobs, scores in ranks(2).run(sampled_on_ranks, name):
        for response in range(3):
            assert torch.equal(ids[response], want_ids[response])
            torch.testing.assert_close(logprobs[response], scores[response], rtol=0, atol=2e-4)
            torch.testing.assert_close(scores[response], want_scores[response], rtol=0, atol=2e-4)


def state_and_peak(world, num_responses):
    engine = Engine(well_conditioned("llama"), chunk_tokens=CHUNK, topology=Topology.create(context=world.degree))
    prompt = Prompt(random_ids(200, 1))
    responses = [Response(random_ids(CHUNK, index)) for index in range(num_responses)]
    group = ResponseGroup(prompt, responses, advantages=[1.0 + index for index in range(num_responses)])
    engine.forward_backward([group], GRPO())  # the adapter's gradients exist from here on
    engine._gradients._starts_fresh = False
    peaks = []
    for _ in range(3):  # a communication thread may hold a buffer for a moment longer, so the least of three
        gc.collect()
        with MemoryTracker() as tracker, engine.capture(prompt) as state:
            engine.forward_backward([group], GRPO(), states=[state])
            peaks.append(tracker.peak_bytes)
            num_bytes = state.num_bytes
    return num_bytes, min(peaks)


def test_each_rank_keeps_its_share_of_the_state_and_its_peak_knows_no_number_of_responses(ranks):
    with Engine(well_conditioned("llama"), chunk_tokens=CHUNK).capture(Prompt(random_ids(200, 1))) as state:
        whole = state.num_bytes
    one, eight = ranks(2).run(state_and_peak, 1), ranks(2).run(state_and_peak, 8)
    of_chunk = whole * CHUNK / 200
    for (bytes_one, peak_one), (_, peak_eight) in zip(one, eight, strict=True):
        assert abs(bytes_one - whole / 2) <= of_chunk
        assert peak_eight <= 1.001 * peak_one


def bytes_of_stopped_windows(world, num_prompt_tokens):
    model = well_conditioned("mistral")
    topology = Topology.create(context=world.degree)
    engine = Engine(model, chunk_tokens=CHUNK, prompt_gradient="stopped", topology=topology)
    with engine.capture(Prompt(random_ids(num_prompt_tokens, 1))) as state:
        return state.num_bytes


def test_windows_of_a_stopped_prompt_keep_what_a_window_needs(ranks):
    """The window is 12 of 200 tokens, of which each of two ranks has at most 8 (zigzag in chunks of 16)."""
    hidden = 32 * 4
    of_token = (bytes_of_stopped_windows(Exchange(Axis()), 200) - hidden) / 11
    for num_prompt_tokens in (200, 400):
        for num_bytes in ranks(2).run(bytes_of_stopped_windows, num_prompt_tokens):
            assert num_bytes - hidden <= 8 * of_token


def different_prompts(world):
    engine = Engine(well_conditioned("llama"), chunk_tokens=CHUNK, topology=Topology.create(context=world.degree))
    with pytest.raises(LongStrawError, match="different inputs"):
        engine.capture(Prompt(random_ids(20, world.rank)))


def test_ranks_with_different_prompts_are_told_so(ranks):
    ranks(2).run(different_prompts)


def broken_gradient(world):
    model = well_conditioned("llama")
    engine = Engine(model, chunk_tokens=CHUNK, topology=Topology.create(context=world.degree))
    engine.forward_backward([GROUPS["odd lengths"]()], objective)
    trained = [p for p in model.parameters() if p.requires_grad]
    before = [p.detach().clone() for p in trained]
    if world.rank == 1:
        trained[3].grad[0, 0] = float("nan")
    with pytest.raises(LongStrawError, match="not finite"):
        engine.optimizer_step(torch.optim.AdamW(trained))
    assert all(torch.equal(p, old) for p, old in zip(trained, before, strict=True))
    assert engine.policy_version == 0


def test_a_gradient_that_is_not_finite_on_one_rank_keeps_all_from_stepping(ranks):
    ranks(2).run(broken_gradient)


def drifted_copy(world):
    model = well_conditioned("llama")
    engine = Engine(model, chunk_tokens=CHUNK, topology=Topology.create(context=world.degree))
    engine.forward_backward([GROUPS["odd lengths"]()], objective)
    trained = [p for p in model.parameters() if p.requires_grad]
    if world.rank == 1:
        trained[3].data[0, 0] += 1e-7
    with pytest.raises(LongStrawError, match="differ between the copies"):
        engine.optimizer_step(torch.optim.AdamW(trained))


def test_copies_that_drifted_apart_are_noticed_after_the_step(ranks):
    ranks(2).run(drifted_copy)


def groups_of(shard):
    return [
        ResponseGroup(Prompt(random_ids(p, p)), [Response(random_ids(n, n)) for n in lengths], advantages=advantages)
        for p, lengths, advantages in shard
    ]


def two_grpo_steps(engine, model, shard):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, eps=1e-3)
    seen = []
    for _ in range(2):
        engine.forward_backward(groups_of(shard), GRPO())
        engine.optimizer_step(optimizer, max_grad_norm=0.5)
        seen.append(gradients(model))
    return seen, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}


def over_data(world, name, shards, context):
    topology = Topology.create(context=context, data=world.degree // context)
    model = well_conditioned(name)
    engine = Engine(model, chunk_tokens=CHUNK, topology=topology)
    return two_grpo_steps(engine, model, shards[topology.data.rank])


FIRST, SECOND, SKIPPED = (29, (7, 12), [1.0, -1.0]), (17, (1, 5, 20), [0.5, -1.0, 0.5]), (9, (3, 4), [0.0, 0.0])
SHARDS = {
    "one skips": [[FIRST, SECOND], [SKIPPED]],
    "unequal": [[FIRST, SKIPPED], [SECOND]],
    "one is empty": [[FIRST, SECOND, SKIPPED], []],
}


@pytest.mark.parametrize(
    ("name", "degree", "context", "shards"),
    [("llama", degree, context, shards) for degree, context in ((2, 1), (4, 2)) for shards in SHARDS]
    + [("qwen3_5_text", 4, 2, "unequal"), ("glm_moe_dsa", 4, 2, "unequal"), ("glm_moe_dsa", 4, 2, "one is empty")],
)
def test_groups_over_a_data_axis_give_the_updates_of_one_process(ranks, name, degree, context, shards):
    """Unequal groups, one that is skipped, empty shards, and one global denominator; over two steps."""
    model = well_conditioned(name)
    want, _ = two_grpo_steps(Engine(model, chunk_tokens=CHUNK), model, [FIRST, SECOND, SKIPPED])
    results = ranks(degree).run(over_data, name, SHARDS[shards], context)
    for seen, parameters in results:
        for step in (0, 1):
            assert worst_error(seen[step], want[step])[0] <= TOLERANCE.get(name, 1e-5)
        assert all(torch.equal(value, results[0][1][key]) for key, value in parameters.items())


def idle_in_the_second_step(world):
    """The second rank of the data axis has a group in the first step, and does not even call in the second."""
    model = well_conditioned("llama")
    engine = Engine(model, chunk_tokens=CHUNK, topology=Topology.create(data=world.degree))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for step in range(2):
        if step == 0 or world.rank == 0:
            engine.forward_backward(groups_of([FIRST if world.rank == 0 else SECOND]), GRPO())
        engine.optimizer_step(optimizer)
    return gradients(model)


def test_a_rank_that_is_idle_for_a_step_adds_nothing_of_the_step_before(ranks):
    model = well_conditioned("llama")
    engine = Engine(model, chunk_tokens=CHUNK)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    for shard in ([FIRST, SECOND], [FIRST]):
        engine.forward_backward(groups_of(shard), GRPO())
        engine.optimizer_step(optimizer)
    for got in ranks(2).run(idle_in_the_second_step):
        assert worst_error(got, gradients(model))[0] <= 1e-5


def another_order(world):
    engine = Engine(well_conditioned("llama"), chunk_tokens=CHUNK, topology=Topology.create(context=world.degree))
    lengths = (7, 12) if world.rank == 0 else (12, 7)
    with pytest.raises(LongStrawError, match="different inputs"):
        engine.forward_backward([group_of(20, lengths)], objective)


def test_ranks_with_responses_in_another_order_are_told_so(ranks):
    ranks(2).run(another_order)
