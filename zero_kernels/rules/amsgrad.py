"""AMSGrad (Reddi, Kale and Kumar, 2018): AdamW by the largest second moment so far. Its table is AdamW's."""

from torch import Tensor

from zero_kernels.hyper import HYPER_COEFFICIENTS, HYPER_COLUMNS
from zero_kernels.rules.adamw import moments, stepped, table
from zero_kernels.rules.rule import Coefficients, Rule, States, larger_magnitude


def update(g: Tensor, p: Tensor, states: States, c: Coefficients) -> tuple[Tensor, States]:
    m, v, w = states
    p, m, v = moments(g, p, m, v, c)
    w = larger_magnitude(w, v)
    return stepped(p, m, w, c), (m, v, w)


AMSGRAD = Rule("amsgrad", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"), HYPER_COEFFICIENTS, HYPER_COLUMNS, table, update)
