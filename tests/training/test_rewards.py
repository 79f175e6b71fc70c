import asyncio
import math

import pytest

from longstraw.config import RewardConfig
from longstraw.errors import InputError
from longstraw.training.data import Row
from longstraw.training.rewards import (
    Completions,
    RewardFunction,
    TrainerState,
    check_arguments,
    load_reward_functions,
    score_group,
)

STATE = TrainerState(global_step=3, max_steps=9, epoch=0.5)
PLAIN = Row(4, "rows.jsonl line 5", "Which?", {"answer": "41", "other": None})
CHAT = Row(4, "rows.jsonl line 5", ({"role": "user", "content": "Which?"},), {"answer": "41"})
TWO = Completions(["41", "no"], [[4, 1], [5]])


def reward(function, weight=1.0, **arguments):
    return RewardFunction(function.__name__, function, weight, arguments)


def test_a_function_gets_trls_arguments_and_every_column():
    seen = {}

    def everything(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
        seen.update(locals())
        return [0.0, 1.0]

    score_group([reward(everything)], PLAIN, TWO, STATE)
    assert seen["prompts"] == ["Which?", "Which?"]
    assert seen["completions"] == ["41", "no"]
    assert seen["completion_ids"] == [[4, 1], [5]]
    assert seen["trainer_state"].global_step == 3
    assert seen["columns"] == {"answer": ["41", "41"], "other": [None, None]}


def test_a_function_gets_only_what_its_signature_accepts():
    def narrow(completions, answer):
        return [float(a == b) for a, b in zip(completions, answer, strict=True)]

    assert score_group([reward(narrow)], PLAIN, TWO, STATE).totals == [1.0, 0.0]


def test_conversational_rows_give_messages():
    seen = {}

    def messages(prompts, completions):
        seen.update(locals())
        return [0.0, 0.0]

    score_group([reward(messages)], CHAT, TWO, STATE)
    assert seen["prompts"][0] == [{"role": "user", "content": "Which?"}]
    assert seen["completions"] == [[{"role": "assistant", "content": "41"}], [{"role": "assistant", "content": "no"}]]


def test_a_continued_assistant_message_is_part_of_the_completion():
    row = Row(0, "row 0", ({"role": "user", "content": "a"}, {"role": "assistant", "content": "So "}), {})
    seen = []
    score_group([reward(lambda completions: seen.extend(completions) or [0.0, 0.0])], row, TWO, STATE)
    assert seen[0] == [{"role": "assistant", "content": "So 41"}]


def test_async_functions_are_awaited():
    async def later(completions):
        await asyncio.sleep(0)
        return [1.0, 2.0]

    assert score_group([reward(later)], PLAIN, TWO, STATE).totals == [1.0, 2.0]


def test_rewards_are_weighted_and_none_does_not_apply():
    def first(completions):
        return [1.0, None]

    def second(completions):
        return [2, True]

    scored = score_group([reward(first, 10.0), reward(second, 0.5)], PLAIN, TWO, STATE)
    assert scored.totals == [11.0, 0.5]
    assert scored.by_function == {"first": [1.0, None], "second": [2.0, 1.0]}


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0], r"odd: it returned 1 rewards for the 2 responses to rows\.jsonl line 5"),
        ([1.0, 2.0, 3.0], r"odd: it returned 3 rewards for the 2 responses"),
        ([1.0, math.nan], r"odd: it returned nan for response 1 to rows\.jsonl line 5"),
        ([-math.inf, 1.0], r"odd: it returned -inf for response 0"),
        (["1", 1.0], r"odd: it returned '1' for response 0"),
        (1.0, r"odd: it returned float for rows\.jsonl line 5; it must return a list"),
        (None, r"odd: it returned NoneType"),
        ([1.0, None], r"odd: returned None for response 1 to rows\.jsonl line 5, which leaves it without a reward"),
    ],
)
def test_a_bad_return_names_function_row_and_response(returned, sentence):
    def odd(completions):
        return returned

    with pytest.raises(InputError, match=sentence):
        score_group([reward(odd)], PLAIN, TWO, STATE)


def test_an_exception_inside_a_function_keeps_its_type_and_gets_a_note():
    def broken(completions):
        return {}["x"]

    with pytest.raises(KeyError) as caught:
        score_group([reward(broken)], PLAIN, TWO, STATE)
    assert caught.value.__notes__ == ["raised by the reward function broken for rows.jsonl line 5"]


