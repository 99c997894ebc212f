"""The errors that users meet. Each message names the culprit (parameter, rank, argument) and the remedy."""

import torch


class ZeroOptimError(RuntimeError):
    """Base of every error raised by ``zero_optim``."""


class ParameterError(ZeroOptimError):
    """A parameter that the optimizer cannot hold: its dtype, device, layout or place in the groups."""


class OutOfMemoryError(ZeroOptimError, torch.OutOfMemoryError):
    """An optimizer lacks memory. The message says what it needs, and the cheapest change that needs less."""


class RankMismatchError(ZeroOptimError):
    """The ranks disagree: in models or arguments, in what they call or in which order. Or one of them has failed."""


class GradientError(ZeroOptimError):
    """A gradient that cannot be used: unexpected dtype, device or layout, or one that arrived too late."""


class ShardAccessError(ZeroOptimError):
    """A read or an edit of a tensor of which this rank holds only a shard."""


class ClosedError(ZeroOptimError):
    """The optimizer was used after ``close()``."""


class CollectiveError(ZeroOptimError):
    """A collective failed or timed out: another rank died, raised, or does not take part."""


class StateMismatchError(ZeroOptimError):
    """A state dict that does not fit this optimizer."""


class CheckpointError(ZeroOptimError):
    """A checkpoint that cannot be written or read: no space, no folder, damaged, incomplete, or of another format."""


class OffloadError(ZeroOptimError):
    """State off the device that could not be written or read: no space, no folder, an I/O error, corrupted bytes."""


class UsageError(Exception):
    """A command was given arguments that it cannot serve. The message is one line: the flag, and the remedy."""
