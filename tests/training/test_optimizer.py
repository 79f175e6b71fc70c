import pytest
import torch

from longstraw.config import OptimizerConfig
from longstraw.errors import InputError
from longstraw.training.optimizer import learning_rate_at, make_optimizer


def rates(max_steps, **settings):
    config = OptimizerConfig(learning_rate=1.0, **settings)
    return [round(learning_rate_at(step, max_steps=max_steps, config=config), 6) for step in range(1, max_steps + 1)]


def test_warm_up_rises_linearly_and_no_step_is_wasted_on_zero():
    assert rates(5, warmup_steps=4) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert rates(3) == [1.0, 1.0, 1.0]


def test_linear_and_cosine_fall_from_the_peak():
    assert rates(6, warmup_steps=2, lr_scheduler_type="linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = rates(6, warmup_steps=2, lr_scheduler_type="cosine")
    assert cosine == [0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447]


def test_a_warm_up_longer_than_the_run_never_divides_by_zero():
    assert rates(3, warmup_steps=3, lr_scheduler_type="linear")[-1] == 1.0
    assert len(rates(3, warmup_steps=9, lr_scheduler_type="cosine")) == 3


def test_norms_and_biases_are_not_decayed():
    parameters = [("w", torch.nn.Parameter(torch.ones(2, 2))), ("norm", torch.nn.Parameter(torch.ones(2)))]
    optimizer = make_optimizer(parameters, OptimizerConfig(weight_decay=0.1))
    assert [(group["params"][0].dim(), group["weight_decay"]) for group in optimizer.param_groups] == [
        (2, 0.1),
        (1, 0.0),
    ]


def test_only_trained_parameters_are_optimised_and_none_is_refused():
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    trained = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = make_optimizer([("frozen", frozen), ("trained", trained)], OptimizerConfig())
    assert [group["params"] for group in optimizer.param_groups] == [[trained]]
    with pytest.raises(InputError, match="no parameter would be trained"):
        make_optimizer([("frozen", frozen)], OptimizerConfig())
