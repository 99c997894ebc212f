"""The memory of a rank: planned from shapes, and measured in a running job."""

from .activations import Batch, activation_bytes
from .decoders import KNOWN, Decoder, gpt_of
from .fit import largest_model, smallest_stage
from .live import Tracker, plan_of, track
from .plan import Job, Plan, plan
from .shapes import ModelShapes, ParameterShape, of_decoder, of_module

__all__ = [
    "KNOWN",
    "Batch",
    "Decoder",
    "Job",
    "ModelShapes",
    "ParameterShape",
    "Plan",
    "Tracker",
    "activation_bytes",
    "gpt_of",
    "largest_model",
    "of_decoder",
    "of_module",
    "plan",
    "plan_of",
    "smallest_stage",
    "track",
]
