import pytest

from longstraw.errors import InputError
from longstraw.training.builtin_rewards import answer_length_shaped, contains_answer, exact_match, regex_match

TEXTS = ["4130", " 4130\n", "The code is 4130.", "no"]


def test_exact_match_wants_the_answer_and_nothing_else():
    assert exact_match(TEXTS, answer=[4130] * 4) == [1.0, 1.0, 0.0, 0.0]


def test_contains_answer_takes_it_anywhere():
    assert contains_answer(TEXTS, answer=["4130"] * 4) == [1.0, 1.0, 1.0, 0.0]


def test_a_shorter_answer_earns_more_and_the_bare_one_most():
    shorter, longer = answer_length_shaped(["Code 4130.", "The access code is 4130."], answer=["4130"] * 2)
    assert 0.2 < longer < shorter < 0.8
    assert shorter == pytest.approx(0.2 + 0.6 * 4 / 10)
    assert answer_length_shaped(TEXTS, answer=["4130"] * 4)[:2] == [1.0, 1.0]
    assert answer_length_shaped(TEXTS, answer=["4130"] * 4)[3] == 0.0
    assert answer_length_shaped(["a 41"], answer=["41"], base=0.0, span=1.0) == [0.5]


@pytest.mark.parametrize("function", [exact_match, contains_answer, answer_length_shaped])
def test_verl_rows_carry_the_answer_in_the_reward_model(function):
    assert function(["41", "41"], reward_model=[{"ground_truth": "41"}, None]) == [1.0, None]
    assert function(["41", "41"], answer=["41", None]) == [1.0, None]


@pytest.mark.parametrize("function", [exact_match, contains_answer, answer_length_shaped])
def test_messages_count_as_their_content(function):
    assert function([[{"role": "assistant", "content": " 41"}]], answer=["41"]) == [1.0]


def test_rows_without_any_answer_column_are_refused():
    with pytest.raises(InputError, match="column `answer`, or `reward_model`"):
        exact_match(["41"])


def test_regex_match_is_of_the_whole_response():
    assert regex_match([" 41 ", "41a", "4\n1"], pattern=r"[0-9.\s]+") == [1.0, 0.0, 1.0]
    with pytest.raises(InputError, match="is not a regular expression"):
        regex_match(["a"], pattern="(")
