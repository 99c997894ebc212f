"""The generators of random numbers of this process: torch's, Python's, and NumPy's where it is used."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def read_random_states(device: torch.device) -> dict[str, Any]:
    """Read the states, as plain values and tensors, by generator. ``device``: where the training is."""
    states: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if "numpy" in sys.modules:
        kind, words, *rest = sys.modules["numpy"].random.get_state()
        states["numpy"] = (kind, torch.from_numpy(words).clone(), *rest)
    return states


def set_random_states(states: Mapping[str, Any], device: torch.device) -> None:
    """Set the states that ``read_random_states`` gave, but for generators that are not used here."""
    torch.set_rng_state(states["torch"])
    random.setstate(states["python"])
    if "cuda" in states and device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "numpy" in states and "numpy" in sys.modules:
        kind, words, *rest = states["numpy"]
        sys.modules["numpy"].random.set_state((kind, words.numpy(), *rest))
