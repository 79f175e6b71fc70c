"""Reward functions: found by name, called by TRL's conventions, their numbers checked before the update sees them.

A function is called once for each group with keyword arguments: `prompts`, `completions`, `completion_ids`,
`trainer_state`, `log_extra`, `log_metric` and every column of the row but `prompt`, each column repeated for the G
responses; only what its signature accepts. It returns one number a response, or None where it does not apply.
"""

from __future__ import annotations

import asyncio
import difflib
import importlib
import importlib.util
import inspect
import json
import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import cast

from longstraw.config import RewardConfig
from longstraw.errors import InputError
from longstraw.training.builtin_rewards import BUILTIN_REWARDS
from longstraw.training.data import Message, Row

# What a call offers besides the row's columns.
STANDARD_ARGUMENTS = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")


@dataclass(frozen=True)
class TrainerState:
    """Where training stands, for rewards that change on the way (TRL's `trainer_state`)."""

    global_step: int  # optimizer steps taken
    max_steps: int
    epoch: float  # rows drawn / rows


@dataclass(frozen=True)
class RewardFunction:
    """One function of the reward, its weight, and what its signature takes."""

    name: str
    function: Callable[..., object]
    weight: float
    arguments: Mapping[str, object]  # fixed in the configuration

    def accepts(self, argument: str) -> bool:
        parameters = inspect.signature(self.function).parameters
        takes_all = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        return takes_all or argument in parameters

    def missing_arguments(self, offered: Sequence[str]) -> list[str]:
        """Arguments without a default that nobody would give."""
        parameters = inspect.signature(self.function).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
        return [p.name for p in needed if p.kind is p.POSITIONAL_ONLY or p.name not in {*offered, *self.arguments}]


@dataclass(frozen=True)
class Completions:
    """The G responses to one row, as text and as token ids."""

    texts: Sequence[str]
    token_ids: Sequence[list[int]]


@dataclass(frozen=True)
class ScoredGroup:
    """Rewards of one group: the weighted sum for each response, and what each function gave."""

    totals: list[float]
    by_function: Mapping[str, list[float | None]]
    extra_columns: Mapping[str, list[object]] = field(default_factory=dict)  # log_extra
    metrics: Mapping[str, list[float]] = field(default_factory=dict)  # log_metric


def load_reward_functions(configs: Sequence[RewardConfig]) -> list[RewardFunction]:
    """Find every function. Raises `InputError` that names one which is not there or cannot be called."""
    functions: list[RewardFunction] = []
    for config in configs:
        function = _find(config.function)
        name = config.function.rpartition(":")[2].rpartition(".")[2]
        count = sum(other.name.partition("#")[0] == name for other in functions)
        reward = RewardFunction(
            name if count == 0 else f"{name}#{count + 1}", function, config.weight, config.arguments
        )
        unknown = [argument for argument in config.arguments if not reward.accepts(argument)]
        if unknown:
            raise InputError(f"reward {config.function}: it takes no argument {unknown[0]!r}.")
        functions.append(reward)
    return functions


def check_arguments(functions: Sequence[RewardFunction], columns: Sequence[str]) -> None:
    """Refuse, before training, a function that needs a column the rows lack. Raises `InputError` naming both."""
    for function in functions:
        missing = function.missing_arguments([*STANDARD_ARGUMENTS, *columns])
        if missing:
            listed = ", ".join(columns) or "none"
            raise InputError(
                f"reward {function.name}: it needs the argument {missing[0]!r}, which is neither a column of the rows "
                f"({listed}) nor in its configured arguments."
            )


def score_group(
    functions: Sequence[RewardFunction], row: Row, completions: Completions, state: TrainerState
) -> ScoredGroup:
    """Call every function on one group and add up.

    Raises `InputError` that names the function, the row and the response for a wrong count, a value that is no finite
    number, and a response for which every function returned None. An exception inside a function keeps its own type.
    """
    num_responses = len(completions.texts)
    extras: dict[str, list[object]] = {}
    metrics: dict[str, list[float]] = {}

    def log_extra(column: str, values: Sequence[object]) -> None:
        extras.setdefault(column, []).extend(values)

    def log_metric(name: str, value: float) -> None:
        metrics.setdefault(name, []).append(float(value))

    offered: dict[str, object] = {name: [value] * num_responses for name, value in row.columns.items()}
    offered |= {
        "prompts": [row.prompt if isinstance(row.prompt, str) else _messages(row.prompt)] * num_responses,
        "completions": [_completion(row, text) for text in completions.texts],
        "completion_ids": [list(ids) for ids in completions.token_ids],
        "trainer_state": state,
        "log_extra": log_extra,
        "log_metric": log_metric,
    }
    by_function: dict[str, list[float | None]] = {}
    for function in functions:
        returned = _call(function, {**offered, **function.arguments}, row)
        by_function[function.name] = _checked_values(function.name, row, returned, num_responses)
    totals = [_total(functions, by_function, row, index) for index in range(num_responses)]
    _check_extras(extras, row, num_responses)
    plain: dict[str, list[object]] = json.loads(json.dumps(extras, default=str))  # as the log has them
    return ScoredGroup(totals, by_function, plain, metrics)


