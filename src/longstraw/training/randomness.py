"""The state of every random generator a run may draw from, kept and put back.

Sampling does not depend on it: its seeds follow from the run's seed and the position. Reward functions may.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy
import torch


@dataclass(frozen=True)
class RandomState:
    """States of torch's, Python's and numpy's global generators, as plain values."""

    torch_cpu: torch.Tensor
    torch_cuda: list[torch.Tensor]  # one for each device
    python: tuple[object, ...]
    numpy: tuple[str, list[int], int, int, float]


def random_state() -> RandomState:
    """The states now."""
    kind, keys, place, has_gauss, gauss = cast(
        "tuple[str, numpy.ndarray, int, int, float]", numpy.random.get_state(legacy=True)
    )
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return RandomState(torch.get_rng_state(), cuda, random.getstate(), (kind, keys.tolist(), place, has_gauss, gauss))


def restore_random_state(state: RandomState) -> None:
    """Go on drawing from where `state` was taken. CUDA's is left alone if the number of devices has changed."""
    torch.set_rng_state(state.torch_cpu)
    if torch.cuda.is_available() and len(state.torch_cuda) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state.torch_cuda)
    random.setstate(state.python)
    kind, keys, place, has_gauss, gauss = state.numpy
    numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), place, has_gauss, gauss))


@contextmanager
def undisturbed_randomness() -> Iterator[None]:
    """What is drawn inside changes nothing of what is drawn after."""
    state = random_state()
    try:
        yield
    finally:
        restore_random_state(state)


def seed_everything(seed: int) -> None:
    """Seed all generators; the first weights of an adapter come from torch's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
