"""The update rules, by name: `foreach_step` runs one of them."""

from zero_kernels.rules.adamw import ADAMW
from zero_kernels.rules.amsgrad import AMSGRAD
from zero_kernels.rules.lion import LION
from zero_kernels.rules.muon import MUON_LOOK_AHEAD, MUON_SUBTRACT
from zero_kernels.rules.rule import Rule
from zero_kernels.rules.sgd import SGD, SGD_PLAIN

_ALL = (ADAMW, AMSGRAD, LION, SGD, SGD_PLAIN, MUON_LOOK_AHEAD, MUON_SUBTRACT)
RULES: dict[str, Rule] = {rule.name: rule for rule in _ALL}
