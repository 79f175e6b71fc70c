"""TRL's own loss and advantage code as the oracle, run without a model.

`GRPOTrainer._generate_and_score_completions` and `_compute_loss` are called unbound on a stand-in that returns given
responses, rewards and logprobs; everything between these and the loss is TRL's. The stand-in is a bare namespace, so
that an attribute TRL reads and we did not think of is an error.

Shape suffixes: B trajectories, T padded response tokens.
"""

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

EOS, PAD = 1, 0

SAME_ON_TRAINER_AND_CONFIG = (
    "beta",
    "importance_sampling_level",
    "loss_type",
    "mask_truncated_completions",
    "max_completion_length",
    "multi_objective_aggregation",
    "num_iterations",
    "off_policy_mask_threshold",
    "scale_rewards",
    "top_entropy_quantile",
    "use_vllm",
)


@pytest.fixture(autouse=True)
def float64():
    """TRL's constants follow the default dtype: both sides are compared in float64."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@dataclass
class Batch:
    """Right-padded trajectories. `trained_BT` is 0 at observations and padding; `logprobs_BT` is the policy's leaf."""

    trained_BT: torch.Tensor
    length_B: list[int]
    truncated_B: list[bool]
    logprobs_BT: torch.Tensor
    old_BT: torch.Tensor
    reference_BT: torch.Tensor
    entropies_BT: torch.Tensor
    rewards_B: torch.Tensor
    num_generations: int


class TrlOracle:
    def __init__(self, trainer_class, config_class):
        self._trainer_class = trainer_class
        self.defaults = {name: field.default for name, field in config_class.__dataclass_fields__.items()}

    def inputs(self, batch, options):
        """What TRL's trainer would train on: advantages, masks and the number of items, from rewards and tokens."""
        rows = [{"prompt": "p"} for _ in batch.length_B]
        return self._trainer_class._generate_and_score_completions(self._stand_in(batch, options), rows)

    def loss(self, batch, options, advantages_B):
        """TRL's loss, its gradient in `batch.logprobs_BT`, and its metrics as {name: value}."""
        trainer = self._stand_in(batch, options)
        inputs = self.inputs(batch, options) | {
            "advantages": advantages_B,
            "old_per_token_logps": batch.old_BT,
            "ref_per_token_logps": batch.reference_BT,
        }
        loss = self._trainer_class._compute_loss(trainer, None, inputs)
        (gradient_BT,) = torch.autograd.grad(loss, batch.logprobs_BT)
        return loss.detach(), gradient_BT, {name: values[0] for name, values in trainer._metrics["train"].items()}

    def _stand_in(self, batch, options):
        config = self.defaults | {"steps_per_generation": 1, "gradient_accumulation_steps": 1} | options
        tokens = [[5] * (n - 1) + [5 if cut else EOS] for n, cut in zip(batch.length_B, batch.truncated_B, strict=True)]
        trained = [batch.trained_BT[index, :length].tolist() for index, length in enumerate(batch.length_B)]
        generated = ([[7] for _ in tokens], tokens, trained, ["" for _ in tokens], None, {}, None, None)
        scored = (batch.logprobs_BT, batch.entropies_BT, None)
        logs = defaultdict(list) | {"rewards": defaultdict(list)}
        return SimpleNamespace(
            **{name: config[name] for name in SAME_ON_TRAINER_AND_CONFIG},
            args=SimpleNamespace(**config),
            accelerator=SimpleNamespace(
                device=torch.device("cpu"),
                num_processes=1,
                process_index=0,
                gather=lambda tensor: tensor,
                reduce=lambda tensor, reduction: tensor,
            ),
            model=SimpleNamespace(training=True, is_gradient_checkpointing=False),
            ref_model=object(),
            epsilon_low=config["epsilon"],
            epsilon_high=config["epsilon"] if config["epsilon_high"] is None else config["epsilon_high"],
            environment_factories=None,
            environments=None,
            tools=None,
            eos_token_ids=[EOS],
            pad_to_multiple_of=None,
            _tokenizer=SimpleNamespace(pad_token_id=PAD),
            num_generations=batch.num_generations,
            reward_weights=torch.ones(1),
            reward_funcs=[None],
            reward_func_names=["reward"],
            aux_loss_enabled=False,
            current_gradient_accumulation_steps=1,
            _entropy_bonus_enabled=False,
            _metrics={"train": defaultdict(list)},
            _logs=logs,
            _pending_extra_logs={},
            _pending_metrics={},
            _generate=lambda prompts: generated,
            _calculate_rewards=lambda inputs, prompts, completions, ids: batch.rewards_B.unsqueeze(1),
            _get_per_token_logps_and_entropies=lambda *args, **kwargs: scored,
        )


@pytest.fixture(scope="session")
def trl_oracle():
    trl = pytest.importorskip("trl")
    return TrlOracle(trl.GRPOTrainer, trl.GRPOConfig)


@pytest.fixture
def make_batch():
    return _make_batch


def _make_batch(num_generations=4, seed=0, rewards=None, equal_lengths=False):
    """Two groups of responses of odd lengths with observations inside; ratios on both sides of every bound.

    Each trajectory's logprobs also differ from the old ones by a shift of its own, so that ratios of sequences
    leave the bounds too.
    """
    generator = torch.Generator().manual_seed(seed)
    num_trajectories = 2 * num_generations
    length_B = [7] * num_trajectories if equal_lengths else [1 + (5 * index) % 13 for index in range(num_trajectories)]
    shape = (num_trajectories, max(length_B))
    trained_BT = torch.zeros(shape, dtype=torch.long)
    for index, length in enumerate(length_B):
        trained_BT[index, :length] = 1
        if index % 3 == 1 and length > 3:
            trained_BT[index, 1:3] = 0

    def noise(scale):
        return scale * torch.randn(shape, generator=generator)

    old_BT = -1 - noise(0.3).abs()
    shift_B1 = torch.linspace(-0.6, 0.6, num_trajectories)[torch.randperm(num_trajectories, generator=generator), None]
    if rewards is None:
        rewards = torch.rand(num_trajectories, generator=generator)
    return Batch(
        trained_BT=trained_BT,
        length_B=length_B,
        truncated_B=[index % 3 == 2 for index in range(num_trajectories)],
        logprobs_BT=(old_BT + noise(0.3) + shift_B1).requires_grad_(),
        old_BT=old_BT,
        reference_BT=old_BT + noise(0.3),
        entropies_BT=noise(1.0).abs(),
        rewards_B=torch.as_tensor(rewards),
        num_generations=num_generations,
    )
