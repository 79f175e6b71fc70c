"""Attention of one chunk over the extents of its path, exact to the last key and never the size of the prompt.

The forward keeps output and log-sum-exp (LSE) only. The backward runs the flash backward extent by extent with the
global output and LSE, adds dK and dV in place into the extents' cotangent buffers, and returns dQ. Query heads that
share a key head are folded into the query axis, so keys and values are never expanded. Keys are taken in pieces, the
same wherever an extent lives, so results do not depend on that.

Shape suffixes: H query heads, K key heads, G query heads per key head, T queries of the chunk, N keys, D head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from longstraw.ops.kernels import attend, attend_backward, wide_dtype
from longstraw.ops.staging import VIEWS, Passage, Rows, Staging

# Keys taken by one kernel call in forward, where they bound the kernel's own repacked copy.
KEYS_PER_FORWARD_CALL = 16384
# Queries taken by one masked call of a sliding window: its mask is [QUERIES_PER_WINDOW_CALL, that + window].
QUERIES_PER_WINDOW_CALL = 1024
NO_KEYS = -1e30  # LSE of an empty set: finite, so that minus itself is 0


@dataclass(frozen=True, eq=False)
class KeyRun:
    """Consecutive keys of the path: views into one extent, oldest first. Latent rows: the value is the key itself."""

    key_NKD: Tensor
    value_NKD: Tensor
    start: int  # position in the sequence of the first key
    d_key_NKD: Tensor | None = None  # cotangent buffers, float32; None when the extent is a constant
    d_value_NKD: Tensor | None = None
    staging: Staging = VIEWS  # how to reach them from the device

    def __len__(self) -> int:
        return self.key_NKD.shape[0]

    def cut(self, begin: int, end: int) -> KeyRun:
        """The keys begin to end (relative to the first key) as views."""
        rows = self.rows(sums=True).cut(begin, end)
        return replace(self.over(begin, rows), staging=self.staging)

    def rows(self, *, sums: bool) -> Rows:
        """Keys and values, and with `sums` their cotangents if there are any; a tensor in two roles once."""
        num = 1 if self.key_NKD is self.value_NKD else 2
        cotangents = (self.d_key_NKD, self.d_value_NKD)[:num] if sums else ()
        return Rows((self.key_NKD, self.value_NKD)[:num], tuple(x for x in cotangents if x is not None))

    def over(self, begin: int, part: Rows) -> KeyRun:
        """The keys from `begin` on that a part of `rows` holds, as views."""
        d_key, d_value = (part.sums[0], part.sums[-1]) if part.sums else (None, None)
        return KeyRun(part.read[0], part.read[-1], self.start + begin, d_key, d_value)


@dataclass(frozen=True, eq=False)
class AttentionOutput:
    """What a chunk's attention made in one layer; handed back at replay so that it is not computed twice."""

    out_HTD: Tensor
    lse_HT: Tensor


@dataclass(frozen=True, eq=False)
class ChunkKeys:
    """The setting of one chunk in one layer: what its queries see besides the chunk itself."""

    earlier: Sequence[KeyRun]  # oldest first, contiguous in position up to the chunk
    start: int  # position of the chunk's first token
    scale: float
    # Earlier keys taken by one kernel call in backward, which makes dK and dV of as many: a full chunk's, say.
    keys_per_backward_call: int
    window: int | None = None  # a query at p sees keys in (p - window, p]
    # Cotangents that later tokens sent to the chunk's own keys and values, float32 [T, K, D]; None: no later tokens.
    d_own_key_TKD: Tensor | None = None
    d_own_value_TKD: Tensor | None = None
    known: AttentionOutput | None = None  # from the chunk's forward: skips the computation, not the gradient

    def cuts_off_keys(self, num_tokens: int) -> bool:
        """Whether the window hides any key of the path from any query of the chunk."""
        oldest = self.earlier[0].start if self.earlier else self.start
        return self.window is not None and self.start + num_tokens - oldest > self.window

    def visible(self) -> list[KeyRun]:
        """The earlier keys that any query of the chunk sees."""
        first = 0 if self.window is None else self.start - self.window + 1
        return [run.cut(max(0, first - run.start), len(run)) for run in self.earlier if run.start + len(run) > first]

    def passages(self, num_tokens: int, *, backward: bool, staging: Staging) -> list[Passage]:
        """What attention of the chunk will pass over of the runs that are reached so: for a stage that looks ahead."""
        num_keys = self.keys_per_backward_call if backward else KEYS_PER_FORWARD_CALL
        whole = self.cuts_off_keys(num_tokens)
        runs = [run for run in (self.visible() if whole else self.earlier) if run.staging is staging]
        return [Passage(run.rows(sums=backward), len(run) if whole else num_keys) for run in runs]


