import random

import numpy
import torch

from longstraw.training.randomness import random_state, restore_random_state, seed_everything, undisturbed_randomness


def draw():
    return torch.rand(3).tolist(), random.random(), numpy.random.rand()


def test_generators_go_on_from_a_kept_state():
    draw()
    state = random_state()
    expected = draw()
    draw()
    restore_random_state(state)
    assert draw() == expected


def test_draws_inside_do_not_disturb_draws_after():
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with undisturbed_randomness():
        draw()
    assert draw() == expected
