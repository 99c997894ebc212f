"""The two passes of Muon over a shard (Jordan et al., 2024). Between them its matrices are made orthogonal, which is no
kernel of this package."""

import torch
from torch import Tensor

from zero_kernels.hyper import columns_of
from zero_kernels.rules.rule import Coefficients, Rule, States

COEFFICIENTS = ("lr", "weight_decay", "momentum", "nesterov")
COLUMNS = columns_of("lr", "decay", "momentum", "share", "nesterov")


def table(coefficients: Coefficients, step: Tensor) -> dict[str, Tensor]:
    """`share` is the weight of the new gradient in the momentum."""
    return {
        "lr": coefficients["lr"],
        "decay": 1 - coefficients["lr"] * coefficients["weight_decay"],
        "momentum": coefficients["momentum"],
        "share": 1 - coefficients["momentum"],
        "nesterov": coefficients["nesterov"],
    }


def between(start: Tensor, end: Tensor, weight: Tensor, rest: Tensor) -> Tensor:
    """Interpolate from `start` to `end` by `weight`, from the nearer end, as torch's lerp does. `rest`: 1 - weight."""
    way = end - start
    return torch.where(weight < 0.5, start + weight * way, end - rest * way)


def look_ahead(g: Tensor, p: Tensor, states: States, c: Coefficients) -> tuple[Tensor, States]:
    """Give the new momentum, and in place of p the tensor that is to be made orthogonal. p is not read."""
    (m,) = states
    m = between(m, g, c["share"], c["momentum"])
    ahead = between(g, m, c["momentum"], c["share"])
    return torch.where(c["nesterov"] != 0, ahead, m), (m,)


def subtract(g: Tensor, p: Tensor, states: States, c: Coefficients) -> tuple[Tensor, States]:
    """Decay p and subtract the direction, which is multiplied by the rate already. g is not read."""
    (direction,) = states
    return p * c["decay"] - direction, states


MUON_LOOK_AHEAD = Rule("muon_look_ahead", ("momentum_buffer",), COEFFICIENTS, COLUMNS, table, look_ahead)
MUON_SUBTRACT = Rule("muon_subtract", ("direction",), COEFFICIENTS, COLUMNS, table, subtract)