def test_logged_columns_and_metrics_are_kept():
    def logs(completions, log_extra, log_metric):
        log_extra("length", [2, 2])
        log_metric("mine", 1)
        log_metric("mine", 3)
        return [0.0, 0.0]

    scored = score_group([reward(logs)], PLAIN, TWO, STATE)
    assert scored.extra_columns == {"length": [2, 2]}
    assert scored.metrics == {"mine": [1.0, 3.0]}


def test_logged_columns_need_a_value_for_each_response():
    def logs(completions, log_extra):
        log_extra("length", [2])
        return [0.0, 0.0]

    with pytest.raises(InputError, match="'length' got 1 values for the 2 responses"):
        score_group([reward(logs)], PLAIN, TWO, STATE)


def test_functions_are_found_by_dotted_path_file_and_built_in_name(tmp_path, monkeypatch):
    (tmp_path / "my_rewards_module.py").write_text("def one(completions):\n    return [1.0] * len(completions)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    paths = ["my_rewards_module.one", f"{tmp_path}/my_rewards_module.py:one", "exact_match"]
    functions = load_reward_functions([RewardConfig(function=path, weight=2.0) for path in paths])
    assert [function.name for function in functions] == ["one", "one#2", "exact_match"]
    assert [function.weight for function in functions] == [2.0] * 3
    assert score_group(functions, PLAIN, TWO, STATE).totals == [6.0, 4.0]


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("exact_mach", r"no built-in reward of that name; did you mean exact_match\?"),
        ("no_such_package.f", r"no module 'no_such_package'"),
        ("json.dumpz", r"json has no function 'dumpz'; did you mean dump"),
        ("json.zzzzzz", r"json has no function 'zzzzzz'; check the name"),
        ("json.__name__", r"'__name__' is not a function"),
        ("nowhere.py:f", r"no Python file nowhere\.py"),
    ],
)
def test_a_function_that_is_not_there_is_named(path, sentence):
    with pytest.raises(InputError, match=sentence):
        load_reward_functions([RewardConfig(function=path)])


def test_a_module_that_cannot_import_something_else_shows_its_own_error(tmp_path, monkeypatch):
    (tmp_path / "my_broken_module.py").write_text("import no_such_package_either\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package_either"):
        load_reward_functions([RewardConfig(function="my_broken_module.f")])


def test_fixed_arguments_are_passed_and_unknown_ones_refused():
    (function,) = load_reward_functions([RewardConfig(function="regex_match", arguments={"pattern": r"\d+"})])
    check_arguments([function], [])
    assert score_group([function], PLAIN, TWO, STATE).totals == [1.0, 0.0]
    with pytest.raises(InputError, match="regex_match: it takes no argument 'patern'"):
        load_reward_functions([RewardConfig(function="regex_match", arguments={"patern": "x"})])


def test_a_column_a_function_needs_and_rows_lack_is_refused_before_training():
    def needs(completions, solution):
        return []

    with pytest.raises(InputError, match=r"needs the argument 'solution', .* \(answer, other\)"):
        check_arguments([reward(needs)], ["answer", "other"])
    check_arguments([reward(needs)], ["solution"])
    check_arguments([reward(needs, solution=3)], [])


def test_a_function_that_ends_the_program_is_an_error():
    def leaves(completions):
        raise SystemExit(0)

    with pytest.raises(InputError, match=r"reward leaves: it ended the program \(status 0\) for rows\.jsonl line 5"):
        score_group([reward(leaves)], PLAIN, TWO, STATE)


def test_logged_values_are_plain_whatever_they_were():
    def logs(completions, log_extra):
        log_extra("seen", [print, {"a": (1, 2)}])
        return [0.0, 1.0]

    assert score_group([reward(logs)], PLAIN, TWO, STATE).extra_columns == {"seen": [str(print), {"a": [1, 2]}]}


def test_a_file_that_is_no_python_is_one_sentence_with_its_line(tmp_path):
    (tmp_path / "broken.py").write_text("def f(completions):\n    return [1.0\n")
    with pytest.raises(InputError, match=r"broken\.py, line 2: '\[' was never closed\."):
        load_reward_functions([RewardConfig(function=f"{tmp_path}/broken.py:f")])
