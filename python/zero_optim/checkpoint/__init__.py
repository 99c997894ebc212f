"""Checkpoints that load on any number of ranks, at any stage; and the state dicts of one rank and of the whole.

``safetensors_file`` ← ``index`` (what is where) ← ``rank_file`` (bytes) ← ``folder`` (publishing, and which is the
newest) ← ``contents``, ``optimizers`` (what a rank holds) ← ``subject`` ← ``saving``, ``loading``. Apart from these,
``rank_state`` is what ``opt.state_dict()`` gives.
"""

from .background import wait
from .folder import Info, info, latest
from .loading import Loaded, load
from .saving import save

__all__ = ["Info", "Loaded", "info", "latest", "load", "save", "wait"]
