"""Lion (Chen et al., 2023), with decoupled weight decay."""

from torch import Tensor

from zero_kernels.hyper import columns_of
from zero_kernels.rules.rule import Coefficients, Rule, States, sign


def table(coefficients: Coefficients, step: Tensor) -> dict[str, Tensor]:
    lr, beta1, beta2 = (coefficients[name] for name in ("lr", "beta1", "beta2"))
    return {
        "step_size": lr,
        "decay": 1 - lr * coefficients["weight_decay"],
        "beta1": beta1,
        "one_minus_beta1": 1 - beta1,
        "beta2": beta2,
        "one_minus_beta2": 1 - beta2,
        "grad_factor": 1 - 2 * coefficients["maximize"],
    }


def update(g: Tensor, p: Tensor, states: States, c: Coefficients) -> tuple[Tensor, States]:
    (m,) = states
    p = p * c["decay"]
    u = m * c["beta1"] + g * c["one_minus_beta1"]
    p = p - c["step_size"] * sign(u)
    m = m * c["beta2"] + g * c["one_minus_beta2"]
    return p, (m,)


LION = Rule(
    "lion",
    ("exp_avg",),
    ("lr", "beta1", "beta2", "weight_decay", "maximize"),
    columns_of("step_size", "decay", "beta1", "one_minus_beta1", "beta2", "one_minus_beta2"),
    table,
    update,
)
