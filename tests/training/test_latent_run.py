"""`longstraw train` on a small GLM model in a folder: latents, selection, experts, from rows to report and resume."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from longstraw import cli
from training.small_run import EXPERTS, lines_of, tensors_of, write_run

TOPK = 16  # the prompts are shorter than the selection, longer than it, and longer than two chunks


@dataclass(frozen=True)
class Runs:
    """Two steps in one go, and one step gone on from by another."""

    whole: Path
    parts: Path


def train(config, output, *options):
    """The command line's own run; the only warning says that indexers are left out."""
    left_out = pytest.warns(UserWarning, match="leaves out the 6 linear layers of the indexers")
    with left_out as caught, pytest.raises(SystemExit) as ended:
        cli.main(["train", str(config), "--set", f"run.output_dir={output}", *options])
    assert ended.value.code == 0
    assert sum("indexers" in str(warning.message) for warning in caught) == 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    adapter = {"r": 2, "target_parameters": EXPERTS}
    model = {"name": str(folder / "model"), "dtype": "float32", "adapter": adapter}
    write_run(folder, "glm_moe_dsa", index_topk=TOPK, sections={"model": model})
    whole, parts = folder / "whole", folder / "parts"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))  # restores the path, which the command line extends
        train(folder / "run.yaml", whole)
        train(folder / "run.yaml", parts, "--set", "run.max_steps=1")
        train(folder / "run.yaml", parts, "--resume")
    return Runs(whole, parts)


def test_two_steps_equal_one_and_one_resumed_bit_for_bit(runs):
    whole, parts = (tensors_of(run / "checkpoints/step-000002") for run in (runs.whole, runs.parts))
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []
    completions = [run / "completions.jsonl" for run in (runs.whole, runs.parts)]
    assert completions[0].read_text() == completions[1].read_text()
    losses = [[line["loss"] for line in lines_of(run / "metrics.jsonl")] for run in (runs.whole, runs.parts)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def test_every_step_changes_every_adapter(runs):
    first, second = (tensors_of(runs.whole / "checkpoints" / name) for name in ("step-000001", "step-000002"))
    assert [name for name in first if torch.equal(first[name], second[name]) and "lora" in name] == []


def test_responses_are_scored_and_the_groups_trained(runs):
    completions = lines_of(runs.whole / "completions.jsonl")
    assert [line["row"] for line in completions] == [row for row in (0, 1, 2) for _ in range(3)] * 2
    assert len({line["completion"] for line in completions}) > len(completions) // 2
    for line in lines_of(runs.whole / "metrics.jsonl"):
        assert line["stepped"] and line["reward_std"] > 0
        # Ratio 1: the path that samples token by token agrees with the one that is trained.
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1, abs=1e-4)
        assert line["memory/peak_bytes"] > 0


def test_adapter_fits_latents_and_experts_and_leaves_the_indexers_out(runs):
    checkpoint = runs.whole / "checkpoints/step-000002"
    modules = {name.partition(".lora_")[0] for name in load_file(checkpoint / "adapter_model.safetensors")}
    ends = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "shared_experts.up_proj", "experts")
    for end in ends:
        assert any(module.endswith(f".{end}") for module in modules), end
    assert not any("indexer" in module for module in modules)
    assert "indexer" in json.loads((checkpoint / "adapter_config.json").read_text())["exclude_modules"]


def test_report_is_written(runs):
    for run in (runs.whole, runs.parts):
        page = (run / "report.html").read_text()
        assert "reward" in page and "</html>" in page
