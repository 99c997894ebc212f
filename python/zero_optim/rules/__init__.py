"""Update rules: the arithmetic of an optimizer, as data. ``docs/rules.md`` shows how to write one."""

from .codec import Begins, Bf16, Codec, Int8, Per, Root8, Split, Split8, StateTensor
from .kernel_rule import SGD, AdamW, Lion
from .muon import Muon
from .options import Betas, Fixed, Flag, Number
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
"""The rules of the package, by name, as checkpoints record them."""
