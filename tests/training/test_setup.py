"""From a file to a trained adapter with the real engine: a tiny random llama and a tokenizer of single bytes."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from longstraw.config_file import check_config
from longstraw.errors import InputError, LongStrawError
from longstraw.execution.progress import Silent
from longstraw.training.loop import train
from longstraw.training.setup import Surroundings, prepare

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
# Upstream's own deprecation, transformers 5.24 with peft 0.21.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    vocabulary = {token: number for number, token in enumerate(SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", additional_special_tokens=SPECIAL[2:]
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def make(model_folder, tmp_path, monkeypatch):
    """A function that starts or resumes a run of a few steps and returns what it said."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": f"Say {i}" + "?" * i}], "answer": "e"} for i in range(5)]
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    Path("reward_code.py").write_text(
        "import random\n"
        "async def odd_letters(completions):\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    return [sum(ord(c) % 2 for c in t) / (1 + len(t)) + 0.1 * random.random() for t in texts]\n"
    )

    def run(output, *, is_resumed=False, resume_from=None, **sections):
        tree = {
            "model": {"name": str(model_folder), "dtype": "float32", "adapter": {"r": 2}},
            "engine": {"chunk_tokens": 16},
            "data": {"rows": "rows.jsonl"},
            "rewards": [{"function": "reward_code.py:odd_letters"}, {"function": "contains_answer", "weight": 0.5}],
            "sampling": {"num_generations": 2, "max_completion_length": 3},
            "optimizer": {"learning_rate": 0.01, "warmup_steps": 2},
            "run": {"output_dir": output, "max_steps": 3, "save_steps": 3, "track_memory_steps": None},
        }
        for name, values in sections.items():
            tree[name] = values if values is None or name == "rewards" else {**tree.get(name, {}), **values}
        lines = []
        surroundings = Surroundings(lines.append, Silent(), is_resumed=is_resumed, resume_from=resume_from)
        train(*prepare(check_config(tree), surroundings))
        return lines

    return run


def tensors_of(checkpoint):
    optimizer = torch.load(checkpoint / "optimizer.pt", weights_only=True)
    moments = {f"{i}.{name}": value for i, state in optimizer["state"].items() for name, value in state.items()}
    (weights,) = checkpoint.glob("*.safetensors")
    return {**load_file(weights), **moments}


