"""AdamW (Loshchilov and Hutter, 2019), and Adam with L2 in the gradient (Kingma and Ba, 2015)."""

import torch
from torch import Tensor

from zero_kernels.hyper import HYPER_COEFFICIENTS, HYPER_COLUMNS
from zero_kernels.rules.rule import Coefficients, Rule, States, power, square_root


def table(coefficients: Coefficients, step: Tensor) -> dict[str, Tensor]:
    """What the op `hyper_table` computes (see `docs/ops.md`)."""
    lr, beta1, beta2, eps, weight_decay, decoupled, maximize = (coefficients[name] for name in HYPER_COEFFICIENTS)
    shared = weight_decay * decoupled
    return {
        "step_size": lr / (1 - power(beta1, step)),
        "decay": 1 - lr * shared,
        "weight_decay": weight_decay - shared,
        "eps": eps,
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "bias_correction2_sqrt": (1 - power(beta2, step)).sqrt(),
        "grad_factor": 1 - 2 * maximize,
    }


def moments(g: Tensor, p: Tensor, m: Tensor, v: Tensor, c: Coefficients) -> tuple[Tensor, Tensor, Tensor]:
    """The decayed p, and both new moments."""
    g = torch.where(c["weight_decay"] != 0, g + c["weight_decay"] * p, g)
    m = m * c["beta1"] + g * c["one_minus_beta1"]
    v = v * c["beta2"] + (g * c["one_minus_beta2"]) * g
    return p * c["decay"], m, v


def stepped(p: Tensor, m: Tensor, v: Tensor, c: Coefficients) -> Tensor:
    return p - c["step_size"] * (m / (square_root(v) / c["bias_correction2_sqrt"] + c["eps"]))


def update(g: Tensor, p: Tensor, states: States, c: Coefficients) -> tuple[Tensor, States]:
    m, v = states
    p, m, v = moments(g, p, m, v, c)
    return stepped(p, m, v, c), (m, v)


ADAMW = Rule("adamw", ("exp_avg", "exp_avg_sq"), HYPER_COEFFICIENTS, HYPER_COLUMNS, table, update)
