"""The demo's reward: every step towards the bare code earns more."""

import itertools
from pathlib import Path

import pytest

from longstraw.config import RewardConfig
from longstraw.training.rewards import load_reward_functions
from retrieval_reward import bare_code

CODE = "4130"


def test_every_step_towards_the_bare_code_earns_more():
    numbers = ["no idea", "9999", "4999", "4199", "4139", "4130"]
    sentences = [
        "no idea",
        "Well, I think it is 4130, as it says.",
        "The red access code is 4130.",
        "It is 4130.",
        "4130",
    ]
    for texts in (numbers, sentences):
        rewards = bare_code(texts, [CODE] * len(texts))
        assert all(low < high for low, high in itertools.pairwise(rewards))
        assert (rewards[0], rewards[-1]) == (0.0, 1.0)


def test_spaces_around_the_code_do_not_count_and_other_numbers_earn_for_four_digits_only():
    assert bare_code([" 4130\n", "41300", "413", "4139."], [CODE] * 4)[0] == 1.0
    assert bare_code(["41", "99999", "12345 "], [CODE] * 3) == [0.0, 0.0, 0.0]


def test_messages_are_scored_by_their_text():
    assert bare_code([[{"role": "assistant", "content": "4130"}]], [CODE]) == [1.0]


def test_each_completion_is_compared_with_its_own_answer():
    assert bare_code(["1111", "2222"], ["1111", "2222"]) == [1.0, 1.0]
    with pytest.raises(ValueError, match="argument"):
        bare_code(["1111", "2222"], ["1111"])


def test_trainer_finds_it_by_its_path():
    path = Path(__file__).parents[2] / "examples" / "retrieval_reward.py"
    (function,) = load_reward_functions([RewardConfig(function=f"{path}:bare_code")])
    assert function.name == "bare_code"
    assert function.missing_arguments(["completions", "answer"]) == []
