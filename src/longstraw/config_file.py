"""Read a run configuration from YAML, override keys, and turn every mistake into one sentence.

Apart from `config.py` so that the fields and their meaning can be read without the machinery around them.
"""

from __future__ import annotations

import difflib
import inspect
import re
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from longstraw.config import RunConfig
from longstraw.errors import InputError

Tree = dict[str, object]


class _Loader(yaml.SafeLoader):
    """YAML that reads `1e-6` as a number (PyYAML follows YAML 1.1 and wants `1.0e-6`) and refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[object, object]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise InputError(f"line {key_node.start_mark.line + 1}: the key {key!r} is given twice.")
            seen.add(key)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The checked configuration of a YAML file with `a.b=c` overrides applied, last one winning.

    Raises `InputError` that names the file or the dotted key, for an unknown key also the nearest known one.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"configuration: there is no file {path}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"configuration: {path} cannot be read ({error}).") from None
    tree = _parse(text, str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise InputError(f"configuration: {path} must hold sections such as model: and data:, not {tree!r}.")
    for override in overrides:
        _override(tree, override)
    return check_config(tree)


def check_config(tree: Mapping[str, object]) -> RunConfig:
    """Validate one field after the other, then what fields say together. Raises `InputError` for the first mistake."""
    try:
        config = RunConfig.model_validate(dict(tree))
    except ValidationError as error:
        # An unknown key is usually the misspelling of a missing one, so it is the more useful thing to name.
        errors = sorted(error.errors(), key=lambda details: details["type"] != "extra_forbidden")
        raise InputError(_sentence(errors, tree)) from None
    _check_together(config)
    return config


def dump_config(config: RunConfig) -> str:
    """YAML that `load_config` reads back as the same configuration, every default written out."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)


def changed_keys(old: Mapping[str, object], new: Mapping[str, object], prefix: str = "") -> list[str]:
    """Dotted keys whose values differ, each as `key: old -> new`."""
    changes: list[str] = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key), new.get(key)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            changes += changed_keys(before, after, f"{prefix}{key}.")
        elif before != after:
            changes.append(f"{prefix}{key}: {before} -> {after}")
    return changes


def _parse(text: str, owner: str) -> object:
    try:
        return yaml.load(text, Loader=_Loader)
    except InputError as error:
        raise InputError(f"configuration: {owner}, {error}") from None
    except yaml.YAMLError as error:
        problem = " ".join(str(error).split())
        raise InputError(f"configuration: {owner} is not valid YAML ({problem}).") from None


def _override(tree: Tree, override: str) -> None:
    dotted, equals, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        raise InputError(f"--set {override}: write it as section.key=value.")
    value = _parse(text, f"--set {override}")
    node: object = tree
    for depth, key in enumerate(keys[:-1]):
        if isinstance(node, list):
            node = node[_list_index(node, key, override)]
            continue
        assert isinstance(node, dict), "only sections and lists are descended into"
        if node.get(key) is None:
            node[key] = {}
        node = node[key]
        if not isinstance(node, dict | list):
            raise InputError(f"--set {override}: {'.'.join(keys[: depth + 1])} is a value and has no keys.")
    if isinstance(node, list):
        node[_list_index(node, keys[-1], override)] = value
    else:
        assert isinstance(node, dict), "only sections and lists are descended into"
        node[keys[-1]] = value


