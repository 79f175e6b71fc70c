"""The fifth stage: gradients as sums over an update, then divide, clip and step once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class GradientSums:
    """Sums of gradients over `forward_backward` calls, kept in float32 at least.

    A float32 parameter accumulates in its own `.grad`. A narrower one would round at every chunk, so its gradient
    moves to a float32 buffer as soon as autograd has made it; `.grad` shows the sum, rounded, between calls.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._parameters = dict(parameters)
        self._wide: dict[nn.Parameter, Tensor] = {}
        self._starts_fresh = True

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within it, autograd's gradients are added to the sums. The first one after a step starts from zero."""
        narrow = [p for p in self._parameters.values() if p.dtype.itemsize < 4]
        if self._starts_fresh:
            self.clear()
        for parameter in narrow:
            parameter.grad = None
        handles = [p.register_post_accumulate_grad_hook(self._move) for p in narrow]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._show()
            self._starts_fresh = False

    def totals(self) -> dict[str, Tensor | None]:
        """The sum of every parameter so far, None where there is none."""
        return {name: self._total(parameter) for name, parameter in self._parameters.items()}

    def sum_over(self, reduce: Callable[[dict[str, Tensor | None]], Mapping[str, Tensor | None]]) -> None:
        """Replace the sums of this rank by those of all ranks, float32 at least."""
        if self._starts_fresh:  # nothing was collected here since the last step, whose gradient `.grad` still shows
            self.clear()
        mine = self.totals()
        for name, total in reduce(mine).items():
            parameter = self._parameters[name]
            if total is None or total is mine[name]:
                continue
            if parameter.dtype.itemsize < 4:
                self._wide[parameter] = total
            else:
                parameter.grad = total

    def divide(self, denominator: float) -> None:
        """The one division of the update."""
        for parameter in self._parameters.values():
            total = self._total(parameter)
            if total is not None:
                total /= denominator

    def scale(self, factor: float) -> None:
        for parameter in self._parameters.values():
            total = self._total(parameter)
            if total is not None:
                total *= factor

    def finish(self) -> None:
        """Leave the final gradient in `.grad`; the next `collecting` starts from zero."""
        self._show()
        self._wide.clear()
        self._starts_fresh = True

    def clear(self) -> None:
        self._wide.clear()
        for parameter in self._parameters.values():
            parameter.grad = None

    def _total(self, parameter: nn.Parameter) -> Tensor | None:
        return self._wide.get(parameter, parameter.grad)

    @torch.no_grad()
    def _move(self, parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter) and parameter.grad is not None, "the hook runs on a made gradient"
        if parameter in self._wide:
            self._wide[parameter] += parameter.grad
        else:
            self._wide[parameter] = parameter.grad.float()
        parameter.grad = None

    def _show(self) -> None:
        for parameter, total in self._wide.items():
            parameter.grad = total.to(parameter.dtype)
