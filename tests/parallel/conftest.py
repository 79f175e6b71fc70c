"""The ranks that multi-process tests share."""

import pytest

from parallel.harness import Ranks


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
