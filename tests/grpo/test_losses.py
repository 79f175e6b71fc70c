"""GRPO's losses: the same numbers as TRL's own code, in sum form.

Shape suffixes: B trajectories, T padded response tokens, R trained tokens of one trajectory.
"""

import math

import pytest
import torch

from longstraw.errors import InputError
from longstraw.grpo.losses import GRPO, IMPORTANCE_SAMPLING_LEVELS, LOSS_TYPES
from longstraw.grpo.objective import LossMetricSums, Objective, TrajectoryLogprobs

EXACT = {"rtol": 1e-10, "atol": 1e-12}
MAX_COMPLETION_LENGTH = 17
DIVERGENCES = [(0.0, True), (0.07, True), (0.07, False)]  # beta, use_bias_correction_kl
SIGNED_ADVANTAGES = torch.tensor([1.3, -0.7, 0.0, -1.9, 0.4, 2.2, -0.1, -1.2], dtype=torch.float64)


def update(objective, batch, advantages_B):
    """Loss, cotangents [B, T] and metric means of one update, as the engine makes them: sums, one division."""
    loss_sum, denominator, sums = 0.0, 0.0, LossMetricSums()
    old_BT = batch.logprobs_BT.detach() if batch.old_BT is None else batch.old_BT
    cotangent_BT = torch.zeros_like(batch.logprobs_BT)
    for index, advantage in enumerate(advantages_B.tolist()):
        trained_T = batch.trained_BT[index].bool()
        leaf_R = batch.logprobs_BT.detach()[index][trained_T].requires_grad_()
        trajectory = TrajectoryLogprobs(
            logprobs_R=leaf_R,
            entropies_R=batch.entropies_BT[index][trained_T].requires_grad_(),
            old_logprobs_R=old_BT[index][trained_T],
            reference_logprobs_R=batch.reference_BT[index][trained_T] if objective.needs_reference else None,
            advantage=advantage,
            truncated=batch.truncated_B[index],
        )
        contribution = objective.trajectory_loss(trajectory)
        contribution.loss.backward()
        cotangent_BT[index, trained_T] = leaf_R.grad
        loss_sum += contribution.loss.item()
        sums.add(contribution.metric_sums)
        denominator += objective.denominator(leaf_R.numel(), batch.truncated_B[index])
    return loss_sum / denominator, cotangent_BT / denominator, sums.means()


@pytest.fixture
def compare(trl_oracle, make_batch):
    """Asserts that loss and cotangents of one update equal TRL's."""

    def assert_equal(options, advantages_B, *, recorded=True):
        batch = make_batch()
        if not recorded:
            batch.old_BT = None
        expected_loss, expected_BT, _ = trl_oracle.loss(batch, options, advantages_B)
        loss, cotangent_BT, _ = update(GRPO(**options), batch, advantages_B)
        assert loss == pytest.approx(expected_loss.item(), rel=1e-10, abs=1e-12)
        torch.testing.assert_close(cotangent_BT, expected_BT, **EXACT)

    return assert_equal


def trajectory(logprobs, old_logprobs, advantage=1.0, *, truncated=False):
    logprobs_R = torch.tensor(logprobs, requires_grad=True)
    return TrajectoryLogprobs(
        logprobs_R=logprobs_R,
        entropies_R=torch.ones_like(logprobs_R).requires_grad_(),
        old_logprobs_R=torch.tensor(old_logprobs),
        reference_logprobs_R=None,
        advantage=advantage,
        truncated=truncated,
    )


@pytest.mark.parametrize("masked", [False, True], ids=["", "masked"])
@pytest.mark.parametrize(("beta", "bias_correction"), DIVERGENCES, ids=["", "kl", "plain_kl"])
@pytest.mark.parametrize("delta", [None, 1.3], ids=["", "delta"])
@pytest.mark.parametrize("epsilon_high", [None, 0.28], ids=["", "high"])
@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_values_and_cotangents_equal_trl(compare, loss_type, level, epsilon_high, delta, beta, bias_correction, masked):
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "epsilon_high": epsilon_high,
        "delta": delta,
        "beta": beta,
        "use_bias_correction_kl": bias_correction,
        "mask_truncated_completions": masked,
        "max_completion_length": MAX_COMPLETION_LENGTH,
    }
    compare(options, SIGNED_ADVANTAGES)


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("bounds", [(0.0, None, 1.1), (0.05, 1.2, 1.1), (0.5, 0.0, 0.7), (1.5, 5.0, None)])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_one_sign_of_advantages_and_unusual_bounds_equal_trl(compare, loss_type, bounds, sign):
    epsilon, epsilon_high, delta = bounds
    options = {
        "loss_type": loss_type,
        "epsilon": epsilon,
        "epsilon_high": epsilon_high,
        "delta": delta,
        "sapo_temperature_pos": 0.8,
        "sapo_temperature_neg": 2.5,
        "max_completion_length": MAX_COMPLETION_LENGTH,
    }
    compare(options, sign * SIGNED_ADVANTAGES.abs())


