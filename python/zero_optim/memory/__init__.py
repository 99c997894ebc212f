"""The memory of a rank: planned from shapes, and measured in a running job."""

from .live import Tracker, plan_of, track
from .models import KNOWN, Decoder, ModelShapes, ParameterShape, gpt_of, of_decoder, of_module
from .plan import Batch, Job, Plan, activation_bytes, plan

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
    "of_decoder",
    "of_module",
    "plan",
    "plan_of",
    "track",
]