class ChunkAttention(torch.autograd.Function):
    """Attention of a chunk. Differentiable in its own q, k, v and sinks; the extents get their share in place.

    q `[H, T, D]`; k, v `[K, T, D]`; sinks `[H]` or None (an extra logit per head that takes weight and gives nothing).
    Returns out `[H, T, D]` and LSE `[H, T]` (sinks included, not differentiable). The gradient of k and v includes
    `d_own_*`, added in float32 before the one rounding to the keys' dtype. Not differentiable twice.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, keys: ChunkKeys
    ) -> tuple[Tensor, Tensor]:
        if keys.known is not None:
            out, lse = keys.known.out_HTD, keys.known.lse_HT
        else:
            run = _forward_window if keys.cuts_off_keys(q.shape[1]) else _forward_full
            out, lse = run(q, k, v, keys)
            if sinks is not None:
                out, lse = add_sinks(out, lse, sinks)
            out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, sinks, out, lse)  # type: ignore[arg-type]
        # Without `known`: its output is this node's output, and a node that holds its output is never freed.
        ctx.keys = replace(keys, known=None)  # type: ignore[attr-defined]
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx, d_out: Tensor, _: Tensor):  # type: ignore[no-untyped-def]
        q, k, v, sinks, out, lse = ctx.saved_tensors
        keys: ChunkKeys = ctx.keys
        run = _backward_window if keys.cuts_off_keys(q.shape[1]) else _backward_full
        dq, dk, dv = run(d_out, (q, k, v), out, lse, keys)
        add_own_cotangents(dk, dv, keys.d_own_key_TKD, keys.d_own_value_TKD)
        d_sinks = None if sinks is None else pull_sinks(sinks, d_out.to(dq.dtype), out, lse)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), d_sinks, None


def merge_partials(out_HTD: Tensor, lse_HT: Tensor, other_HTD: Tensor, other_lse_HT: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two softmax-weighted sums into the one over the union of their keys, in place into the first.

    The first pair is float32 or float64. Source: online softmax, Milakov and Gimelshein 2018.
    """
    total_HT = torch.logaddexp(lse_HT, other_lse_HT)
    out_HTD.mul_((lse_HT - total_HT).exp_()[..., None]).addcmul_(
        other_HTD.to(out_HTD.dtype), (other_lse_HT - total_HT).exp_()[..., None]
    )
    return out_HTD, total_HT


def attend_shared(q_HTD: Tensor, runs: Sequence[KeyRun], scale: float) -> tuple[Tensor, Tensor]:
    """Attention of queries that see every key of the runs. No gradient. Wide output `[H, T, D]` and LSE `[H, T]`."""
    wide = wide_dtype(q_HTD.dtype)
    out = torch.zeros(q_HTD.shape, dtype=wide, device=q_HTD.device)
    lse = torch.full(q_HTD.shape[:-1], NO_KEYS, dtype=wide, device=q_HTD.device)
    for keys in _pieces(runs, KEYS_PER_FORWARD_CALL):
        num_key_heads = keys.key_NKD.shape[1]
        part, part_lse = attend(fold(q_HTD, num_key_heads), *_kernel_keys(keys), scale=scale)
        out, lse = merge_partials(out, lse, _unfold(part, q_HTD.shape), part_lse.reshape(lse.shape))
    return out, lse


