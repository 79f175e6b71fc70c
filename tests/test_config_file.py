import pytest
import yaml

from longstraw.config_file import changed_keys, check_config, dump_config, load_config
from longstraw.errors import InputError

TEXT = """
model: {name: some/model}
data: {rows: rows.jsonl}
rewards: [{function: exact_match}]
run: {output_dir: out, max_steps: 4}
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(TEXT)
    return path


def test_the_written_configuration_reads_back_as_the_same(path):
    config = load_config(path, ["optimizer.betas=[0.8, 0.9]", "sampling.stop=[3, <end>]", "model.adapter.r=4"])
    path.write_text(dump_config(config))
    assert load_config(path) == config


@pytest.mark.parametrize(
    ("override", "read"),
    [
        ("optimizer.learning_rate=1e-4", lambda c: c.optimizer.learning_rate == 1e-4),
        ("optimizer.learning_rate=2", lambda c: c.optimizer.learning_rate == 2.0),
        ("run.save_steps=null", lambda c: c.run.save_steps is None),
        ("model.adapter=null", lambda c: c.model.adapter is None),
        ("data.shuffle=false", lambda c: c.data.shuffle is False),
        ("rewards.0.weight=0.5", lambda c: c.rewards[0].weight == 0.5),
        ("evaluation.rows=held_out.jsonl", lambda c: c.evaluation.rows == "held_out.jsonl"),
        ("data.rows=a=b.jsonl", lambda c: c.data.rows == "a=b.jsonl"),
        (
            "model.adapter.target_modules=[q_proj, v_proj]",
            lambda c: c.model.adapter.target_modules == ("q_proj", "v_proj"),
        ),
        (
            "rewards=[{function: regex_match, arguments: {pattern: '[0-9]'}}]",
            lambda c: c.rewards[0].arguments == {"pattern": "[0-9]"},
        ),
    ],
)
def test_overrides_are_typed_as_yaml(path, override, read):
    assert read(load_config(path, [override]))


def test_the_last_override_wins(path):
    assert load_config(path, ["run.max_steps=5", "run.max_steps=6"]).run.max_steps == 6


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("optimizer.learning_rat=1", r"unknown key optimizer\.learning_rat; did you mean optimizer\.learning_rate\?"),
        ("learning_rate=1", r"unknown key learning_rate; did you mean optimizer\.learning_rate\?"),
        ("model.adapter.alfa=3", r"unknown key model\.adapter\.alfa; did you mean model\.adapter\.alpha\?"),
        ("rewards.0.fuction=x", r"unknown key rewards\[0\]\.fuction; did you mean rewards\[0\]\.function\?"),
        ("run.zzz=1", r"unknown key run\.zzz; known keys there are output_dir, max_steps"),
        ("run.max_steps=many", r"run\.max_steps must be a valid integer, got 'many'"),
        ("run.max_steps=true", r"run\.max_steps must be a valid integer, got True"),
        ("run.max_steps=0", r"run\.max_steps must be greater than or equal to 1, got 0"),
        ("sampling.temperature=hot", r"sampling\.temperature must be a valid number, got 'hot'"),
        ("grpo.epsilon=.nan", r"grpo\.epsilon must be a finite number"),
        ("grpo.loss_type=ppo", r"grpo\.loss_type must be 'grpo'.* or 'sapo', got 'ppo'"),
        ("engine=3", r"engine must be a section with keys of its own, got 3"),
        ("rewards=[]", r"rewards must have at least 1 item"),
        ("run.output_dir=null", r"run\.output_dir must be a valid string, got None"),
        ("evaluation={split: a}", r"evaluation\.rows is missing; it has no default"),
        (
            "model.adapter.target_modules=1",
            r"model\.adapter\.target_modules must be a valid string or must be a list, got 1",
        ),
        ("run.epochs=2", r"give one of run\.max_steps and run\.epochs"),
        ("run.num_iterations=3", r"run\.max_steps \(4\) must be a multiple of run\.num_iterations \(3\)"),
        ("grpo={beta: 0.1, delta: 2.0, loss_type: cispo}", r"grpo\.delta has no meaning with grpo\.loss_type cispo"),
        ("model={name: a, adapter: null, quantization: nf4}", r"model\.quantization needs model\.adapter"),
        ("run", r"--set run: write it as section\.key=value"),
        ("run.max_steps.x=1", r"--set run\.max_steps\.x=1: run\.max_steps is a value and has no keys"),
        ("rewards.3.weight=1", r"'3' is not a position in a list of 1"),
        ("run.seed=[1", r"--set run\.seed=\[1 is not valid YAML"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_the_key(path, override, sentence):
    with pytest.raises(InputError, match=sentence) as caught:
        load_config(path, [override])
    assert "\n" not in str(caught.value)


def test_beta_without_an_adapter_is_refused(path):
    with pytest.raises(InputError, match=r"grpo\.beta > 0 needs model\.adapter"):
        load_config(path, ["grpo.beta=0.1", "model.adapter=null"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "model is missing"),
        ("- 1", "must hold sections"),
        ("a: [1", "is not valid YAML"),
        (TEXT + "run: {}", "the key 'run' is given twice"),
    ],
)
def test_a_broken_file_is_one_sentence(path, text, sentence):
    path.write_text(text)
    with pytest.raises(InputError, match=sentence):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no file .*nowhere\.yaml"):
        load_config(tmp_path / "nowhere.yaml")


def test_numbers_with_an_exponent_are_numbers_as_in_yaml_1_2(path):
    path.write_text(TEXT + "optimizer: {learning_rate: 1e-5, eps: 1E-7}")
    optimizer = load_config(path).optimizer
    assert (optimizer.learning_rate, optimizer.eps) == (1e-5, 1e-7)


def test_changed_keys_name_old_and_new_value():
    old = yaml.safe_load(TEXT)
    new = {**old, "run": {"output_dir": "out", "max_steps": 5}, "engine": {"chunk_tokens": 3}}
    assert changed_keys(old, new) == ["run.max_steps: 4 -> 5", "engine: None -> {'chunk_tokens': 3}"]
    assert changed_keys(old, old) == []


def test_a_checked_configuration_needs_no_file():
    assert check_config(yaml.safe_load(TEXT)).run.max_steps == 4
