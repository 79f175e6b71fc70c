"""A stock causal language model taken apart into the pieces the engine drives: embedding, layers one by one, head.

Weights, adapters and quantisation stay the library's. Nothing here keeps state between calls.

Shape suffixes: B batch, T tokens, E hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from peft import PeftModel
from torch import Tensor, nn
from transformers import PreTrainedModel

from longstraw.errors import UnsupportedError
from longstraw.models.adapters import is_in_indexer
from longstraw.models.delta_net import RecurrentCache, replaced_delta_nets
from longstraw.models.families import family_of, layer_kinds, layer_types
from longstraw.models.latent import LatentSeam, refuse_unfit_projection, replaced_latent_attentions
from longstraw.models.seam import ATTENTION_NAME, AttentionSeam, PassThroughCache
from longstraw.ops.logprob import tokens_per_block
from longstraw.state.kinds import LatentKind, RecurrentKind

Rotary = dict[str, tuple[Tensor, Tensor]]  # cos, sin [1, T, D] per layer type


class Decoder:
    """The pieces of a transformers causal LM, with or without a peft adapter.

    Raises `UnsupportedError` for a model type or feature outside the table of families, an adapter with dropout,
    weights spread over devices, or a model in which nothing would train.
    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, PeftModel | PreTrainedModel):
            raise UnsupportedError(f"model must be a transformers or peft model, got {type(model).__name__}.")
        self.model = model
        self._lm = model.get_base_model() if isinstance(model, PeftModel) else model
        self._config = self._lm.config
        self._family = family_of(self._config)
        self._body = self._lm.base_model
        self.layer_types = layer_types(self._config)
        self.kinds = layer_kinds(self._config)
        self.num_layers = len(self.kinds)
        self._layers = list(self._body.layers)[: self.num_layers]
        layers_of_kinds = list(zip(self._layers, self.kinds, strict=True))
        self._delta_nets = [layer.linear_attn for layer, kind in layers_of_kinds if isinstance(kind, RecurrentKind)]
        self._latent_attentions = [layer.self_attn for layer, kind in layers_of_kinds if isinstance(kind, LatentKind)]
        self.vocabulary_size: int = self._config.vocab_size
        self.max_positions: int = self._config.max_position_embeddings
        self.head_block_tokens = tokens_per_block(self.vocabulary_size)
        self._refuse_unfit_parts()
        self.first_trained_layer = self._first_trained_layer()

    @property
    def device(self) -> torch.device:
        return self._body.embed_tokens.weight.device

    @property
    def trained_parameters(self) -> dict[str, nn.Parameter]:
        """Parameters that get a gradient: not an indexer's, whose choice is discrete, even where they require grad."""
        parameters = self.model.named_parameters()
        return {name: p for name, p in parameters if p.requires_grad and not is_in_indexer(name)}

    @property
    def delta_net_heads(self) -> list[tuple[int, int]]:
        """Key and value heads of every gated DeltaNet layer."""
        return [(module.num_k_heads, module.num_v_heads) for module in self._delta_nets]

    def recurrent(self, layer: int) -> bool:
        return isinstance(self.kinds[layer], RecurrentKind)

    @contextmanager
    def driven(self) -> Iterator[None]:
        """Within it the layers follow the engine; on exit the model is as it was, free for its owner's own calls.

        Modules are in eval mode (dropout is refused, so only checkpointing and the like are switched off) except NF4
        layers: bitsandbytes 0.50 repacks their weights for inference in eval mode, after which no gradient passes.
        """
        implementation = self._config._attn_implementation
        training = {module: module.training for module in self.model.modules()}
        replaced = replaced_delta_nets(self._delta_nets), replaced_latent_attentions(self._latent_attentions)
        try:
            self._config._attn_implementation = ATTENTION_NAME
            for module in training:
                module.training = type(module).__name__ == "Linear4bit"
            with replaced[0], replaced[1]:
                yield
        finally:
            self._config._attn_implementation = implementation
            for module, mode in training.items():
                module.training = mode

    def check_reference(self) -> None:
        """Raise `UnsupportedError` unless the model has a reference policy: an adapter to switch off."""
        if not isinstance(self.model, PeftModel):
            raise UnsupportedError(
                "beta > 0 needs a reference policy, which is the model with its adapter off; this model has no "
                "adapter: set beta=0 or train a LoRA adapter."
            )

    @contextmanager
    def adapters_off(self) -> Iterator[None]:
        """The reference policy: the same weights without the adapter."""
        assert isinstance(self.model, PeftModel), "see check_reference"
        with self.model.disable_adapter():
            yield

    def embed(self, token_ids_BT: Tensor) -> Tensor:
        """`[B, T, E]`, with gradient to the embedding where it is trained."""
        return self._family.scale_embedding(self._body.embed_tokens(token_ids_BT), self._config)

    def rotary(self, like_BTE: Tensor, position_T: Tensor) -> Rotary:
        """Rotary cos and sin of the positions, by layer type."""
        positions = position_T[None]
        with torch.no_grad():
            if self._family.rotary_by_layer_type:
                kinds = set(self.layer_types)
                return {kind: self._body.rotary_emb(like_BTE, positions, kind) for kind in kinds}
            return dict.fromkeys(self.layer_types, self._body.rotary_emb(like_BTE, positions))

    def run_layer(
        self,
        index: int,
        hidden_BTE: Tensor,
        rotary: Rotary,
        *,
        position_T: Tensor,
        seam: AttentionSeam | LatentSeam | RecurrentCache,
    ) -> Tensor:
        """One decoder layer on tokens at these positions; state goes in and out through the seam."""
        kind = self.layer_types[index]
        layer = self._layers[index]
        common = {"position_embeddings": rotary[kind], "position_ids": position_T[None], "attention_mask": None}
        if isinstance(seam, RecurrentCache):
            out = layer(hidden_BTE, **common, cache=seam)
        else:
            out = layer(hidden_BTE, **common, cache=PassThroughCache(), chunk=seam)
        return out[0] if isinstance(out, tuple) else out

    def logits(self, hidden_TE: Tensor) -> Tensor:
        """`[T, V]` of a block of at most `head_block_tokens` last hidden states (before the final norm)."""
        logits = self._lm.get_output_embeddings()(self._body.norm(hidden_TE))
        return self._family.finish_logits(logits, self._config)

    def _first_trained_layer(self) -> int:
        """Layers below it hold no trained parameter, nor does the embedding: replay stops there."""
        if any(p.requires_grad for p in self._body.embed_tokens.parameters()):
            return 0
        for index, layer in enumerate(self._layers):
            if any(p.requires_grad and not is_in_indexer(name) for name, p in layer.named_parameters()):
                return index
        return self.num_layers

    def _refuse_unfit_parts(self) -> None:
        if not self.trained_parameters:
            raise UnsupportedError(
                "no parameter of the model requires grad, so nothing would train; add an adapter or call "
                "requires_grad_()."
            )
        devices = {p.device for p in self.model.parameters()}
        if len(devices) > 1:
            names = ", ".join(sorted(str(device) for device in devices))
            raise UnsupportedError(f"the model's weights lie on several devices ({names}); load it on one.")
        self._warn_of_trained_indexers()
        for name, module in self.model.named_modules():
            if name.endswith("self_attn.kv_b_proj"):
                refuse_unfit_projection(name, module)
            if isinstance(module, nn.Dropout) and module.p > 0:
                raise UnsupportedError(
                    f"{name} has dropout {module.p}, which would make replay differ from capture; set it to 0 "
                    "(lora_dropout=0)."
                )

    def _warn_of_trained_indexers(self) -> None:
        adapters = [name for name, _ in self.model.named_parameters() if is_in_indexer(name) and ".lora_" in name]
        adapted = sorted({name.partition(".lora_")[0] for name in adapters})
        if adapted:
            shown = ", ".join(adapted[:4]) + (f" and {len(adapted) - 4} more" if len(adapted) > 4 else "")
            warnings.warn(
                f"adapters on the indexer ({shown}) act on what is selected but get no gradient: the selection is "
                "discrete. Leave them out of target_modules.",
                stacklevel=4,
            )
