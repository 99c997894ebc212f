"""What cannot be done is said at once, naming the parameter and the remedy."""

from __future__ import annotations

import pytest
import torch
import zero_optim
from torch import nn
from training_cases import linear_backward, make_gradients, make_parameters, named


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": float("nan")},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"eps": -1e-8},
        {"weight_decay": -0.1},
        {"stage": -1},
        {"stage": 4},
        {"stage": "2"},
        {"bucket_cap_mb": 0},
        {"bucket_cap_mb": -1.0},
        {"max_grad_norm": -1.0},
        {"grad_reduce_dtype": torch.int32},
        {"grad_reduce_dtype": torch.float64},
    ],
    ids=str,
)
def test_a_bad_argument_is_a_value_error_that_names_it(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        zero_optim.ShardedAdamW(make_parameters(), **options)


def test_no_parameters_is_a_value_error():
    with pytest.raises(ValueError, match="empty|no parameter"):
        zero_optim.ShardedAdamW([])


def test_a_bad_group_option_is_a_value_error():
    with pytest.raises(ValueError, match="lr"):
        zero_optim.ShardedAdamW([{"params": make_parameters(), "lr": -1.0}])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(3, dtype=torch.float64),
        torch.ones(3, dtype=torch.complex64),
        torch.ones(3).to_sparse(),
        torch.ones(3, device="meta"),
        torch.ones(3, dtype=torch.float8_e4m3fn),
    ],
    ids=lambda tensor: f"{tensor.dtype}-{tensor.layout}-{tensor.device.type}",
)
@pytest.mark.parametrize("with_names", [True, False])
def test_a_parameter_that_it_cannot_hold_is_named(tensor, with_names):
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(tensor)
    entries = [("encoder.good", good), ("encoder.bad", bad)] if with_names else [good, bad]
    with pytest.raises(zero_optim.ParameterError) as caught:
        zero_optim.ShardedAdamW(entries)
    text = str(caught.value)
    assert "encoder.bad" in text if with_names else "1" in text
    assert isinstance(caught.value, zero_optim.ZeroOptimError)
    assert not good._post_accumulate_grad_hooks


def test_a_tensor_that_is_no_leaf():
    with pytest.raises((ValueError, zero_optim.ParameterError), match="leaf"):
        zero_optim.ShardedAdamW([torch.ones(3, requires_grad=True) * 2])


def test_something_that_is_no_tensor():
    with pytest.raises(TypeError):
        zero_optim.ShardedAdamW([1.0, 2.0])


def test_the_same_parameter_in_two_groups():
    p = nn.Parameter(torch.ones(3))
    with pytest.raises(ValueError, match="group"):
        zero_optim.ShardedAdamW([{"params": [p]}, {"params": [p]}])


@pytest.mark.parametrize(
    "grad",
    [torch.ones(4, 3).to_sparse(), torch.ones(4, 3, dtype=torch.float64)],
    ids=["sparse", "float64"],
)
def test_an_unexpected_gradient_is_named(grad):
    params = [nn.Parameter(torch.ones(4, 3)), nn.Parameter(torch.ones(2))]
    opt = zero_optim.ShardedAdamW([("table.weight", params[0]), ("bias", params[1])])
    params[0].grad_dtype = None  # let autograd's check pass, as a user who knows can
    params[0].grad = grad
    with pytest.raises(zero_optim.GradientError, match="table.weight"):
        opt.step()
    opt.close()


def test_a_sparse_gradient_from_backward_is_named():
    table = nn.Embedding(6, 3, sparse=True)
    opt = zero_optim.ShardedAdamW(table.named_parameters())
    with pytest.raises(zero_optim.GradientError, match="weight"):
        table(torch.tensor([1, 2])).sum().backward()
        opt.step()
    opt.close()


@pytest.mark.parametrize("change", ["half", "data"])
def test_a_model_that_was_cast_or_moved_is_noticed(change):
    params = make_parameters()
    opt = zero_optim.ShardedAdamW(named(params))
    linear_backward(params, make_gradients(params, 0, 0))
    opt.step()
    opt.zero_grad()
    params[1].data = params[1].data.half() if change == "half" else params[1].data.clone()
    with pytest.raises(zero_optim.ParameterError, match="layer1.weight"):
        linear_backward(params, make_gradients(params, 0, 1))
        opt.step()
    opt.close()


@pytest.mark.parametrize("method", ["step", "clip"])
def test_a_closed_optimizer_says_so(method):
    opt = zero_optim.ShardedAdamW(make_parameters())
    opt.close()
    opt.close()
    with pytest.raises(zero_optim.ClosedError, match="closed"):
        opt.step() if method == "step" else opt.clip_grad_norm_(1.0)


@pytest.mark.parametrize("norm_type", [0.0, -1.0, float("nan")])
def test_a_norm_that_does_not_exist(norm_type):
    params = make_parameters()
    opt = zero_optim.ShardedAdamW(params)
    linear_backward(params, make_gradients(params, 0, 0))
    with pytest.raises(ValueError, match="norm"):
        opt.clip_grad_norm_(1.0, norm_type)
    opt.close()


def test_errors_share_a_base():
    for name in (
        "ParameterError",
        "RankMismatchError",
        "GradientError",
        "OffloadError",
        "ShardAccessError",
        "ClosedError",
        "StateMismatchError",
    ):
        assert issubclass(getattr(zero_optim, name), zero_optim.ZeroOptimError)
    assert issubclass(zero_optim.ZeroOptimError, RuntimeError)
