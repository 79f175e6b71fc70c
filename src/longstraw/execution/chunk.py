"""One chunk through all layers: forward without autograd, and the pull of cotangents back through it, layer by layer.

This is the heart of replay (whole-layer checkpointing): a forward keeps each layer's input only, and its attention
output; the pull recomputes one layer at a time with autograd. Cotangents of earlier state are added where that state
lives.

Shape suffixes: B batch (1), T tokens of the chunk, E hidden size, S selected positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longstraw.execution.runner import Runner
from longstraw.execution.seams import ExtentSeam, LatentExtentSeam
from longstraw.execution.split_seams import SplitExtentSeam, SplitHeads, SplitLatentSeam
from longstraw.models.decoder import Decoder
from longstraw.models.delta_net import RecurrentCache
from longstraw.ops.attention import AttentionOutput
from longstraw.state.kinds import KeyValueKind, LatentKind, RecurrentKind
from longstraw.state.node import Chunk, NodeState
from longstraw.state.recurrent import Boundary

Seam = ExtentSeam | LatentExtentSeam | SplitExtentSeam | SplitLatentSeam | RecurrentCache


@dataclass(frozen=True, eq=False)
class Known:
    """What one forward of a layer found out, so that nobody computes it again."""

    attention: AttentionOutput | None = None  # of a layer with keys and values
    selected_TS: Tensor | None = None  # of a latent layer with an indexer; layers that share it hold the same tensor


NOTHING = Known()


@dataclass(frozen=True, eq=False)
class SavedLayer:
    """What the pull needs of one layer's forward."""

    hidden_BTE: Tensor
    known: Known


@dataclass(frozen=True, eq=False)
class ChunkForward:
    """A chunk that ran: its last hidden states (before the final norm) and, if kept, its layers' inputs."""

    hidden_BTE: Tensor
    layers: list[SavedLayer]


@torch.no_grad()
def forward_chunk(run: Runner, node: NodeState, chunk: Chunk, *, writes: bool, keeps_inputs: bool) -> ChunkForward:
    """Run a chunk without autograd. `writes` adds its state to the node; `keeps_inputs` saves what the pull needs."""
    decoder, tokens = run.decoder, run.tokens_to_run(node, chunk)
    run.plan(node, range(decoder.num_layers), chunk, "forward")
    hidden = decoder.embed(node.token_ids[None, tokens])
    position_T = node.start + tokens
    rotary = decoder.rotary(hidden, position_T)
    saved, selected = [], None
    for layer in range(decoder.num_layers):
        _, seam = _seam(run, node, chunk, layer, _shared(decoder, layer, selected), writes=writes)
        out = decoder.run_layer(layer, hidden, rotary, position_T=position_T, seam=seam)
        if writes and isinstance(seam, RecurrentCache):
            node.recurrent(layer).advance(_end_boundary(seam))
        if keeps_inputs and layer >= decoder.first_trained_layer:
            saved.append(SavedLayer(hidden, _found(seam)))
        selected = _found(seam).selected_TS
        hidden = out
    return ChunkForward(hidden, saved)


def pull_chunk_by_layer(
    run: Runner,
    node: NodeState,
    chunk: Chunk,
    layers: list[SavedLayer],
    d_hidden_BTE: Tensor,
    d_ends: list[Boundary],
) -> list[Boundary]:
    """Pull the cotangent of a chunk's last hidden states back, one layer's graph at a time.

    Parameters' gradients accumulate in `.grad`, those of earlier keys in their extents. `d_ends` are the cotangents
    of the chunk's end boundaries per layer; returns those of its start boundaries. `layers` is emptied as it is used.
    """
    decoder = run.decoder
    trained = range(decoder.first_trained_layer, decoder.num_layers)
    run.plan(node, reversed(trained), chunk, "replay")
    position_T = node.start + run.tokens_to_run(node, chunk)
    rotary = decoder.rotary(d_hidden_BTE, position_T)
    d_starts = [Boundary()] * decoder.num_layers
    d_hidden = d_hidden_BTE
    with torch.enable_grad():
        for layer in reversed(trained):
            saved = layers.pop()
            hidden = saved.hidden_BTE.detach().requires_grad_()
            begin, seam = _seam(run, node, chunk, layer, saved.known)
            out = decoder.run_layer(layer, hidden, rotary, position_T=position_T, seam=seam)
            outs, grads = [out], [d_hidden]
            _add_end_cotangents(outs, grads, seam, d_ends[layer])
            torch.autograd.backward(outs, grads)
            assert hidden.grad is not None, "every layer's output depends on its input"
            d_hidden = hidden.grad
            d_starts[layer] = _gradient_of(begin)
        if decoder.first_trained_layer == 0:
            _pull_embedding(run, node, chunk, d_hidden)
    return d_starts


