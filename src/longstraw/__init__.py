"""LongStraw: GRPO on very long prompts on a fixed number of GPUs, with the exact gradient. The public names."""

from longstraw.errors import InputError, LongStrawError, StaleStateError, UnsupportedError
from longstraw.execution.engine import Engine
from longstraw.execution.state import PromptState
from longstraw.grpo.losses import GRPO
from longstraw.models.loading import LoraSettings, load_model
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
    "Trajectory",
    "UnsupportedError",
    "load_model",
]
__version__ = "0.1.0"
