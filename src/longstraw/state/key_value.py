"""Keys and values of one node in one attention layer: one buffer of the final size, filled chunk by chunk.

Shape suffixes: N tokens kept, T tokens of a chunk, K key heads, D head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longstraw.ops.attention import KeyRun
from longstraw.ops.kernels import wide_dtype
from longstraw.state.residency import ON_DEVICE, Residency


class KeyValueState:
    """The extent of a node in one layer, and its cotangents while a replay needs them.

    Owns `key`, `value` `[N, K, D]` in the model's dtype and, between `open_cotangents` and `close_cotangents`,
    buffers of the same shape in float32. `keep_tokens` bounds N from above: a sliding-window layer whose state is a
    constant keeps its last window only. Buffers are made at the first write, when head count and dtype are known; they
    lie where `residency` says, but a bounded state always on the device.
    """

    def __init__(
        self, *, start: int, num_tokens: int, keep_tokens: int | None = None, residency: Residency = ON_DEVICE
    ) -> None:
        self.start = start
        self.capacity = num_tokens if keep_tokens is None else min(num_tokens, keep_tokens)
        self._residency = residency if self.capacity == num_tokens else ON_DEVICE
        self.num_written = 0
        self._buffers: tuple[Tensor, Tensor] | None = None
        self._cotangents: tuple[Tensor, Tensor] | None = None

    def write(self, k_KTD: Tensor, v_KTD: Tensor) -> None:
        """Append a chunk's keys and values; beyond the capacity the oldest fall out."""
        if self._buffers is None:
            key, value = (
                self._residency.empty((self.capacity, new.shape[0], new.shape[-1]), new) for new in (k_KTD, v_KTD)
            )
            self._buffers = (key, value)
        kept = min(self.num_written, self.capacity)
        for buffer, new in zip(self._buffers, (k_KTD, v_KTD), strict=True):
            new_TKD = new.detach().transpose(0, 1)
            surplus = kept + new_TKD.shape[0] - self.capacity
            if surplus <= 0:
                self._residency.write(buffer[kept : kept + new_TKD.shape[0]], new_TKD)
            elif surplus >= kept:
                buffer.copy_(new_TKD[new_TKD.shape[0] - self.capacity :])
            else:
                buffer[: kept - surplus] = buffer[surplus:kept].clone()
                buffer[kept - surplus :] = new_TKD
        self.num_written += k_KTD.shape[1]

    @property
    def num_dropped(self) -> int:
        """How many of the tokens written first are no longer kept."""
        return max(0, self.num_written - self.capacity)

    def run(self, end: int | None = None) -> list[KeyRun]:
        """The kept keys, or those of the node's first `end` tokens: one run of views, or none when empty."""
        if self._buffers is None or end == 0:
            return []
        first = self.num_dropped
        kept = self.num_written - first
        assert end is None or first == 0, "a state that dropped its oldest keys is read as a whole"
        d_key, d_value = self._cotangents or (None, None)
        whole = KeyRun(*self._buffers, self.start + first, d_key, d_value, self._residency.staging)
        return [whole.cut(0, kept if end is None else end)]

    def complete_run(self, *, constant: bool) -> KeyRun:
        """The keys of all tokens, written or not, as replay finds them. Cotangents not yet there take no memory."""
        assert self._buffers is not None, "a chunk was written"
        key, value = self._buffers
        wide = wide_dtype(key.dtype)
        if constant:
            return KeyRun(key, value, self.start, staging=self._residency.staging)
        d_key, d_value = (torch.empty(x.shape, dtype=wide, device="meta") for x in (key, value))
        return KeyRun(key, value, self.start, d_key, d_value, self._residency.staging)

    def own_cotangents(self, begin: int, end: int) -> tuple[Tensor, Tensor] | tuple[None, None]:
        """What later tokens sent to the node's tokens begin to end, on the device."""
        if self._cotangents is None:
            return None, None
        d_key, d_value = self._cotangents
        return self._residency.fetch(d_key[begin:end]), self._residency.fetch(d_value[begin:end])

    def open_cotangents(self) -> None:
        """Zero buffers for dK and dV, which attention adds to in place."""
        assert self._buffers is not None, "captured before it is replayed"
        key, value = self._buffers
        wide = wide_dtype(key.dtype)
        self._cotangents = (self._residency.zeros_like(key, wide), self._residency.zeros_like(value, wide))

    def close_cotangents(self) -> None:
        self._cotangents = None

    @property
    def num_bytes(self) -> int:
        tensors = [*(self._buffers or ()), *(self._cotangents or ())]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