def _forward_full(q: Tensor, k: Tensor, v: Tensor, keys: ChunkKeys) -> tuple[Tensor, Tensor]:
    part, part_lse = attend(*by_group(q, k, v), scale=keys.scale, causal=True)
    out, lse = join_groups(part).to(wide_dtype(q.dtype)), join_groups(part_lse)
    if not keys.earlier:
        return out, lse
    return merge_partials(*attend_shared(q, keys.earlier, keys.scale), out, lse)


def _backward_full(
    d_out: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, keys: ChunkKeys
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    num_key_heads = k.shape[0]
    wide = wide_dtype(q.dtype)
    grads = attend_backward(
        groups(d_out, num_key_heads),
        by_group(q, k, v),
        groups(out, num_key_heads),
        groups(lse, num_key_heads),
        scale=keys.scale,
        causal=True,
    )
    dq, dk, dv = join_groups(grads[0]).to(wide), grads[1].sum(0, dtype=wide), grads[2].sum(0, dtype=wide)
    if not keys.earlier:
        return dq, dk, dv
    folded = [fold(x, num_key_heads).contiguous() for x in (d_out, q, out)]
    folded_lse = lse.reshape(1, num_key_heads, -1)
    for piece in _pieces(keys.earlier, keys.keys_per_backward_call, sums=True):
        # The CPU kernel gives each thread whole heads, so an odd number of them leaves cores idle. Halves of the keys
        # as a batch of two make it even: with the global LSE their shares of the gradient are independent.
        halves = 2 if num_key_heads % 2 == 1 and len(piece) % 2 == 0 and q.device.type == "cpu" else 1
        queries = [x.expand(halves, *x.shape[1:]) for x in (*folded, folded_lse)]
        k_half, v_half = (_halve(x, halves) for x in (piece.key_NKD, piece.value_NKD))
        part, d_key, d_value = attend_backward(
            queries[0], (queries[1], k_half, v_half), queries[2], queries[3], scale=keys.scale
        )
        for share in part:
            dq += _unfold(share, q.shape)
        send_cotangents(piece, _join_halves(d_key), _join_halves(d_value))
    return dq, dk, dv


def _forward_window(q: Tensor, k: Tensor, v: Tensor, keys: ChunkKeys) -> tuple[Tensor, Tensor]:
    wide = wide_dtype(q.dtype)
    out = torch.empty(q.shape, dtype=wide, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    own = _own_run(k, v, keys)
    with _on_device(keys.visible(), sums=False) as earlier:
        for begin, end, pieces, mask in _window_blocks(q.shape[1], [*earlier, own], keys):
            block_k, block_v = _gather(pieces)
            part, part_lse = attend(*by_group(q[:, begin:end], block_k, block_v), scale=keys.scale, mask_TN=mask)
            out[:, begin:end], lse[:, begin:end] = join_groups(part), join_groups(part_lse)
    return out, lse


def _backward_window(
    d_out: Tensor, qkv: tuple[Tensor, Tensor, Tensor], out: Tensor, lse: Tensor, keys: ChunkKeys
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = qkv
    num_key_heads = k.shape[0]
    wide = wide_dtype(q.dtype)
    dq = torch.empty(q.shape, dtype=wide, device=q.device)
    own = _own_run(k, v, keys, cotangents=True)
    with _on_device(keys.visible(), sums=True) as earlier:
        for begin, end, pieces, mask in _window_blocks(q.shape[1], [*earlier, own], keys):
            block_k, block_v = _gather(pieces)
            part, d_key, d_value = attend_backward(
                groups(d_out[:, begin:end], num_key_heads),
                by_group(q[:, begin:end], block_k, block_v),
                groups(out[:, begin:end], num_key_heads),
                groups(lse[:, begin:end], num_key_heads),
                scale=keys.scale,
                mask_TN=mask,
            )
            dq[:, begin:end] = join_groups(part)
            d_key, d_value = d_key.sum(0, dtype=wide), d_value.sum(0, dtype=wide)
            at = 0
            for piece in pieces:
                send_cotangents(piece, d_key[:, at : at + len(piece)], d_value[:, at : at + len(piece)])
                at += len(piece)
    assert own.d_key_NKD is not None and own.d_value_NKD is not None, "made with cotangents"
    return dq, own.d_key_NKD.transpose(0, 1), own.d_value_NKD.transpose(0, 1)


def _window_blocks(
    num_tokens: int, runs: Sequence[KeyRun], keys: ChunkKeys
) -> Iterator[tuple[int, int, list[KeyRun], Tensor]]:
    """Query blocks with the runs any of their queries sees, cut to that range, and the visible pairs of the two."""
    assert keys.window is not None, "only called for a window"
    device = runs[-1].key_NKD.device
    for begin in range(0, num_tokens, QUERIES_PER_WINDOW_CALL):
        end = min(begin + QUERIES_PER_WINDOW_CALL, num_tokens)
        first, last = keys.start + begin - keys.window + 1, keys.start + end
        pieces = [
            run.cut(max(0, first - run.start), min(len(run), last - run.start))
            for run in runs
            if run.start + len(run) > first and run.start < last
        ]
        key_N = torch.arange(pieces[0].start, last, device=device)
        query_T1 = torch.arange(keys.start + begin, last, device=device)[:, None]
        yield begin, end, pieces, (key_N <= query_T1) & (key_N > query_T1 - keys.window)


def _own_run(k: Tensor, v: Tensor, keys: ChunkKeys, *, cotangents: bool = False) -> KeyRun:
    own_k, own_v = k.transpose(0, 1), v.transpose(0, 1)
    if not cotangents:
        return KeyRun(own_k, own_v, keys.start)
    d_key, d_value = (torch.zeros(own_k.shape, dtype=wide_dtype(k.dtype), device=k.device) for _ in range(2))
    return KeyRun(own_k, own_v, keys.start, d_key, d_value)


def _gather(pieces: Sequence[KeyRun]) -> tuple[Tensor, Tensor]:
    """Keys and values `[K, N, D]` of the pieces in one buffer: at most a window and a query block long."""
    k = pieces[0].key_NKD if len(pieces) == 1 else torch.cat([piece.key_NKD for piece in pieces])
    v = pieces[0].value_NKD if len(pieces) == 1 else torch.cat([piece.value_NKD for piece in pieces])
    return k.transpose(0, 1), v.transpose(0, 1)


def send_cotangents(piece: KeyRun, d_key_KND: Tensor, d_value_KND: Tensor) -> None:
    """Add cotangents to their owner, unless it is a constant."""
    if piece.d_key_NKD is not None and piece.d_value_NKD is not None:
        piece.d_key_NKD.add_(d_key_KND.transpose(0, 1))
        piece.d_value_NKD.add_(d_value_KND.transpose(0, 1))


def _pieces(runs: Sequence[KeyRun], num_keys: int, *, sums: bool = False) -> Iterator[KeyRun]:
    """The keys of one kernel call after the other, on the device; each is valid until the next one."""
    for run in runs:
        for begin, part in run.staging.parts(Passage(run.rows(sums=sums), num_keys)):
            keys = run.over(begin, part)
            for at in range(0, len(keys), num_keys):
                yield keys.cut(at, min(at + num_keys, len(keys)))


@contextmanager
def _on_device(runs: Sequence[KeyRun], *, sums: bool) -> Iterator[list[KeyRun]]:
    """Whole runs on the device: a window's worth of keys."""
    with ExitStack() as stack:
        yield [stack.enter_context(_whole(run, sums=sums)) for run in runs]


@contextmanager
def _whole(run: KeyRun, *, sums: bool) -> Iterator[KeyRun]:
    for begin, part in run.staging.parts(Passage(run.rows(sums=sums), len(run))):
        yield run.over(begin, part)


def _kernel_keys(run: KeyRun) -> tuple[Tensor, Tensor]:
    return run.key_NKD.transpose(0, 1)[None], run.value_NKD.transpose(0, 1)[None]


def _halve(x_NKD: Tensor, halves: int) -> Tensor:
    """`[halves, K, N / halves, D]`, a view."""
    return x_NKD.unflatten(0, (halves, -1)).transpose(1, 2)


def _join_halves(x: Tensor) -> Tensor:
    """`[K, N, D]`."""
    return x.transpose(0, 1).flatten(1, 2)


def fold(x_HTD: Tensor, num_key_heads: int) -> Tensor:
    """`[1, K, G * T, D]`: every query of a key head's group in one row of queries (they all see every key)."""
    return x_HTD.reshape(1, num_key_heads, -1, x_HTD.shape[-1])


def _unfold(x: Tensor, shape_HTD: torch.Size) -> Tensor:
    return x.reshape(shape_HTD)


def groups(x: Tensor, num_key_heads: int) -> Tensor:
    """`[G, K, T, ...]`: the group as the batch, so that a causal mask still lines up; a view."""
    return x.unflatten(0, (num_key_heads, -1)).transpose(0, 1)


def by_group(q_HTD: Tensor, k_KND: Tensor, v_KND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries `[G, K, T, D]`, keys and values of the same batch with stride 0: not copied."""
    q = groups(q_HTD, k_KND.shape[0])
    return q, k_KND.expand(q.shape[0], -1, -1, -1), v_KND.expand(q.shape[0], -1, -1, -1)


def join_groups(x_GKT: Tensor) -> Tensor:
    """`[H, T, ...]`: the inverse of `groups`."""
    return x_GKT.transpose(0, 1).flatten(0, 1)


def chunk_attention_naive(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, keys: ChunkKeys) -> Tensor:
    """Oracle of `ChunkAttention`: one softmax over the concatenated path, by plain tensor code and autograd."""
    num_heads, num_tokens, _ = q.shape
    all_k = torch.cat([*(run.key_NKD.transpose(0, 1) for run in keys.earlier), k], 1)
    all_v = torch.cat([*(run.value_NKD.transpose(0, 1) for run in keys.earlier), v], 1)
    group = num_heads // k.shape[0]
    scores = q @ all_k.repeat_interleave(group, 0).mT * keys.scale
    query_T1 = torch.arange(keys.start, keys.start + num_tokens, device=q.device)[:, None]
    key_N = torch.arange(keys.start + num_tokens - all_k.shape[1], keys.start + num_tokens, device=q.device)
    visible = key_N <= query_T1
    if keys.window is not None:
        visible &= key_N > query_T1 - keys.window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, num_tokens, 1)], -1)
        return scores.softmax(-1)[..., :-1] @ all_v.repeat_interleave(group, 0)
    return scores.softmax(-1) @ all_v.repeat_interleave(group, 0)


def add_sinks(out_HTD: Tensor, lse_HT: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Let an extra logit per head take its weight from the output; it gives nothing back (gpt_oss)."""
    total_HT = torch.logaddexp(lse_HT, sinks_H[:, None].to(lse_HT.dtype))
    return out_HTD * (lse_HT - total_HT).exp()[..., None], total_HT


def pull_sinks(sinks_H: Tensor, d_out_HTD: Tensor, out_HTD: Tensor, lse_HT: Tensor) -> Tensor:
    """Cotangent of the sinks from these queries, with the LSE that includes them; `d_out` is wide."""
    delta_HT = (d_out_HTD * out_HTD.to(d_out_HTD.dtype)).sum(-1)
    return -((sinks_H[:, None] - lse_HT).exp() * delta_HT).sum(-1).to(sinks_H.dtype)


def add_own_cotangents(dk_KTD: Tensor, dv_KTD: Tensor, d_key_TKD: Tensor | None, d_value_TKD: Tensor | None) -> None:
    """Add what later tokens sent to a chunk's own keys and values, in place and before any rounding."""
    if d_key_TKD is not None:
        dk_KTD += d_key_TKD.transpose(0, 1)
    if d_value_TKD is not None:
        dv_KTD += d_value_TKD.transpose(0, 1)
