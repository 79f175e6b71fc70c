"""What every test shares: no network, a fixed seed, and GPU tests only where there is a GPU."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before the first import of transformers, which reads it once
os.environ.setdefault("MPLBACKEND", "Agg")

import pytest
import torch

from parallel.harness import Ranks


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ranks():
    """`ranks(degree).run(case, *arguments)`: see the harness."""
    started = {}

    def of_degree(degree):
        if degree not in started:
            started[degree] = Ranks(degree)
        return started[degree]

    yield of_degree
    for each in started.values():
        each.stop()
