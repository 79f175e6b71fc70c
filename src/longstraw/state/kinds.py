"""What each decoder layer keeps of its tokens: the closed set of kinds of state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class KeyValueKind:
    """Keys and values. `window`: how many keys a query sees, itself included; None for all."""

    window: int | None = None


@dataclass(frozen=True)
class RecurrentKind:
    """Gated DeltaNet: the convolution's tail and the matrix state."""


@dataclass(frozen=True)
class LatentKind:
    """Multi-head latent attention: one row [latent | rotated shared key] per token, for all heads.

    `topk`: a query attends to so many positions, chosen by an indexer; None: to all it sees. `indexer` "full": the
    layer chooses and keeps index keys; "shared": it takes the choice of the nearest such layer below.
    """

    topk: int | None = None
    indexer: Literal["none", "full", "shared"] = "none"


LayerKind = KeyValueKind | RecurrentKind | LatentKind