def _find(path: str) -> Callable[..., object]:
    if path in BUILTIN_REWARDS:
        return BUILTIN_REWARDS[path]
    if ":" in path:
        file, _, name = path.rpartition(":")
        module = _module_from_file(Path(file), path)
    else:
        module_name, dot, name = path.rpartition(".")
        if not dot:
            raise InputError(
                f"reward {path}: there is no built-in reward of that name; {_nearest(path, list(BUILTIN_REWARDS))}"
                "a function of yours is written package.module.function or file.py:function."
            )
        module = _module(module_name, path)
    found = vars(module).get(name)
    if found is None:
        near = _nearest(name, [key for key, value in vars(module).items() if callable(value)])
        raise InputError(
            f"reward {path}: {module.__name__} has no function {name!r}; {near or 'check the name.'}".strip()
        )
    if not callable(found):
        raise InputError(f"reward {path}: {name!r} is not a function.")
    return cast(Callable[..., object], found)


def _module(module_name: str, path: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there; something it imports is not
        raise InputError(f"reward {path}: there is no module {error.name!r} to import from here.") from None


def _module_from_file(file: Path, path: str) -> ModuleType:
    if file.suffix != ".py" or not file.is_file():
        raise InputError(f"reward {path}: there is no Python file {file}.")
    spec = importlib.util.spec_from_file_location(f"reward_file_{file.stem}", file)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look modules up by name
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise InputError(f"reward {path}: {error.filename}, line {error.lineno}: {error.msg}.") from None
    return module


def _nearest(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {near[0]}? " if near else ""


def _messages(prompt: Sequence[Message]) -> list[dict[str, str]]:
    return [dict(message) for message in prompt]


def _completion(row: Row, text: str) -> str | list[dict[str, str]]:
    if isinstance(row.prompt, str):
        return text
    last = row.prompt[-1]
    begun = last["content"] if last["role"] == "assistant" else ""  # a prompt that the response continues
    return [{"role": "assistant", "content": begun + text}]


def _call(function: RewardFunction, offered: Mapping[str, object], row: Row) -> object:
    accepted = {name: value for name, value in offered.items() if function.accepts(name)}
    try:
        returned = function.function(**accepted)
        return asyncio.run(_awaited(returned)) if inspect.isawaitable(returned) else returned
    except SystemExit as error:
        raise InputError(
            f"reward {function.name}: it ended the program (status {error.code}) for {row.origin}; let it raise an "
            "error instead."
        ) from error
    except Exception as error:
        error.add_note(f"raised by the reward function {function.name} for {row.origin}")
        raise


async def _awaited(returned: object) -> object:
    assert inspect.isawaitable(returned), "asked before"
    return await returned


def _checked_values(name: str, row: Row, returned: object, num_responses: int) -> list[float | None]:
    if not isinstance(returned, list | tuple):
        raise InputError(
            f"reward {name}: it returned {type(returned).__name__} for {row.origin}; it must return a list of numbers."
        )
    if len(returned) != num_responses:
        raise InputError(
            f"reward {name}: it returned {len(returned)} rewards for the {num_responses} responses to {row.origin}."
        )
    values: list[float | None] = []
    for index, value in enumerate(returned):
        if value is not None and not (isinstance(value, numbers.Real) and math.isfinite(value)):
            raise InputError(
                f"reward {name}: it returned {value!r} for response {index} to {row.origin}; it must be a finite "
                "number, or None where the reward does not apply."
            )
        values.append(None if value is None else float(value))
    return values


def _total(
    functions: Sequence[RewardFunction], by_function: Mapping[str, list[float | None]], row: Row, index: int
) -> float:
    values = [(function.weight, by_function[function.name][index]) for function in functions]
    given = [weight * value for weight, value in values if value is not None]
    if not given:
        names = " and ".join(function.name for function in functions)
        raise InputError(
            f"reward {names}: returned None for response {index} to {row.origin}, which leaves it without a reward; "
            "at least one function must give a number."
        )
    return math.fsum(given)


def _check_extras(extras: Mapping[str, Sequence[object]], row: Row, num_responses: int) -> None:
    for column, values in extras.items():
        if len(values) != num_responses:
            raise InputError(
                f"log_extra: column {column!r} got {len(values)} values for the {num_responses} responses to "
                f"{row.origin}."
            )