@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_unrecorded_old_logprobs_equal_trl_without_them(compare, loss_type, level):
    options = {
        "loss_type": loss_type,
        "importance_sampling_level": level,
        "beta": 0.07,
        "max_completion_length": MAX_COMPLETION_LENGTH,
    }
    compare(options, SIGNED_ADVANTAGES, recorded=False)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_float32_equals_trl_in_float32(trl_oracle, make_batch, loss_type):
    torch.set_default_dtype(torch.float32)
    options = {"loss_type": loss_type, "beta": 0.07, "max_completion_length": MAX_COMPLETION_LENGTH}
    batch, advantages_B = make_batch(), SIGNED_ADVANTAGES.float()
    expected_loss, expected_BT, _ = trl_oracle.loss(batch, options, advantages_B)
    loss, cotangent_BT, _ = update(GRPO(**options), batch, advantages_B)
    assert cotangent_BT.dtype == torch.float32
    assert loss == pytest.approx(expected_loss.item(), abs=1e-6)
    torch.testing.assert_close(cotangent_BT, expected_BT, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("delta", [None, 1.3, 1.1])
@pytest.mark.parametrize("mask_truncated", [False, True])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_token_level_metrics_equal_trl(trl_oracle, make_batch, loss_type, mask_truncated, delta):
    options = {
        "loss_type": loss_type,
        "delta": delta,
        "epsilon_high": 0.25,
        "beta": 0.07,
        "mask_truncated_completions": mask_truncated,
        "max_completion_length": MAX_COMPLETION_LENGTH,
    }
    batch = make_batch()
    _, _, expected = trl_oracle.loss(batch, options, SIGNED_ADVANTAGES)
    _, _, metrics = update(GRPO(**options), batch, SIGNED_ADVANTAGES)
    assert metrics.entropy == pytest.approx(expected["entropy"])
    assert metrics.kl == pytest.approx(expected["kl"])
    # cispo has an upper bound only, under a name of its own; sapo has none.
    high = expected.get("clip_ratio/high_mean", expected.get("cispo_clip_ratio", 0.0))
    assert metrics.clip_ratio_low == pytest.approx(expected.get("clip_ratio/low_mean", 0.0))
    assert metrics.clip_ratio_high == pytest.approx(high)
    assert metrics.clip_ratio_region == pytest.approx(expected.get("clip_ratio/region_mean", high))


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_sequence_level_metrics_equal_trl_at_equal_lengths(trl_oracle, make_batch, loss_type):
    options = {
        "loss_type": loss_type,
        "beta": 0.07,
        "max_completion_length": MAX_COMPLETION_LENGTH,
        "importance_sampling_level": "sequence",
    }
    batch = make_batch(equal_lengths=True)
    batch.trained_BT = torch.ones_like(batch.trained_BT)
    _, _, expected = trl_oracle.loss(batch, options, SIGNED_ADVANTAGES)
    _, _, metrics = update(GRPO(**options), batch, SIGNED_ADVANTAGES)
    assert metrics.entropy == pytest.approx(expected["entropy"])
    assert metrics.kl == pytest.approx(expected["kl"])
    high = expected.get("clip_ratio/high_mean", expected.get("cispo_clip_ratio", 0.0))
    assert metrics.clip_ratio_low == pytest.approx(expected.get("clip_ratio/low_mean", 0.0))
    assert metrics.clip_ratio_high == pytest.approx(high)


def test_the_batch_reaches_every_bound(make_batch):
    """Without clipped tokens on both sides, at both levels, the comparisons above would prove little."""
    for level in IMPORTANCE_SAMPLING_LEVELS:
        _, _, metrics = update(GRPO(importance_sampling_level=level), make_batch(), SIGNED_ADVANTAGES)
        assert 0.02 < metrics.clip_ratio_low < 0.9
        assert 0.02 < metrics.clip_ratio_high < 0.9


def test_defaults_are_those_of_trl(trl_oracle):
    objective = GRPO()
    names = [name for name in GRPO.__dataclass_fields__ if name != "max_completion_length"]
    assert {name: objective.__dict__[name] for name in names} == {name: trl_oracle.defaults[name] for name in names}


def test_importance_ratio_is_one_where_nothing_changed():
    same = trajectory([-1.0, -2.0, -0.5], [-1.0, -2.0, -0.5])
    metrics = GRPO().trajectory_loss(same).metric_sums.means()
    assert metrics.importance_ratio_mean == metrics.importance_ratio_min == metrics.importance_ratio_max == 1.0
    assert metrics.sampling_logprob_difference_mean == metrics.sampling_logprob_difference_max == 0.0


@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
def test_sampling_metrics_are_of_tokens_at_every_level(level):
    moved = trajectory([-1.0, -2.0, -0.5], [-1.5, -1.9, -0.5])
    metrics = GRPO(importance_sampling_level=level).trajectory_loss(moved).metric_sums.means()
    ratios = [math.exp(0.5), math.exp(-0.1), 1.0]
    assert metrics.importance_ratio_mean == pytest.approx(sum(ratios) / 3)
    assert metrics.importance_ratio_min == pytest.approx(min(ratios))
    assert metrics.importance_ratio_max == pytest.approx(max(ratios))
    assert metrics.sampling_logprob_difference_mean == pytest.approx(0.2)
    assert metrics.sampling_logprob_difference_max == pytest.approx(0.5)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_masked_trajectory_adds_nothing_but_its_place_among_sequences(loss_type):
    objective = GRPO(loss_type=loss_type, mask_truncated_completions=True, max_completion_length=9)
    cut = trajectory([-1.0, -3.0], [-1.0, -2.0], truncated=True)
    contribution = objective.trajectory_loss(cut)
    contribution.loss.backward()
    assert contribution.loss.item() == 0.0
    assert cut.logprobs_R.grad.tolist() == [0.0, 0.0]
    assert contribution.metric_sums == LossMetricSums()
    counted = {"grpo": 1.0, "sapo": 1.0, "dr_grpo": 9.0, "bnpo": 0.0, "dapo": 0.0, "cispo": 0.0}
    assert objective.denominator(2, truncated=True) == counted[loss_type]


@pytest.mark.parametrize("level", IMPORTANCE_SAMPLING_LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_a_trajectory_without_trained_tokens_is_zero_and_not_nan(loss_type, level):
    objective = GRPO(loss_type=loss_type, importance_sampling_level=level, max_completion_length=9)
    contribution = objective.trajectory_loss(trajectory([], []))
    contribution.loss.backward()
    assert contribution.loss.item() == 0.0
    assert contribution.metric_sums.means() == LossMetricSums().means()


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_zero_advantage_gives_exactly_zero_cotangents(loss_type):
    still = trajectory([-1.0, -3.0, -0.2], [-1.2, -2.0, -0.3], advantage=0.0)
    GRPO(loss_type=loss_type, max_completion_length=9).trajectory_loss(still).loss.backward()
    assert still.logprobs_R.grad.abs().max().item() == 0.0


def test_only_a_divergence_needs_the_reference():
    assert not GRPO().needs_reference
    assert GRPO(beta=0.1).needs_reference
    with pytest.raises(InputError, match="reference_logprobs_R must be given"):
        GRPO(beta=0.1).trajectory_loss(trajectory([-1.0], [-1.0]))


def test_grpo_is_an_objective_and_cannot_be_changed():
    objective: Objective = GRPO(scale_rewards=False)
    assert objective.scale_rewards == "none"
    assert GRPO(scale_rewards=True) == GRPO()
    with pytest.raises(AttributeError):
        objective.beta = 1.0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss_type": "drgrpo"}, "loss_type 'drgrpo' is unknown; did you mean \"dr_grpo\""),
        ({"loss_type": None}, "loss_type None is unknown"),
        ({"loss_type": "gspo"}, 'for GSPO set loss_type="grpo" and importance_sampling_level="sequence"'),
        ({"loss_type": "dr_grpo"}, "divides by max_completion_length"),
        ({"importance_sampling_level": "sequenc"}, 'did you mean "sequence"'),
        ({"scale_rewards": "batches"}, 'did you mean "batch"'),
        ({"epsilon": -0.1}, "epsilon must be non-negative, got -0.1"),
        ({"epsilon": "0.2"}, "epsilon must be a non-negative number, got '0.2'"),
        ({"epsilon": None}, "epsilon must be a non-negative number, got None"),
        ({"epsilon_high": -1}, "epsilon_high must be non-negative"),
        ({"epsilon_high": math.nan}, "epsilon_high must be a non-negative number, got nan"),
        ({"delta": 0.0}, "delta must be positive"),
        ({"delta": math.inf}, "delta must be a positive number"),
        ({"beta": -0.01}, "beta must be non-negative, got -0.01"),
        ({"beta": True}, "beta must be a non-negative number, got True"),
        ({"sapo_temperature_pos": 0}, "sapo_temperature_pos must be positive"),
        ({"sapo_temperature_neg": -1.0}, "sapo_temperature_neg must be positive"),
        ({"mask_truncated_completions": "no"}, "mask_truncated_completions must be true or false, got 'no'"),
        ({"use_bias_correction_kl": 1}, "use_bias_correction_kl must be true or false, got 1"),
        ({"max_completion_length": 0}, "max_completion_length must be a whole number of at least 1 token, got 0"),
        ({"max_completion_length": 9.5}, "max_completion_length must be a whole number"),
    ],
)
def test_a_wrong_setting_is_refused_in_one_sentence(settings, message):
    with pytest.raises(InputError) as caught:
        GRPO(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
