"""Update rules: the arithmetic of an optimizer, as data. ``docs/rules.md`` says how to write one."""

from .adamw import AdamW
from .lion import Lion
from .options import Betas, Fixed, Flag, Number
from .sgd import SGD
from .update_rule import Begins, Per, StateTensor, UpdateRule

__all__ = ["AdamW", "Begins", "Betas", "Fixed", "Flag", "Lion", "Number", "Per", "SGD", "StateTensor", "UpdateRule"]

RULES: dict[str, type[UpdateRule]] = {rule.__name__: rule for rule in (AdamW, Lion, SGD)}
"""The rules of the package, by their names, by which checkpoints know them."""
