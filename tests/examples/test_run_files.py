"""The run files for large models, run as they are but for a tiny model of the family, its rows and fewer ranks."""

import json
import re
import shlex
from pathlib import Path

import pytest

from longstraw.config_file import load_config
from longstraw.models.presets import preset_config
from training.small_run import PROMPTS, lines_of, run_on, save_model, tensors_of

EXAMPLES = Path(__file__).parents[2] / "examples"
QWEN, GLM = EXAMPLES / "qwen3.6-27b-8gpu.yaml", EXAMPLES / "glm-5.2-32gpu.yaml"

# NF4 wants linear layers of at least 64 inputs; outputs may be fewer, as DeltaNet's gates are in the published model.
WIDE = dict(hidden_size=64, intermediate_size=128, head_dim=32, linear_key_head_dim=32, linear_value_head_dim=32)
CASES = {
    QWEN: ("qwen3_5_text", {**WIDE, "num_hidden_layers": 4}, dict(context=2)),
    GLM: ("glm_moe_dsa", {"index_topk": 16, "n_routed_experts": 8}, dict(context=2, expert=2)),
}


def overrides_for(folder):
    """Nothing but what is not here: the weights, the rows, the GPUs, and the time."""
    return [
        f"model.name={folder}/model",
        f"data.rows={folder}/rows.jsonl",
        "data.max_prompt_tokens=256",
        "sampling.max_completion_length=8",
        f"run.output_dir={folder}/run",
        "run.max_steps=2",
        "optimizer.warmup_steps=0",
        f"rewards.0.function={folder}/reward_code.py:letters",
    ]


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_the_file_trains_a_tiny_model_of_the_family(ranks, tmp_path, file):
    family, settings, degrees = CASES[file]
    save_model(tmp_path / "model", family, **settings)
    rows = [{"prompt": prompt, "answer": "e"} for prompt in PROMPTS]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    reward = "def letters(completions):\n    return [float(len(set(text))) for text in completions]\n"
    (tmp_path / "reward_code.py").write_text(reward)
    results = ranks(2).run(run_on, str(file), degrees, overrides_for(tmp_path))
    assert [error for _, error in results] == [None, None]
    steps = lines_of(tmp_path / "run/metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2]
    assert all(line["stepped"] for line in steps)
    assert any(
        value.abs().sum() > 0
        for name, value in tensors_of(tmp_path / "run/checkpoints/step-000002").items()
        if "lora_B" in name
    )


def launched(file):
    """Processes that the torchrun command in the file's head starts, and the file it names."""
    text = re.sub(r"\\\n#", " ", file.read_text())
    words = shlex.split(re.search(r"# +(torchrun .*)", text)[1])
    option = {name: int(words[words.index(name) + 1]) for name in ("--nnodes", "--nproc-per-node") if name in words}
    assert words[words.index("-m") : words.index("-m") + 3] == ["-m", "longstraw", "train"]
    return option.get("--nnodes", 1) * option["--nproc-per-node"], words[-1]


@pytest.mark.parametrize(("file", "preset"), [(QWEN, "qwen3.6-27b"), (GLM, "glm-5.2")], ids=["qwen", "glm"])
def test_the_degrees_fit_the_command_and_the_published_model(file, preset):
    config, shape = load_config(file), preset_config(preset)
    num_processes, named = launched(file)
    assert config.parallel.num_processes == num_processes
    assert named == f"examples/{file.name}"
    if config.parallel.expert > 1:
        assert shape.n_routed_experts % config.parallel.expert == 0
    else:
        assert shape.linear_num_key_heads % config.parallel.context == 0
        assert shape.linear_num_value_heads % config.parallel.context == 0
