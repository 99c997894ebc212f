"""The update rules, by name: `foreach_step` runs one of them."""

from zero_kernels.rules.adamw import ADAMW
from zero_kernels.rules.amsgrad import AMSGRAD
from zero_kernels.rules.lion import LION
from zero_kernels.rules.rule import Rule
from zero_kernels.rules.sgd import SGD, SGD_PLAIN

RULES: dict[str, Rule] = {rule.name: rule for rule in (ADAMW, AMSGRAD, LION, SGD, SGD_PLAIN)}
