"""A small model in a folder, rows, rewards and a configuration: what `longstraw train` needs to run in seconds."""

import json
import warnings
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longstraw.config_file import load_config
from longstraw.errors import JointError
from longstraw.execution.progress import Silent
from longstraw.models.tiny import tiny_model
from longstraw.parallel.topology import Topology
from longstraw.training.loop import train
from longstraw.training.ranks import Ranks
from longstraw.training.setup import Surroundings, prepare

SPECIAL = ["<pad>", "<s>", "</s>"]  # numbers 0 to 2, as in the small models
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
PROMPTS = ["Say it.", "Say which of the letters is odd.", "Once upon a time " * 3 + "there was"]
REWARDS = """
import os, signal

def odd_letters(completions):
    return [sum(ord(letter) % 7 for letter in text) / (1 + len(text)) for text in completions]
"""


def save_model(folder, model_type, **settings):
    """A tiny model of a family whose tokens are bytes, with its tokenizer."""
    vocabulary = {token: number for number, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    tiny_model(model_type, vocab_size=len(vocabulary), **settings).save_pretrained(folder)
    return folder


def write_run(folder, model_type, *, prompts=PROMPTS, rewards=REWARDS, sections=None, **settings):
    """`run.yaml` and everything it names, in a folder; `sections` are merged into its own."""
    folder.mkdir(parents=True, exist_ok=True)
    save_model(folder / "model", model_type, **settings)
    rows = [{"prompt": prompt, "answer": "e"} for prompt in prompts]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward_code.py").write_text(rewards)
    tree = {
        "model": {"name": str(folder / "model"), "dtype": "float32", "adapter": {"r": 2}},
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
    for name, values in (sections or {}).items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values
    (folder / "run.yaml").write_text(yaml.safe_dump(tree))
    return folder / "run.yaml"


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def tensors_of(checkpoint):
    """The adapter and the optimizer's moments of a checkpoint, by name."""
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    moments = {f"{i}.{name}": value for i, state in optimizer["state"].items() for name, value in state.items()}
    return {**load_file(checkpoint / "adapter_model.safetensors"), **moments}


def run_on(world, file, degrees, overrides=(), resumes=False):
    """One rank's part of a run; what it said, and the error it ended with."""
    warnings.simplefilter("ignore")
    degrees = {"context": 1, "data": 1, "expert": 1, **degrees}
    sets = [*overrides, *(f"parallel.{axis}={degree}" for axis, degree in degrees.items())]
    config = load_config(Path(file), sets)
    lines = []
    ranks = Ranks(Topology.create(**degrees))
    surroundings = Surroundings(say=lines.append, display=Silent(), is_resumed=resumes, ranks=ranks)
    try:
        train(*prepare(config, surroundings))
    except JointError as error:
        return lines, str(error)
    return lines, None
