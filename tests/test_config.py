import json
import typing
from pathlib import Path

import pytest
from pydantic import BaseModel

from longstraw.config import GRPOConfig, RunConfig, Section
from longstraw.config_file import check_config

MINIMAL = {
    "model": {"name": "some/model"},
    "data": {"rows": "rows.jsonl"},
    "rewards": [{"function": "exact_match"}],
    "run": {"output_dir": "out", "max_steps": 4},
}
DOCUMENT = Path(__file__).parents[1] / "docs/configuration.md"


def sections(model=RunConfig, prefix=""):
    """Every section class with the dotted path that leads to it."""
    yield prefix, model
    for name, field in model.model_fields.items():
        for section in sections_in(field.annotation):
            yield from sections(section, f"{prefix}.{name}" if prefix else name)


def sections_in(annotation):
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for argument in typing.get_args(annotation) for section in sections_in(argument)]


@pytest.mark.parametrize("section", list(dict.fromkeys(section for prefix, section in sections() if prefix)))
def test_every_field_is_documented(section):
    assert section.__doc__ != Section.__doc__
    assert [name for name, field in section.model_fields.items() if not field.description] == []


def table(section):
    """The section's table as the configuration page has it: key, default, meaning."""
    lines = ["| key | default | meaning |", "|---|---|---|"]
    for name, field in section.model_fields.items():
        if sections_in(field.annotation) and name != "metrics":
            continue  # has a table of its own
        default = "required" if field.is_required() else f"`{json.dumps(field.get_default(call_default_factory=True))}`"
        lines.append(f"| `{name}` | {default} | {field.description} |")
    return "\n".join(lines)


@pytest.mark.parametrize("section", [section for prefix, section in sections() if prefix])
def test_the_configuration_page_has_every_key_as_the_code_documents_it(section):
    assert table(section) in DOCUMENT.read_text(encoding="utf-8")


def test_defaults_are_those_of_trl():
    config = check_config(MINIMAL)
    assert config.grpo == GRPOConfig(
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=None,
        delta=None,
        beta=0.0,
        importance_sampling_level="token",
        scale_rewards="group",
        mask_truncated_completions=False,
    )
    sampling = config.sampling
    assert (sampling.num_generations, sampling.max_completion_length, sampling.temperature) == (8, 512, 1.0)
    assert (sampling.top_p, sampling.top_k, sampling.min_p) == (1.0, 0, None)
    assert (config.optimizer.learning_rate, config.run.num_iterations) == (1e-6, 1)


@pytest.mark.parametrize(("given", "meant"), [(True, "group"), (False, "none"), ("batch", "batch")])
def test_scale_rewards_takes_the_booleans_of_trl(given, meant):
    assert GRPOConfig(scale_rewards=given).scale_rewards == meant


def test_a_configuration_cannot_be_changed_after_it_was_checked():
    config = check_config(MINIMAL)
    with pytest.raises(ValueError, match="frozen"):
        config.run.max_steps = 5