def _list_index(items: list[object], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(items):
        raise InputError(f"--set {override}: {key!r} is not a position in a list of {len(items)} (the first is 0).")
    return int(key)


def _sentence(errors: Sequence[ErrorDetails], tree: Mapping[str, object]) -> str:
    """One sentence for the first error; members of a union that failed at the same key are joined by "or"."""
    details = errors[0]
    path = _path_in(tree, details)
    dotted = _dotted(path)
    kind = details["type"]
    if kind == "extra_forbidden":
        return _unknown_key(path)
    if kind == "missing":
        return f"configuration: {dotted} is missing; it has no default."
    if kind == "model_type":
        return f"configuration: {dotted} must be a section with keys of its own, got {details['input']!r}."
    messages = [_plain(error["msg"]) for error in errors if _path_in(tree, error) == path]
    return f"configuration: {dotted} {' or '.join(dict.fromkeys(messages))}, got {details['input']!r}."


def _plain(message: str) -> str:
    """A pydantic message as the end of a sentence that starts with the key."""
    message = message.replace("Input should be", "must be").replace("a valid tuple", "a list")
    message = message.replace("Tuple should", "must").replace(" after validation", "")
    return message[0].lower() + message[1:]


def _path_in(tree: Mapping[str, object], details: ErrorDetails) -> list[str | int]:
    """The error's location without the labels pydantic adds for the members of a union."""
    path: list[str | int] = []
    node: object = tree
    location = details["loc"]
    for depth, part in enumerate(location):
        if _holds(node, part):
            node = node[part]  # type: ignore[index]  # it holds the part
        elif not (details["type"] == "missing" and depth == len(location) - 1):
            continue
        path.append(part)
    return path


def _holds(node: object, part: str | int) -> bool:
    if isinstance(node, list | tuple):
        return isinstance(part, int) and part < len(node)
    return isinstance(node, Mapping) and part in node


def _dotted(path: Sequence[str | int]) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text or "the file"


def _unknown_key(path: Sequence[str | int]) -> str:
    section = _section_at(path[:-1])
    known = list(section.model_fields)
    key = str(path[-1])
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
    if near:
        advice = f"did you mean {_dotted([*path[:-1], near[0]])}?"
    else:
        elsewhere = [name for name in RunConfig.model_fields if key in _section_at([name]).model_fields]
        known_here = f"known keys there are {', '.join(known)}."
        advice = f"did you mean {elsewhere[0]}.{key}?" if elsewhere else known_here
    return f"configuration: unknown key {_dotted(path)}; {advice}"


def _section_at(path: Sequence[str | int]) -> type[BaseModel]:
    section: type[BaseModel] = RunConfig
    for part in path:
        if isinstance(part, str):
            section = _model_in(section.model_fields[part].annotation) or section
    return section


def _model_in(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as `tuple[RewardConfig, ...] | None`."""
    if inspect.isclass(annotation):  # false for list[int] and the like
        return annotation if issubclass(annotation, BaseModel) else None
    for argument in typing.get_args(annotation):
        found = _model_in(argument)
        if found is not None:
            return found
    return None


def _check_together(config: RunConfig) -> None:
    run = config.run
    if (run.max_steps is None) == (run.epochs is None):
        raise InputError("configuration: give one of run.max_steps and run.epochs.")
    if run.max_steps is not None and run.max_steps % run.num_iterations:
        raise InputError(
            f"configuration: run.max_steps ({run.max_steps}) must be a multiple of run.num_iterations "
            f"({run.num_iterations}), so that every response is used equally often."
        )
    if run.save_steps is not None and run.save_steps % run.num_iterations:
        raise InputError(
            f"configuration: run.save_steps ({run.save_steps}) must be a multiple of run.num_iterations "
            f"({run.num_iterations}): a checkpoint cannot fall between two steps on the same responses."
        )
    grpo = config.grpo
    if grpo.beta > 0 and config.model.adapter is None:
        raise InputError(
            "configuration: grpo.beta > 0 needs model.adapter, because the reference policy is the model with its "
            "adapter off; set grpo.beta to 0 or train an adapter."
        )
    parallel = config.parallel
    if parallel.context % parallel.expert:
        raise InputError(
            f"configuration: parallel.expert ({parallel.expert}) must divide parallel.context ({parallel.context}), "
            "whose ranks share out the experts."
        )
    if run.prompts_per_step < parallel.data:
        raise InputError(
            f"configuration: run.prompts_per_step ({run.prompts_per_step}) must be at least parallel.data "
            f"({parallel.data}): each of its ranks takes a prompt of every step."
        )
    if config.model.quantization is not None and config.model.adapter is None:
        raise InputError(
            "configuration: model.quantization needs model.adapter, because quantised weights cannot be trained."
        )
    if grpo.delta is not None and grpo.loss_type in ("cispo", "sapo"):
        raise InputError(f"configuration: grpo.delta has no meaning with grpo.loss_type {grpo.loss_type}; remove it.")
