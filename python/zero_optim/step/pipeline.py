"""The stages of a pipeline, and the norm and overflow that they exchange in every step.

Two stages, each on two ranks that average its gradients::

                 replica 0   replica 1
    stage 0      rank 0      rank 1       a row: the same parameters; an optimizer of their own, which shards state
    stage 1      rank 2      rank 3
                                          a column: one pipeline

The ranks of a row exchange what every step needs. The column then needs one all-reduce more, of a few numbers: the norm
is that of the whole model, and a gradient that is not finite skips the step of all stages.

A parameter that two stages have, as a tied embedding, is marked ``shared`` on one of them, and counts on the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_kernels import is_capturing

from ..comm.collectives import Comm, make_comm
from ..comm.streams import HostCopy
from ..comm.together import check_same
from ..comm.topology import group_along
from ..errors import ParameterError, RankMismatchError
from ..params.storage_order import described
from ..params.tensor_slice import is_shared

_FAILED, _FAILED_LATE = 1.0, 0.5
"""Flags of a stage that takes no step: for a reason that the others do not know yet, and for one that they know."""

_MOST_CALLS = 4
"""Calls of a step that exchange, as ``unscale_``, ``clip_grad_norm_`` and ``step``. With more the host waits once."""


class Pipeline:
    """The ranks that have the other stages of this rank's pipeline.

    They exchange one vector in every step, summed; each stage has places of its own in it::

        norm term | non-finite count | flag of each stage | inverse loss scale of each stage
        | 1 for each stage that counts tokens | tokens of each

    Attributes:
        comm: the ranks, one of each stage.
        failed: [1] fp32, above 0 where the step has to be skipped: a stage has failed, or loss scales or tokens differ.
        counting: [1] bool, whether any stage counts tokens. As a rule the last one does.
        tokens: [1] fp32, those that it has counted.
    """

    def __init__(self, comm: Comm, device: torch.device) -> None:
        self.comm = comm
        self._vector = torch.zeros(2 + 4 * comm.world_size, dtype=torch.float32, device=device)
        self._totals, *of_stages = self._vector.split([2] + [comm.world_size] * 4)
        self._flags, self._scales, self._counting, self._tokens = of_stages
        self.failed, self.tokens = torch.zeros(2, dtype=torch.float32, device=device).split(1)
        self.counting = torch.zeros(1, dtype=torch.bool, device=device)
        # A step sends one in each of its calls, as clip_grad_norm_, and reads those of the step before.
        self._reports = [HostCopy(self._vector[2:]) for _ in range(_MOST_CALLS)]
        self._checked = False  # whether this step has read them
        # The failure that ``check`` has raised last. Weak: its traceback refers to the optimizer. Hooks, which autograd
        # holds, refer to this pipeline, so an optimizer that is dropped would never be collected.
        self._known: Callable[[], RankMismatchError | None] = lambda: None

    def combine(
        self,
        totals: Tensor | None,
        alarm: Tensor,
        inverse_scale: Tensor | None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Collective. Combine the ``totals`` of all stages: [2] fp32, the norm term and the non-finite count.

        Args:
            totals: of this stage, as they are returned; None: nobody asks for them.
            alarm: [1] fp32, 1 where this stage takes no step, else 0.
            inverse_scale: [1] fp32, the inverse of the loss scale of this step; None: the loss is not scaled.
            tokens: [1] fp32, those that this stage's ranks have counted; None: they have not counted.
        """
        self._vector.zero_()
        if totals is not None:
            self._totals.copy_(totals)
        self._flags[self.comm.rank].copy_(alarm.reshape(()))
        self._scales[self.comm.rank].copy_(1.0 if inverse_scale is None else inverse_scale.reshape(()))
        if tokens is not None:
            self._counting[self.comm.rank].fill_(1.0)
            self._tokens[self.comm.rank].copy_(tokens.reshape(()))
        self.comm.exchange(self._vector)
        counting = self._counting > 0
        self.counting.copy_(counting.any())
        self.tokens.copy_(self._tokens.amax())
        differ = (self._scales.amax() != self._scales.amin()) | (counting & (self._tokens != self.tokens)).any()
        self.failed.copy_(self._flags.sum() + differ)
        if not is_capturing(self._vector.device):
            if all(report.unread for report in self._reports):
                self._read()
            next(report for report in self._reports if not report.unread).send()
        return self._totals

    def fail(self, error: Exception) -> None:
        """Collective. Let the other stages skip the step that they are in, and raise, as ``error`` has come up here."""
        for report in self._reports:
            report.read(wait=True)  # its contents of this step are known here
        self._vector.zero_()
        self._flags[self.comm.rank].fill_(_FAILED_LATE if error is self._known() else _FAILED)
        self._scales.fill_(1.0)
        self.comm.exchange(self._vector)

    def check(self) -> None:
        """Raise RankMismatchError where another stage has failed in the last step, or had another loss scale."""
        # On CUDA all stages raise one step later, in the same call, as with alarms: the host does not wait for a step.
        # So only the first call of a step reads.
        if not self._checked:
            self._read()
            self._checked = True

    def end_step(self) -> None:
        """Note that the next call is the first of a step."""
        self._checked = False

    def _read(self) -> None:
        if is_capturing(self._vector.device):
            return
        own, stages = self.comm.rank, self.comm.world_size
        read = [report.read(wait=True) for report in self._reports]  # all of them, before one raises
        for values in (values for values in read if values is not None):
            flags, scales, counting, tokens = (values[n * stages : (n + 1) * stages] for n in range(4))
            totals = {total for total, counts in zip(tokens, counting, strict=True) if counts}
            failed = [stage for stage, flag in enumerate(flags) if flag >= _FAILED]
            message = ""
            if failed and own not in failed:  # else this stage's own alarm has the reason
                message = f"stage {failed[0]} of the pipeline has failed, and its ranks have raised the reason"
            elif not any(flags) and min(scales) != max(scales):
                odd = next(stage for stage, scale in enumerate(scales) if scale != scales[0])
                first, other = (f"{1 / inverse:g}" if inverse else "inf" for inverse in (scales[0], scales[odd]))
                message = (
                    f"the stages of the pipeline have different loss scales: {first} on stage 0, {other} on stage "
                    f"{odd}. Give every stage a zero_optim.GradScaler with the same options and state, and call "
                    "scaler.step(opt) and scaler.update() on all of them"
                )
            elif not any(flags) and len(totals) > 1:
                message = (
                    f"stages of the pipeline have counted different numbers of tokens, {sorted(totals)}: call "
                    "opt.count() on the last stage alone"
                )
            if message:
                error = RankMismatchError(f"{message}. This rank has updated nothing")
                self._known = weakref.ref(error)
                raise error

    def check_now(self, *, wait: bool) -> None:
        """``check`` what was just exchanged, where the host has it already, or is to ``wait`` for it."""
        if wait or self._reports[0].immediate:
            self._read()


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
    values = [f"{name}={value!r}" for name, value in options.items()]
    check_same(comm, values, "the constructor", "give the optimizers of all stages of a pipeline")
    # Each second copy must have a first one on another stage, as far as shape, dtype and memory format tell.
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
    comm.connect_for("all_reduce", comm.world_size, torch.float32, device)
    return Pipeline(comm, device)


def comm_of_pipeline(pipeline: dist.DeviceMesh | dist.ProcessGroup | None, device: torch.device | None) -> Comm:
    """Make the comm of the ranks of ``pipeline``; None: of this one alone.

    Raises ValueError for a mesh of several dimensions, TypeError for what is neither mesh nor group.
    """
    if pipeline is None:
        return Comm(None, device)
    return make_comm(group_along(pipeline, "pipeline", "the stages", "mesh['pp']"), device)
