"""The stages of a pipeline, and what each has to know of the others' gradients.

Two stages, each on two ranks that average its gradients::

                 replica 0   replica 1
    stage 0      rank 0      rank 1       a row: the same parameters; an optimizer of their own, which shares state
    stage 1      rank 2      rank 3
                                          a column: one pipeline

The ranks of a row exchange what every step needs. The column then needs one all-reduce more, of a few numbers: the norm
is that of the whole model, and a gradient that is not finite skips the step of all stages.

A parameter that two stages have, as a tied embedding, is marked ``shared`` on one of them, and counts on the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..comm.collectives import Comm, make_comm
from ..comm.grid import group_along
from ..comm.together import check_same
from ..errors import ParameterError
from ..params.marks import is_shared
from ..params.storage_order import described
from .norms import Norms, norms_over


class Pipeline:
    """The ranks that have the other stages of this rank's pipeline."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self._comm.world_size

    @property
    def stage(self) -> int:
        """The number of this rank's stage."""
        return self._comm.rank

    def share(self, totals: Tensor, norm_type: float | None) -> None:
        """Collective. Combine the ``totals`` of all stages, in place.

        Args:
            totals: [3] fp32, the norm term, the count of values that are not finite, and whether an alarm is raised.
            norm_type: of the norm term; None: there is none.
        """
        self._comm.exchange(totals, maximum=norm_type == math.inf)

    def together(self, norms: Norms, norm_type: float, device: torch.device) -> Norms:
        """Collective. Combine the norms of all stages, one each, into one: [1] each."""
        return norms_over(self._comm, norms, norm_type, device)


def make_pipeline(
    comm: Comm, device: torch.device, options: Mapping[str, Any], parameters: Mapping[str, Tensor]
) -> Pipeline | None:
    """Collective over the stages. Make the pipeline; None: there is one stage alone.

    Args:
        options: those that have to be the same on all stages, by name.
        parameters: of this stage, by label.

    Raises, on every rank of the pipeline: RankMismatchError where options differ, ParameterError for a parameter that
    no stage would count in a norm.
    """
    if comm.world_size == 1:
        return None
    described = [f"{name}={value!r}" for name, value in options.items()]
    check_same(comm, described, "the constructor", "give the optimizers of all stages of a pipeline")
    _check_shared(comm, parameters)
    comm.connect_for("all_reduce", comm.world_size, torch.float32, device)
    return Pipeline(comm)


def _check_shared(comm: Comm, parameters: Mapping[str, Tensor]) -> None:
    """Check that each second copy has a first one on another stage, as far as shape, dtype and memory format tell."""
    shared = {label: described(p) for label, p in parameters.items() if is_shared(p)}
    counted = {described(p) for p in parameters.values() if not is_shared(p)}
    every = comm.gather_objects((shared, counted), "the constructor")
    for stage, (copies, _) in enumerate(every):
        there = set().union(*(counted for other, (_, counted) in enumerate(every) if other != stage))
        for label, kind in copies.items():
            if kind not in there:
                raise ParameterError(
                    f"{label} of stage {stage}, {kind}, has shared = True, which marks a second copy, and no other "
                    "stage has a parameter like it without that mark: it would count in no norm. Mark the copy of the "
                    "later stage alone"
                )


def comm_of_pipeline(pipeline: dist.DeviceMesh | dist.ProcessGroup | None, device: torch.device | None) -> Comm:
    """Make the comm of the ranks of ``pipeline``; None: of this one alone.

    Raises ValueError for a mesh of several dimensions, TypeError for what is neither mesh nor group.
    """
    if pipeline is None:
        return Comm(None, device)
    return make_comm(group_along(pipeline, "pipeline", "the stages", "mesh['pp']"), device)