class ChunkGraph:
    """A chunk's forward with the graph of all its layers kept: one forward less, the memory of the whole chunk."""

    def __init__(self, run: Runner, node: NodeState, chunk: Chunk) -> None:
        decoder, tokens = run.decoder, run.tokens_to_run(node, chunk)
        self._run, self._node, self._chunk = run, node, chunk
        self._seams: list[Seam] = []
        self._begins: list[Boundary] = []
        first = decoder.first_trained_layer
        run.plan(node, range(decoder.num_layers), chunk, "forward")
        with torch.set_grad_enabled(first == 0):
            hidden = decoder.embed(node.token_ids[None, tokens])
        position_T = node.start + tokens
        rotary = decoder.rotary(hidden, position_T)
        selected = None
        for layer in range(decoder.num_layers):
            if layer == first and not hidden.requires_grad:
                hidden.requires_grad_()  # the seams' constants must not cut the graph of the layers above
            with torch.set_grad_enabled(layer >= first):
                begin, seam = _seam(run, node, chunk, layer, _shared(decoder, layer, selected))
                hidden = decoder.run_layer(layer, hidden, rotary, position_T=position_T, seam=seam)
            selected = _found(seam).selected_TS
            self._begins.append(begin)
            self._seams.append(seam)
        self._hidden = hidden
        self.forward = ChunkForward(hidden.detach(), [])

    def pull(self, d_hidden_BTE: Tensor, d_ends: list[Boundary]) -> list[Boundary]:
        """As `pull_chunk_by_layer`, through the kept graph."""
        if not self._hidden.requires_grad:  # only the head is trained
            return [Boundary()] * len(self._begins)
        trained = range(self._run.decoder.first_trained_layer, len(self._seams))
        self._run.plan(self._node, reversed(trained), self._chunk, "backward")
        outs, grads = [self._hidden], [d_hidden_BTE]
        for seam, d_end in zip(self._seams, d_ends, strict=True):
            _add_end_cotangents(outs, grads, seam, d_end)
        torch.autograd.backward(outs, grads)
        return [_gradient_of(begin) for begin in self._begins]


def _end_boundary(cache: RecurrentCache) -> Boundary:
    assert cache.new_conv_tail is not None and cache.new_matrix_state is not None, "the layer ran"
    return Boundary(cache.new_conv_tail, cache.new_matrix_state)


def _seam(
    run: Runner, node: NodeState, chunk: Chunk, layer: int, known: Known, *, writes: bool = False
) -> tuple[Boundary, Seam]:
    """The seam of a layer, and its start boundary as leaves of the graph, if there is one."""
    match run.decoder.kinds[layer]:
        case RecurrentKind():
            begin = node.recurrent(layer).start(node.chunks.index(chunk))
            leaves = Boundary(_leaf(begin.conv_tail_BCW), _leaf(begin.matrix_BHKV))
            heads = SplitHeads(run, run.split(chunk)) if run.is_divided else None
            return leaves, RecurrentCache(leaves.conv_tail_BCW, leaves.matrix_BHKV, heads=heads)
        case LatentKind() as kind:
            if run.is_divided:
                return Boundary(), SplitLatentSeam(run, node, layer, chunk, kind, writes, known.selected_TS)
            return Boundary(), LatentExtentSeam(node, layer, chunk, kind, writes, known.selected_TS)
        case KeyValueKind(window):
            if run.is_divided:
                return Boundary(), SplitExtentSeam(run, node, layer, chunk, window, writes, known.attention)
            return Boundary(), ExtentSeam(node, layer, chunk, window, writes, known.attention)


def _shared(decoder: Decoder, layer: int, selected_below: Tensor | None) -> Known:
    """IndexShare: what a layer takes over from the one below."""
    kind = decoder.kinds[layer]
    shares = isinstance(kind, LatentKind) and kind.indexer == "shared"
    return Known(selected_TS=selected_below) if shares else NOTHING


def _found(seam: Seam) -> Known:
    match seam:
        case ExtentSeam() | SplitExtentSeam():
            return Known(attention=seam.known)
        case LatentExtentSeam() | SplitLatentSeam():
            return Known(selected_TS=seam.selected_TS)
        case _:
            return NOTHING


def _leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.detach().requires_grad_()


def _gradient_of(leaves: Boundary) -> Boundary:
    conv, matrix = leaves.conv_tail_BCW, leaves.matrix_BHKV
    return Boundary(None if conv is None else conv.grad, None if matrix is None else matrix.grad)


def _add_end_cotangents(outs: list[Tensor], grads: list[Tensor], seam: Seam, d_end: Boundary) -> None:
    if not isinstance(seam, RecurrentCache):
        return
    end = _end_boundary(seam)
    pairs = ((end.conv_tail_BCW, d_end.conv_tail_BCW), (end.matrix_BHKV, d_end.matrix_BHKV))
    for out, grad in pairs:
        if out is not None and grad is not None:
            outs.append(out)
            grads.append(grad)


def _pull_embedding(run: Runner, node: NodeState, chunk: Chunk, d_hidden_BTE: Tensor) -> None:
    hidden = run.decoder.embed(node.token_ids[None, run.tokens_to_run(node, chunk)])
    if hidden.requires_grad:
        hidden.backward(d_hidden_BTE)
