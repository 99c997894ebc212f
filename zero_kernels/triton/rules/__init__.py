"""The update rules in Triton, a file each; `OPS` of the backend has what runs them."""

from zero_kernels.triton.rules.adamw import adamw
from zero_kernels.triton.rules.amsgrad import amsgrad
from zero_kernels.triton.rules.lion import lion
from zero_kernels.triton.rules.muon import muon_look_ahead, muon_subtract
from zero_kernels.triton.rules.sgd import sgd, sgd_plain

UPDATES = {
    "adamw": adamw,
    "amsgrad": amsgrad,
    "lion": lion,
    "sgd": sgd,
    "sgd_plain": sgd_plain,
    "muon_look_ahead": muon_look_ahead,
    "muon_subtract": muon_subtract,
}
"""By name of the rule: (g, p, states, row) → (p, states). `row` points to each row's coefficients, [ROWS, 1]."""
