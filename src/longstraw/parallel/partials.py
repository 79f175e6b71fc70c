"""Partial attention: some queries over some keys, merged by log-sum-exp (LSE), forward and backward.

What both exchanges do between collectives. Queries and keys of one call are seen whole, causally (query t sees keys up
to t), or by a mask; the caller knows which. Sums are float32 at least.

Shape suffixes: H query heads, K key heads, G query heads per key head, T queries, R some of them, N keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.ops.attention import (
    NO_KEYS,
    KeyRun,
    attend_shared,
    by_group,
    fold,
    groups,
    join_groups,
    merge_partials,
    send_cotangents,
)
from longstraw.ops.kernels import attend, attend_backward, wide_dtype
from longstraw.ops.staging import Passage

Rows = slice | Tensor  # which queries: a range, or their indices


@dataclass(eq=False)
class Partial:
    """Outputs and LSE of queries over the keys met so far; wide."""

    out_HTD: Tensor
    lse_HT: Tensor

    @classmethod
    def empty(cls, q_HTD: Tensor) -> Partial:
        """No keys met yet."""
        wide = wide_dtype(q_HTD.dtype)
        lse_HT = torch.full(q_HTD.shape[:-1], NO_KEYS, dtype=wide, device=q_HTD.device)
        return cls(torch.zeros(q_HTD.shape, dtype=wide, device=q_HTD.device), lse_HT)

    def merge(self, rows: Rows, out_HRD: Tensor, lse_HR: Tensor) -> None:
        """Add what these queries found over further keys."""
        merged = merge_partials(self.out_HTD[:, rows], self.lse_HT[:, rows], out_HRD, lse_HR)
        self.out_HTD[:, rows], self.lse_HT[:, rows] = merged

    def see(self, q_HTD: Tensor, rows: Rows, run: KeyRun, scale: float) -> None:
        """Let these queries see every key of a run."""
        q_HRD = q_HTD[:, rows]
        if q_HRD.shape[1] > 0 and len(run) > 0:
            self.merge(rows, *attend_shared(q_HRD, [run], scale))

    def see_part(self, q_HTD: Tensor, rows: Rows, run: KeyRun, scale: float, *, mask_RN: Tensor | None = None) -> None:
        """Let them see the run by a mask, or causally without one. Every query sees a key."""
        k, v = run.key_NKD.transpose(0, 1), run.value_NKD.transpose(0, 1)
        causal = mask_RN is None
        out, lse = attend(*by_group(q_HTD[:, rows], k, v), scale=scale, causal=causal, mask_TN=mask_RN)
        self.merge(rows, join_groups(out), join_groups(lse))


@dataclass(frozen=True, eq=False)
class Queries:
    """What backward knows of queries, global output and LSE, and the wide sum of their cotangents so far."""

    q_HTD: Tensor
    d_out_HTD: Tensor
    out_HTD: Tensor
    lse_HT: Tensor
    dq_HTD: Tensor

    def at(self, rows: Rows) -> Queries:
        """Some of them: views for a range, else copies, of which `dq` must be put back."""
        return Queries(*(x[:, rows] for x in (self.q_HTD, self.d_out_HTD, self.out_HTD, self.lse_HT, self.dq_HTD)))

    def pull(self, run: KeyRun, scale: float, *, keys_per_call: int) -> None:
        """Pull cotangents back through these queries' view of every key of a run; they are added in place."""
        if self.q_HTD.shape[1] == 0 or len(run) == 0:
            return
        num_key_heads = run.key_NKD.shape[1]
        d_out, q, out = (fold(x, num_key_heads).contiguous() for x in (self.d_out_HTD, self.q_HTD, self.out_HTD))
        lse = self.lse_HT.reshape(1, num_key_heads, -1)
        for piece in _pieces(run, keys_per_call):
            k, v = (x.transpose(0, 1)[None] for x in (piece.key_NKD, piece.value_NKD))
            dq, d_key, d_value = attend_backward(d_out, (q, k, v), out, lse, scale=scale)
            self.dq_HTD.add_(dq.reshape(self.dq_HTD.shape))
            send_cotangents(piece, d_key[0], d_value[0])

    def pull_part(self, run: KeyRun, scale: float, *, mask_TN: Tensor | None = None) -> None:
        """The same where the run is seen by a mask, or causally without one."""
        num_key_heads = run.key_NKD.shape[1]
        dq, d_key, d_value = attend_backward(
            groups(self.d_out_HTD, num_key_heads),
            by_group(self.q_HTD, run.key_NKD.transpose(0, 1), run.value_NKD.transpose(0, 1)),
            groups(self.out_HTD, num_key_heads),
            groups(self.lse_HT, num_key_heads),
            scale=scale,
            causal=mask_TN is None,
            mask_TN=mask_TN,
        )
        wide = self.dq_HTD.dtype
        self.dq_HTD.add_(join_groups(dq))
        send_cotangents(run, d_key.sum(0, dtype=wide), d_value.sum(0, dtype=wide))


def merge_parts(parts: list[Tensor]) -> Partial:
    """The merge of what several ranks found for the same queries: each `[H, T, D + 1]`, its LSE last."""
    merged = Partial(parts[0][..., :-1].contiguous(), parts[0][..., -1].contiguous())
    for part in parts[1:]:
        merged.merge(slice(None), part[..., :-1], part[..., -1])
    return merged


def with_cotangents(key_NKD: Tensor, value_NKD: Tensor) -> KeyRun:
    """A run with zeroed wide buffers; one buffer if the value is the key."""
    d_key = torch.zeros(key_NKD.shape, dtype=wide_dtype(key_NKD.dtype), device=key_NKD.device)
    if value_NKD is key_NKD:
        return KeyRun(key_NKD, value_NKD, 0, d_key, d_key)
    return KeyRun(key_NKD, value_NKD, 0, d_key, d_key.new_zeros(value_NKD.shape))


def _pieces(run: KeyRun, num_keys: int) -> Iterator[KeyRun]:
    """The keys of one kernel call after the other, on the device, with their cotangents."""
    for begin, part in run.staging.parts(Passage(run.rows(sums=True), num_keys)):
        keys = run.over(begin, part)
        for at in range(0, len(keys), num_keys):
            yield keys.cut(at, min(at + num_keys, len(keys)))
