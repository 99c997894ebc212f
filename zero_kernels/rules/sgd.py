"""SGD as `torch.optim.SGD` has it: with momentum, dampening and Nesterov's look-ahead, or with no state at all."""

import torch
from torch import Tensor

from zero_kernels.hyper import columns_of
from zero_kernels.rules.rule import Coefficients, Rule, States

COEFFICIENTS = ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize")
COLUMNS = columns_of("lr", "weight_decay", "momentum", "keep", "take", "nesterov")


def table(coefficients: Coefficients, step: Tensor) -> dict[str, Tensor]:
    """In the first step `keep` is 0 and `take` 1: the buffer is the gradient itself. Dampening needs a momentum."""
    momentum, first = coefficients["momentum"], step == 1
    return {
        "lr": coefficients["lr"],
        "weight_decay": coefficients["weight_decay"],
        "momentum": momentum,
        "keep": torch.where(first, 0.0, momentum),
        "take": torch.where(first | (momentum == 0), 1.0, 1 - coefficients["dampening"]),
        "nesterov": coefficients["nesterov"],
        "grad_factor": 1 - 2 * coefficients["maximize"],
    }


def decayed(g: Tensor, p: Tensor, c: Coefficients) -> Tensor:
    return torch.where(c["weight_decay"] != 0, g + c["weight_decay"] * p, g)


def update(g: Tensor, p: Tensor, states: States, c: Coefficients) -> tuple[Tensor, States]:
    (b,) = states
    g = decayed(g, p, c)
    b = b * c["keep"] + g * c["take"]
    u = torch.where(c["nesterov"] != 0, g + c["momentum"] * b, b)
    return p - c["lr"] * u, (b,)


def update_plain(g: Tensor, p: Tensor, states: States, c: Coefficients) -> tuple[Tensor, States]:
    return p - c["lr"] * decayed(g, p, c), states


SGD = Rule("sgd", ("momentum_buffer",), COEFFICIENTS, COLUMNS, table, update)
SGD_PLAIN = Rule("sgd_plain", (), COEFFICIENTS, COLUMNS, table, update_plain)