def assert_equal_bits(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.parametrize("adapter", [{"r": 2}, None], ids=["adapter", "full"])
def test_six_steps_equal_three_and_three_resumed_bit_for_bit(make, adapter):
    evaluation = {"rows": "rows.jsonl", "num_generations": 2, "max_rows": 1, "every": 2}
    shared = {"model": {"adapter": adapter}, "evaluation": evaluation}
    make("whole", run={"max_steps": 6}, **shared)
    make("parts", run={"max_steps": 3}, **shared)
    lines = make("parts", run={"max_steps": 6}, is_resumed=True, **shared)
    assert "changed since the run was started: run.max_steps: 3 -> 6" in lines
    whole, parts = Path("whole"), Path("parts")
    assert_equal_bits(*(tensors_of(run / "checkpoints" / "step-000006") for run in (whole, parts)))
    assert (whole / "completions.jsonl").read_text() == (parts / "completions.jsonl").read_text()
    losses = [
        [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        for run in (whole, parts)
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6
    first = tensors_of(parts / "checkpoints" / "step-000003")
    assert any(
        not torch.equal(value, first[name]) for name, value in tensors_of(parts / "checkpoints" / "step-000006").items()
    )


def test_a_run_leaves_its_folder(make):
    evaluation = {"rows": "rows.jsonl", "num_generations": 2, "max_rows": 2}
    make("out", evaluation=evaluation, run={"track_memory_steps": 1, "prompts_per_step": 2})
    folder = Path("out")
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml",
        "metrics.jsonl",
        "completions.jsonl",
        "evaluations.jsonl",
        "checkpoints",
    }
    config = yaml.safe_load((folder / "config.yaml").read_text())
    assert config["sampling"]["temperature"] == 1.0
    checkpoint = folder / "checkpoints" / "step-000003"
    names = set(load_file(checkpoint / "adapter_model.safetensors"))
    assert "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight" in names
    assert (checkpoint / "adapter_config.json").is_file()
    metrics = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
    for stage in ("capture", "sample", "replay", "prompt_replay"):
        assert metrics[f"time/{stage}_seconds"] > 0
    for stage in ("capture", "replay", "prompt_replay"):
        assert 0 < metrics[f"memory/{stage}_peak_bytes"] <= metrics["memory/peak_bytes"]
    assert metrics["rewards/odd_letters/mean"] > 0
    evaluations = [json.loads(line) for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    assert [(line["step"], line["num_responses"]) for line in evaluations] == [(0, 4), (3, 4)]


def test_an_earlier_checkpoint_can_be_gone_on_from(make):
    make("out", run={"save_steps": 1, "keep_checkpoints": None})
    before = tensors_of(Path("out/checkpoints/step-000003"))
    lines = make("out", is_resumed=True, resume_from=Path("out/checkpoints/step-000001"), run={"save_steps": 1})
    assert "moved the newer checkpoint step-000003 to checkpoints/set-aside" in lines
    assert_equal_bits(before, tensors_of(Path("out/checkpoints/step-000003")))
    assert_equal_bits(before, tensors_of(Path("out/checkpoints/set-aside/step-000003-1")))
    assert len(Path("out/metrics.jsonl").read_text().splitlines()) == 3
    assert len(Path("out/metrics.cut.jsonl").read_text().splitlines()) == 2


def test_further_iterations_and_batch_scaling_run_on_the_engine(make):
    make(
        "out",
        run={"num_iterations": 3},
        grpo={"scale_rewards": "batch", "beta": 0.1},
        sampling={"top_k": 20, "top_p": 0.9},
    )
    ratios = [
        json.loads(line)["sampling/importance_sampling_ratio/max"]
        for line in Path("out/metrics.jsonl").read_text().splitlines()
    ]
    assert ratios[0] == pytest.approx(1.0, abs=1e-4)
    assert ratios[2] > 1.001


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"data": {"rows": "absent.jsonl"}}, "no file absent.jsonl"),
        (
            {"sampling": {"max_completion_length": 54}},
            r"rows\.jsonl line 5 has 11 tokens, the limit is 10 \(the model's 64",
        ),
        ({"sampling": {"max_completion_length": 64}}, "leave no room for a prompt within the model's 64 positions"),
        ({"data": {"max_prompt_tokens": 9}}, r"the limit is 9 \(data\.max_prompt_tokens\)"),
        ({"sampling": {"stop": ["two tokens"]}}, r"sampling\.stop: 'two tokens' is"),
        ({"model": {"name": "nowhere/at/all"}}, "nowhere/at/all"),
        ({"model": {"adapter": {"r": 2, "target_modules": ["no_such_layer"]}}}, "no_such_layer"),
        ({"rewards": [{"function": "exact_mtch"}]}, "did you mean exact_match"),
        ({"evaluation": {"rows": "absent.jsonl"}}, "no file absent.jsonl"),
    ],
)
def test_bad_input_is_refused_before_the_run_folder_exists(make, sections, sentence):
    with pytest.raises(LongStrawError, match=sentence):
        make("out", **sections)
    assert not Path("out").exists()


def test_long_prompts_can_be_skipped(make):
    stops = list(range(60))  # so that responses end soon
    sampling = {"max_completion_length": 54, "stop": stops}
    make("out", sampling=sampling, data={"long_prompts": "skip"}, run={"epochs": 1.0, "max_steps": None})
    rows = {json.loads(line)["row"] for line in Path("out/completions.jsonl").read_text().splitlines()}
    assert rows == {0, 1, 2, 3}


def test_a_used_folder_is_refused_and_left_alone(make):
    make("out")
    before = Path("out/metrics.jsonl").read_text()
    with pytest.raises(InputError, match="is not empty; go on with it by --resume"):
        make("out", model={"name": "nowhere/at/all"})  # refused before a model is looked for
    assert Path("out/metrics.jsonl").read_text() == before


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({}, "step-000003 is already at step 3 of 3; raise run.max_steps"),
        (
            {"model": {"adapter": {"r": 4}}, "run": {"max_steps": 6}},
            "model.adapter.r: 2 -> 4 cannot change within a run",
        ),
        ({"data": {"rows": "other.jsonl"}, "run": {"max_steps": 6}}, "are not the rows step-000003 was trained on"),
    ],
)
def test_resuming_under_what_does_not_fit_is_refused_and_changes_nothing(make, sections, sentence):
    make("out")
    Path("other.jsonl").write_text('{"prompt": "other", "answer": 1}\n')
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    with pytest.raises(InputError, match=sentence):
        make("out", is_resumed=True, **sections)
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


def test_resuming_nothing_is_refused(make):
    with pytest.raises(InputError, match="there is no checkpoint in"):
        make("out", is_resumed=True)
