"""`longstraw train` on a small GLM model in a folder: latents, selection, experts, from rows to report and resume."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longstraw import cli
from longstraw.models.tiny import tiny_model

SPECIAL = ["<pad>", "<s>", "</s>"]  # numbers 0 to 2, as in the small models
TOPK = 16
# Shorter than the selection, longer than it, and longer than two chunks.
PROMPTS = ["Say it.", "Say which of the letters is odd.", "Once upon a time " * 3 + "there was"]
REWARDS = """
def odd_letters(completions):
    return [sum(ord(letter) % 7 for letter in text) / (1 + len(text)) for text in completions]
"""
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


@dataclass(frozen=True)
class Runs:
    """Two steps in one go, and one step gone on from by another."""

    whole: Path
    parts: Path


def save_model(folder):
    vocabulary = {token: number for number, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    tiny_model("glm_moe_dsa", vocab_size=len(vocabulary), index_topk=TOPK).save_pretrained(folder)
    return folder


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
    model = save_model(folder / "model")
    rows = [{"prompt": prompt, "answer": "e"} for prompt in PROMPTS]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward_code.py").write_text(REWARDS)
    tree = {
        "model": {"name": str(model), "dtype": "float32", "adapter": {"r": 2, "target_parameters": EXPERTS}},
        "engine": {"chunk_tokens": 24},
        "data": {"rows": str(folder / "rows.jsonl"), "shuffle": False},
        "rewards": [{"function": f"{folder}/reward_code.py:odd_letters"}],
        "sampling": {"num_generations": 3, "max_completion_length": 12},
        "optimizer": {"learning_rate": 0.01},
        "run": {
            "output_dir": str(folder / "whole"),
            "max_steps": 2,
            "prompts_per_step": 3,
            "save_steps": 1,
            "track_memory_steps": 1,
        },
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    whole, parts = folder / "whole", folder / "parts"
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))  # restores the path, which the command line extends
        train(folder / "run.yaml", whole)
        train(folder / "run.yaml", parts, "--set", "run.max_steps=1")
        train(folder / "run.yaml", parts, "--resume")
    return Runs(whole, parts)


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors_of(checkpoint):
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    moments = {f"{i}.{name}": value for i, state in optimizer["state"].items() for name, value in state.items()}
    return {**load_file(checkpoint / "adapter_model.safetensors"), **moments}


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
