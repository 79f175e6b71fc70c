"""The table of model families: which seams each `model_type` uses, and what is refused by name.

A row is a promise with a test behind it (`tests/models/test_families.py` compares every row's gradients with autograd
of the stock model). Facts are those of transformers 5.24.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor
from transformers import PretrainedConfig

from longstraw.errors import UnsupportedError
from longstraw.state.kinds import KeyValueKind, LatentKind, LayerKind, RecurrentKind

# Frequencies that change with the sequence's length would re-rotate keys that are already kept.
FIXED_ROTARY = ("default", "linear", "llama3", "yarn", "proportional")


@dataclass(frozen=True)
class Family:
    """How the engine drives the layers of a model type.

    `windows`: where a sliding window applies. `rotary_by_layer_type`: the rotary module takes the layer type (two
    bases). `embedding_factor`, `logits_factor`, `logits_divisor`: config keys of the factors that the model applies
    outside its layers.
    """

    windows: Literal["none", "all_layers", "by_layer_type"] = "none"
    rotary_by_layer_type: bool = False
    embedding_factor: str | None = None
    logits_factor: str | None = None
    logits_divisor: str | None = None
    hybrid: bool = False
    latent: bool = False

    def scale_embedding(self, hidden: Tensor, config: PretrainedConfig) -> Tensor:
        return hidden if self.embedding_factor is None else hidden * config.to_dict()[self.embedding_factor]

    def finish_logits(self, logits: Tensor, config: PretrainedConfig) -> Tensor:
        """What the causal LM does between its head and the softmax."""
        settings = config.to_dict()
        if self.logits_factor is not None:
            logits = logits * settings[self.logits_factor]
        if self.logits_divisor is not None:
            logits = logits / settings[self.logits_divisor]
        cap = settings.get("final_logit_softcapping")
        return logits if cap is None else (logits / cap).tanh() * cap


PLAIN = Family()
BY_TYPE = Family(windows="by_layer_type")
ALL_LAYERS = Family(windows="all_layers")
HYBRID = Family(hybrid=True)
LATENT = Family(latent=True)

FAMILIES: dict[str, Family] = {
    "llama": PLAIN,
    "olmo2": PLAIN,
    "glm": PLAIN,
    "glm4": PLAIN,
    "gemma": PLAIN,
    "helium": PLAIN,
    "arcee": PLAIN,
    "seed_oss": PLAIN,
    "ernie4_5": PLAIN,
    "mistral": ALL_LAYERS,
    "mixtral": ALL_LAYERS,
    "phi3": ALL_LAYERS,
    "starcoder2": ALL_LAYERS,
    "qwen3_moe": ALL_LAYERS,
    "qwen2": BY_TYPE,
    "qwen3": BY_TYPE,
    "qwen2_moe": BY_TYPE,
    "smollm3": BY_TYPE,
    "ministral": BY_TYPE,
    "exaone4": BY_TYPE,
    "gpt_oss": BY_TYPE,
    "granite": Family(embedding_factor="embedding_multiplier", logits_divisor="logits_scaling"),
    "cohere": Family(logits_factor="logit_scale"),
    "cohere2": Family(windows="by_layer_type", logits_factor="logit_scale"),
    "olmo3": Family(windows="by_layer_type", rotary_by_layer_type=True),
    "gemma3_text": Family(windows="by_layer_type", rotary_by_layer_type=True),
    "qwen3_next": HYBRID,
    "qwen3_5_text": HYBRID,
    "qwen3_5_moe_text": HYBRID,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "glm_moe_dsa": LATENT,
}


def family_of(config: PretrainedConfig) -> Family:
    """The row of the table, or an `UnsupportedError` that names the model type, feature and what works."""
    model_type = config.model_type
    if model_type not in FAMILIES:
        names = ", ".join(sorted(FAMILIES))
        raise UnsupportedError(f"model type {model_type!r} is not supported; supported are: {names}.")
    settings = config.to_dict()
    _refuse_features(model_type, settings)
    return FAMILIES[model_type]


def layer_types(config: PretrainedConfig) -> list[str]:
    """One of full_attention, sliding_attention, linear_attention per layer."""
    settings = config.to_dict()
    family = FAMILIES[config.model_type]
    num_layers = config.num_hidden_layers
    if family.latent:
        return ["full_attention"] * num_layers  # one rotary embedding for all
    if family.hybrid or family.windows == "by_layer_type":
        return list(settings["layer_types"])[:num_layers]
    windowed = family.windows == "all_layers" and settings.get("sliding_window") is not None
    return ["sliding_attention" if windowed else "full_attention"] * num_layers


def layer_kinds(config: PretrainedConfig) -> list[LayerKind]:
    """What each layer keeps of its tokens."""
    if FAMILIES[config.model_type].latent:
        return _latent_kinds(config)
    window = config.to_dict().get("sliding_window")
    kinds: dict[str, LayerKind] = {
        "full_attention": KeyValueKind(),
        "sliding_attention": KeyValueKind(window),
        "linear_attention": RecurrentKind(),
    }
    return [kinds[kind] for kind in layer_types(config)]


def _latent_kinds(config: PretrainedConfig) -> list[LayerKind]:
    settings = config.to_dict()
    topk = settings.get("index_topk")
    if topk is None:
        return [LatentKind()] * config.num_hidden_layers
    return [LatentKind(topk, indexer) for indexer in _indexer_types(config.num_hidden_layers, settings)]


def _indexer_types(num_layers: int, settings: dict[str, object]) -> list[Literal["none", "full", "shared"]]:
    given = settings.get("indexer_types")
    return list(given)[:num_layers] if isinstance(given, list | tuple) else ["full"] * num_layers


def _refuse_features(model_type: str, settings: dict[str, object]) -> None:
    if settings.get("attn_logit_softcapping") is not None:
        raise UnsupportedError(
            f"{model_type}: attention soft caps (attn_logit_softcapping={settings['attn_logit_softcapping']}) are not "
            "supported, no flash kernel with a log-sum-exp takes them; use a model without, such as gemma3_text."
        )
    if settings.get("use_bidirectional_attention"):
        raise UnsupportedError(f"{model_type}: use_bidirectional_attention must be off, responses are causal.")
    for rope_type in _rope_types(settings.get("rope_parameters")):
        if rope_type not in FIXED_ROTARY:
            raise UnsupportedError(
                f"{model_type}: rotary type {rope_type!r} changes the rotation of keys already kept as the sequence "
                f"grows and is not supported; set rope_parameters to one of {', '.join(FIXED_ROTARY)}."
            )
    for name, value in settings.items():
        if name.endswith(("dropout", "_pdrop", "router_jitter_noise")) and isinstance(value, int | float) and value > 0:
            raise UnsupportedError(
                f"{model_type}: {name}={value} would make replay differ from capture; set {name}=0 in the config."
            )
    if FAMILIES[model_type].latent:
        _refuse_indexers(model_type, settings)
        return
    known = ("full_attention", "sliding_attention", "linear_attention")
    kinds = settings.get("layer_types")
    for kind in kinds if isinstance(kinds, list | tuple) else ():
        if kind not in known:
            raise UnsupportedError(f"{model_type}: layer type {kind!r} is not supported; supported are {known}.")


def _refuse_indexers(model_type: str, settings: dict[str, object]) -> None:
    """An IndexShare pattern that the stock model could not run either is refused before anything is allocated."""
    types = settings.get("indexer_types")
    if not isinstance(types, list | tuple):
        return
    strange = sorted({str(kind) for kind in types} - {"full", "shared"})
    if strange:
        raise UnsupportedError(f"{model_type}: indexer_types holds {strange}; supported are 'full' and 'shared'.")
    if types and types[0] == "shared":
        raise UnsupportedError(
            f"{model_type}: indexer_types begins with 'shared', which has no choice to share; the first must be 'full'."
        )


def _rope_types(parameters: object) -> list[str]:
    """The types in `rope_parameters`, which is flat or, with two bases, one dict per layer type."""
    if not isinstance(parameters, dict):
        return []
    if "rope_type" in parameters:
        return [str(parameters["rope_type"])]
    return [kind for value in parameters.values() for kind in _rope_types(value)]
