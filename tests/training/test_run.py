import pytest

from longstraw.config import SamplingConfig
from longstraw.records import SamplingSettings
from longstraw.training.data import Row
from longstraw.training.run import draw_seed, num_steps, rows_fingerprint, sampling_settings


@pytest.mark.parametrize(
    ("run", "num_rows", "expected"),
    [
        ({"max_steps": 4}, 5, 4),
        ({"max_steps": None, "epochs": 1.0, "prompts_per_step": 2}, 5, 3),
        ({"max_steps": None, "epochs": 2.0, "prompts_per_step": 5}, 5, 2),
        ({"max_steps": None, "epochs": 0.1}, 5, 1),
        ({"max_steps": None, "epochs": 1.0, "prompts_per_step": 1, "num_iterations": 2, "save_steps": 4}, 5, 10),
    ],
)
def test_steps_follow_from_epochs(runner, run, num_rows, expected):
    assert num_steps(runner.config(run=run), num_rows) == expected


def test_sampling_settings_carry_every_option():
    config = SamplingConfig(max_completion_length=7, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    assert sampling_settings(config, (4, 5), 6) == SamplingSettings(7, 0.5, 3, 0.9, 0.1, (4, 5), 6)


def test_seeds_differ_for_different_draws_and_fit_torch():
    seeds = {draw_seed(1, step, place, row) for step in range(5) for place in range(5) for row in range(5)}
    assert len(seeds) == 125
    assert draw_seed(1, 2) == draw_seed(1, 2) != draw_seed(12)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_fingerprint_sees_prompts_columns_and_order():
    rows = [Row(0, "a", "x", {"answer": 1}), Row(1, "b", "y", {"answer": 2})]
    same = [Row(0, "elsewhere", "x", {"answer": 1}), Row(1, "b", "y", {"answer": 2})]
    changed = [Row(0, "a", "x", {"answer": 3}), rows[1]]
    assert rows_fingerprint(rows) == rows_fingerprint(same)
    assert len({rows_fingerprint(found) for found in (rows, rows[::-1], changed, rows[:1])}) == 4
