"""Where LongStraw meets a stock layer: the attention registry, the layer's cache argument, and replaced forwards.

A layer is called with `chunk=seam`; the keyword travels through the layer's own forward to the registered attention
function, which hands queries, keys and values to the seam. The cache passes keys through unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

ATTENTION_NAME = "longstraw"


class AttentionSeam(Protocol):
    """What one layer's attention does with its projections."""

    def attend(self, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, scale: float, sinks_H: Tensor | None) -> Tensor:
        """Attention output `[B, H, T, D]`."""
        ...


class PassThroughCache:
    """A one-layer cache for attention layers: the seam owns the state, so keys and values pass through."""

    def update(self, k: Tensor, v: Tensor, layer_idx: int, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return k, v


@contextmanager
def replaced_forwards(modules: Sequence[nn.Module], forward: Callable[..., object]) -> Iterator[None]:
    """Within it calling one of the modules calls `forward(module, ...)`; on exit they are as before."""
    own_forwards = [module.__dict__.get("forward") for module in modules]  # set by whoever else replaced it
    try:
        for module in modules:
            module.forward = partial(forward, module)
        yield
    finally:
        for module, own_forward in zip(modules, own_forwards, strict=True):
            if own_forward is not None:
                module.forward = own_forward
            elif "forward" in module.__dict__:
                del module.forward


def _attention(  # noqa: PLR0913 (the registry prescribes the signature)
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    *,
    chunk: AttentionSeam,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """The registry's signature: `[B, H, T, D]` in, `[B, T, H, D]` out. `s_aux` are gpt_oss's sinks."""
    return chunk.attend(query, key, value, scaling, s_aux).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
