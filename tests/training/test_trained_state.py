"""Weights and moments of divided experts: whole in a checkpoint, a part on a rank, bit for bit both ways.

Ranks take turns in one process: a first snapshot of each shows what it gives to a gather, a second one gets it all.
"""

import warnings

import pytest
import torch
from safetensors.torch import load_file

from longstraw.config import OptimizerConfig
from longstraw.errors import InputError
from longstraw.models.experts import Part, divide_experts, expert_parameters
from longstraw.models.saving import load_adapter, save_trained
from longstraw.parallel.topology import Axis
from longstraw.training import trained_state
from longstraw.training.optimizer import make_optimizer
from longstraw.training.trained_state import TrainedState
from tiny import adapted_with_experts, tiny_model

# Files keep an expert of qwen3_moe by itself; gpt_oss has biases, and experts transposed.
CASES = [("qwen3_moe", True), ("qwen3_moe", False), ("gpt_oss", True), ("gpt_oss", False)]
BOTH = pytest.mark.parametrize(("name", "adapter"), CASES)


def state_of(name, *, adapter=True, rank=None, seed=0):
    """A model and its optimizer; with a rank, that half of the experts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny_model(name, adapter=False, num_hidden_layers=2)
        torch.manual_seed(seed)
        model = adapted_with_experts(model) if adapter else model.requires_grad_(True)
    if rank is not None:
        divide_experts(model, Part(2, rank))
    optimizer = make_optimizer(model.named_parameters(), OptimizerConfig(learning_rate=0.01))
    return TrainedState(model, optimizer, Axis() if rank is None else Axis(2, rank))


def layouts_of(name, adapter):
    """Where the experts of a whole model's parameters are."""
    return expert_parameters(state_of(name, adapter=adapter).model)


def trained(state):
    return {name: parameter for name, parameter in state.model.named_parameters() if parameter.requires_grad}


def fill(state, layouts):
    """Weights and moments drawn by name for the whole; a rank takes its part of them."""
    part = Part(state.expert.degree, state.expert.rank)
    for name, parameter in trained(state).items():
        shape = list(parameter.shape)
        if name in layouts:
            shape[0 if layouts[name][0] == "front" else -1] *= part.degree
        generator = torch.Generator().manual_seed(sum(map(ord, name)))
        drawn = [torch.randn(shape, generator=generator) for _ in range(3)]
        weight, *moments = [part.of(each, *layouts[name]) if name in layouts else each for each in drawn]
        parameter.data = weight
        values = dict(zip(("exp_avg", "exp_avg_sq"), moments, strict=True))
        state.optimizer.state[parameter] = {"step": torch.tensor(3.0), **values}


def snapshots(monkeypatch, states):
    """Of every rank of an axis, gathered as by an exchange between them."""
    given = {}

    class Gathering:
        def __init__(self, axis):
            self.degree, self.rank, self.calls = axis.degree, axis.rank, []
            given.setdefault(axis.rank, self.calls)

        def all_gather_tokens(self, block, sizes, *, dim, kind):
            assert (list(sizes), dim, kind) == ([len(block)] * self.degree, 0, "checkpoint")
            self.calls.append(block.clone())
            known = [given.get(rank, []) for rank in range(self.degree)]
            return [calls[len(self.calls) - 1] if len(calls) >= len(self.calls) else block for calls in known]

    monkeypatch.setattr(trained_state, "Exchange", Gathering)
    for state in states:
        state.snapshot()
    num_divided = len(expert_parameters(states[0].model).keys() & trained(states[0]).keys())
    assert [len(calls) for calls in given.values()] == [3 * num_divided] * 2, "frozen experts stay where they are"
    return [state.snapshot() for state in states]


def assert_same_moments(got, want):
    assert got["param_groups"] == want["param_groups"]
    assert got["state"].keys() == want["state"].keys()
    for place, moments in want["state"].items():
        assert moments.keys() == got["state"][place].keys()
        assert [key for key, value in moments.items() if not torch.equal(got["state"][place][key], value)] == []


@BOTH
def test_every_rank_takes_the_checkpoint_that_one_process_takes(tmp_path, monkeypatch, name, adapter):
    whole, layouts = state_of(name, adapter=adapter), layouts_of(name, adapter)
    halves = [state_of(name, adapter=adapter, rank=rank) for rank in range(2)]
    for state in (whole, *halves):
        fill(state, layouts)
    whole.snapshot().save_weights(tmp_path / "whole")
    want = load_file(next((tmp_path / "whole").glob("*.safetensors")))
    for rank, snapshot in enumerate(snapshots(monkeypatch, halves)):
        assert_same_moments(snapshot.optimizer, whole.snapshot().optimizer)
        snapshot.save_weights(tmp_path / str(rank))
        got = load_file(next((tmp_path / str(rank)).glob("*.safetensors")))
        assert got.keys() == want.keys()
        assert [key for key, value in want.items() if not torch.equal(got[key], value)] == []


@BOTH
def test_a_rank_takes_its_part_of_the_moments(name, adapter):
    whole, layouts = state_of(name, adapter=adapter), layouts_of(name, adapter)
    fill(whole, layouts)
    for rank in range(2):
        half, want = (state_of(name, adapter=adapter, rank=rank) for _ in range(2))
        fill(want, layouts)
        half.load_optimizer(whole.optimizer.state_dict())
        assert_same_moments(half.optimizer.state_dict(), want.optimizer.state_dict())


def assert_is_part(half, whole, layouts, rank):
    want, got = trained(whole), trained(half)
    assert want.keys() == got.keys()
    for name, value in want.items():
        expected = Part(2, rank).of(value.detach(), *layouts[name]) if name in layouts else value
        assert torch.equal(got[name], expected), name


def test_a_rank_takes_its_part_of_a_saved_adapter(tmp_path):
    whole, layouts = state_of("qwen3_moe", seed=1), layouts_of("qwen3_moe", adapter=True)
    save_trained(whole.model, tmp_path)
    for rank in range(2):
        half = state_of("qwen3_moe", rank=rank)
        load_adapter(half.model, tmp_path)
        assert_is_part(half, whole, layouts, rank)


def test_an_adapter_on_fewer_experts_is_not_taken_for_a_part(tmp_path):
    save_trained(state_of("qwen3_moe", rank=0).model, tmp_path)
    with pytest.raises(InputError, match="not of the model's shape"):
        load_adapter(state_of("qwen3_moe", rank=0).model, tmp_path)
