"""LongStraw: GRPO on very long prompts on a fixed number of GPUs, with the exact gradient. The public names.

They are loaded when first used, so that the command line can refuse a wrong configuration without importing torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longstraw.errors import InputError, LongStrawError, StaleStateError, UnsupportedError
    from longstraw.execution.engine import Engine
    from longstraw.execution.state import PromptState
    from longstraw.grpo.losses import GRPO
    from longstraw.models.adapters import LoraSettings
    from longstraw.models.loading import load_model
    from longstraw.models.presets import preset_config
    from longstraw.models.tiny import tiny_model
    from longstraw.parallel.topology import Topology
    from longstraw.records import (
        ForwardBackwardReport,
        Prompt,
        Response,
        ResponseGroup,
        SamplingSettings,
        Span,
        StepReport,
        Trajectory,
    )

_HOMES = {
    "GRPO": "grpo.losses",
    "Engine": "execution.engine",
    "ForwardBackwardReport": "records",
    "InputError": "errors",
    "LongStrawError": "errors",
    "LoraSettings": "models.adapters",
    "Prompt": "records",
    "PromptState": "execution.state",
    "Response": "records",
    "ResponseGroup": "records",
    "SamplingSettings": "records",
    "Span": "records",
    "StaleStateError": "errors",
    "StepReport": "records",
    "Topology": "parallel.topology",
    "Trajectory": "records",
    "UnsupportedError": "errors",
    "load_model": "models.loading",
    "preset_config": "models.presets",
    "tiny_model": "models.tiny",
}

__all__ = [
    "GRPO",
    "Engine",
    "ForwardBackwardReport",
    "InputError",
    "LongStrawError",
    "LoraSettings",
    "Prompt",
    "PromptState",
    "Response",
    "ResponseGroup",
    "SamplingSettings",
    "Span",
    "StaleStateError",
    "StepReport",
    "Topology",
    "Trajectory",
    "UnsupportedError",
    "load_model",
    "preset_config",
    "tiny_model",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'longstraw' has no attribute {name!r}")
    value: object = vars(importlib.import_module(f"longstraw.{_HOMES[name]}"))[name]
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
