"""Update rules: the arithmetic of an optimizer, as data. ``docs/rules.md`` says how to write one."""

from .adamw import AdamW
from .codec import Bf16, Codec, Int8, Root8, Split, Split8
from .lion import Lion
from .muon import Muon
from .options import Betas, Fixed, Flag, Number
from .sgd import SGD
from .state_tensor import Begins, Per, StateTensor
from .update_rule import UpdateRule

__all__ = [
    "AdamW",
    "Begins",
    "Bf16",
    "Betas",
    "Codec",
    "Fixed",
    "Flag",
    "Int8",
    "Lion",
    "Muon",
    "Number",
    "Per",
    "Root8",
    "SGD",
    "Split",
    "Split8",
    "StateTensor",
    "UpdateRule",
]

RULES: dict[str, type[UpdateRule]] = {rule.__name__: rule for rule in (AdamW, Lion, Muon, SGD)}
"""The rules of the package, by their names, by which checkpoints know them."""
