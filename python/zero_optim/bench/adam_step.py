"""``adam_step`` against torch, the other fused Adams and the memory. All jobs share the tensors of one shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, ROW_STATS
from zero_kernels.codecs import FORMS

from .case import COPY, STREAM, TORCH, Case, Setting, backend_jobs, copy_job
from .fused_adams import HYPER, Maker, fused_adams
from .timing import Job

BYTES = 28  # gradient 2; master, exp_avg, exp_avg_sq 12 read and 12 written; parameter 2
STEP = 10
OF_ZEROS = ", zeros"
"""Suffix of a backend's name: the same update where gradient, exp_avg and exp_avg_sq are zero and stay so, as in rows
of an embedding that no batch has used. A root of zero, and a division of zero, take a GPU's slow path."""

IN_PARTS, AT_ONCE = ", 16 calls", ", 16 shards at once"
"""Suffixes of a backend's name: the same elements as 16 small shards, by a call for each, or by one call for all."""
PARTS = 16

MEASURED, UNMEASURED = ", measured", ", foreach_step"
"""Suffixes of a backend's name: ``foreach_step`` of the shard with ``row_stats``, as for telemetry, and without."""


@dataclass(frozen=True)
class Smaller:
    """State in another form than fp32: the dtypes of both moments, and, for a split master, of its low bits."""

    exp_avg: torch.dtype
    exp_avg_sq: torch.dtype
    low: torch.dtype | None = None

    @property
    def bytes(self) -> float:
        """Bytes an element, read and written: gradient, parameter, master, moments, and the scales of their rows."""
        param_and_master = 2 * (2 + self.low.itemsize) if self.low else 2 + 2 * 4
        moments = (dtype.itemsize + 4 / ROW * FORMS[dtype].scaled for dtype in (self.exp_avg, self.exp_avg_sq))
        return 2 + param_and_master + 2 * sum(moments)


SMALLER = {
    ", bf16": Smaller(torch.bfloat16, torch.bfloat16),
    ", int8": Smaller(torch.int8, torch.uint8),
    ", split": Smaller(torch.float32, torch.float32, low=torch.int16),
    ", split, int8": Smaller(torch.int8, torch.uint8, low=torch.int16),
    ", split8": Smaller(torch.float32, torch.float32, low=torch.int8),
    ", split8, int8": Smaller(torch.int8, torch.uint8, low=torch.int8),
}
"""By suffix of a backend's name: ``foreach_step`` of the shard in this form, that of ``state_dtype`` and ``master``."""


@dataclass(frozen=True)
class UpdateTensors:
    """The tensors that one update works on."""

    grad: Tensor  # [numel] 16-bit
    grad_scale: Tensor  # [1] fp32, unscaling and clipping in one
    wide_grad: Tensor  # [numel] fp32, which only the pipelines of several passes need
    master: Tensor  # [numel] fp32
    exp_avg: Tensor  # [numel] fp32
    exp_avg_sq: Tensor  # [numel] fp32
    param: Tensor  # [numel] 16-bit


def make_shard(setting: Setting) -> UpdateTensors:
    def fp32() -> Tensor:
        return setting.random(setting.numel, dtype=torch.float32)

    master = fp32()
    return UpdateTensors(
        grad=setting.random(setting.numel),
        grad_scale=torch.full((1,), 0.5, device=setting.device),
        wide_grad=torch.empty_like(master),
        master=master,
        exp_avg=fp32(),
        exp_avg_sq=fp32().square_(),
        param=master.to(setting.torch_dtype),
    )


def make_case(setting: Setting) -> Case:
    shard = make_shard(setting)
    smaller = {form: of for form, of in SMALLER.items() if setting.torch_dtype == torch.bfloat16 or not of.low}
    ways = {
        "": ours(shard),
        OF_ZEROS: ours(with_zeros(shard)),
        IN_PARTS: ours_in_parts(shard),
        AT_ONCE: ours_at_once(shard),
        UNMEASURED: ours_measured(shard, False),
        MEASURED: ours_measured(shard, True),
        **{form: ours_smaller(shard, of) for form, of in smaller.items()},
    }
    jobs = {f"{name}{way}": job for way, work in ways.items() for name, job in backend_jobs(setting, work).items()}
    in_form = {f"{name}{form}": (name, of) for form, of in smaller.items() for name in setting.backends}
    jobs[TORCH] = [torch_pipeline(shard)]
    baselines = fused_adams(setting.device)
    jobs |= {name: [pipeline(shard, make, STEP - 1)] for name, make in baselines.items()}
    jobs |= {COPY: copy_job(setting, BYTES), **stream_job(setting, shard)}
    return Case(
        "adam_step",
        setting,
        BYTES,
        STREAM if STREAM in jobs else COPY,
        jobs,
        list(baselines),
        own_bytes={job: of.bytes for job, (_, of) in in_form.items()},
        fp32={job: name for job, (name, _) in in_form.items()},
    )


def with_zeros(shard: UpdateTensors) -> UpdateTensors:
    zeros = {name: torch.zeros_like(getattr(shard, name)) for name in ("grad", "exp_avg", "exp_avg_sq")}
    return replace(shard, **zeros)


def ours(shard: UpdateTensors) -> Callable[[], None]:
    return partial(zero_kernels.adam_step, *_tensors(shard), *_shared(shard))


def parts_of(shard: UpdateTensors) -> list[UpdateTensors]:
    """Cut ``shard`` into ``PARTS`` parts that end where rows do; some may be empty."""
    size = -(-shard.grad.numel() // (PARTS * ROW)) * ROW
    wholes = {field.name: getattr(shard, field.name) for field in fields(UpdateTensors) if field.name != "grad_scale"}
    return [
        replace(shard, **{name: whole[part * size : (part + 1) * size] for name, whole in wholes.items()})
        for part in range(PARTS)
    ]


def ours_in_parts(shard: UpdateTensors) -> Callable[[], None]:
    calls = [partial(zero_kernels.adam_step, *_tensors(part), *_shared(shard)) for part in parts_of(shard)]

    def run() -> None:
        for call in calls:
            call()

    return run


def ours_at_once(shard: UpdateTensors) -> Callable[[], None]:
    grads, masters, exp_avgs, exp_avg_sqs, params, rows = zip(*map(_tensors, parts_of(shard)), strict=True)
    states = [state for pair in zip(exp_avgs, exp_avg_sqs, strict=True) for state in pair]
    lists, shared = [list(column) for column in (grads, masters, states, params, rows)], _shared(shard)
    return lambda: torch.ops.zero_kernels.foreach_step("adamw", *lists, *shared)


def ours_measured(shard: UpdateTensors, measured: bool) -> Callable[[], None]:
    grad, master, *states, param, rows = _tensors(shard)
    stats = [torch.empty(len(rows), len(ROW_STATS), device=grad.device)] if measured else None
    lists, shared = ([grad], [master], states, [param], [rows]), _shared(shard)
    return lambda: torch.ops.zero_kernels.foreach_step("adamw", *lists, *shared, None, None, None, stats)


def ours_smaller(shard: UpdateTensors, of: Smaller) -> Callable[[], None]:
    grad, master, *moments, param, rows = _tensors(shard)
    states, scales = [], []
    for values, dtype in zip(moments, (of.exp_avg, of.exp_avg_sq), strict=True):
        stored, *scale = FORMS[dtype].encode(torch.nn.functional.pad(values, (0, -len(values) % ROW)).view(-1, ROW))
        states.append(values if dtype == torch.float32 else stored.view(-1)[: len(values)])
        scales += [each.view(-1) for each in scale]
    if of.low:
        master = torch.zeros_like(param, dtype=of.low)
    lists, shared = ([grad], [master], states, [param], [rows]), _shared(shard)
    more = (None, None, None, None, scales or None)
    return lambda: torch.ops.zero_kernels.foreach_step("adamw", *lists, *shared, *more)


def _tensors(shard: UpdateTensors) -> tuple[Tensor, ...]:
    """List the arguments of ``adam_step`` that are tensors, in its order."""
    row_slot = torch.zeros(-(-shard.grad.numel() // ROW), dtype=torch.int32, device=shard.grad.device)
    return (shard.grad, shard.master, shard.exp_avg, shard.exp_avg_sq, shard.param, row_slot)


def _shared(shard: UpdateTensors) -> tuple[Tensor, ...]:
    """Make the arguments that all shards share: hyper table, grad_scale, and a found_inf of 0."""
    device = shard.grad.device
    hyper = zero_kernels.hyper_table(**HYPER, step=STEP, device=device)
    return (hyper, shard.grad_scale, torch.zeros(1, device=device))


def stream_job(setting: Setting, shard: UpdateTensors) -> dict[str, Job]:
    """Read and write what the op does, by its own loop, and compute nothing; on a CPU with the compiled library.

    torch's copy is no ceiling on a CPU: the processor reads every line that a copy overwrites, which is not counted.
    """
    if setting.device.type != "cpu" or "cpu" not in zero_kernels.available_backends("cpu"):
        return {}
    state = (shard.master, shard.exp_avg, shard.exp_avg_sq)
    return {STREAM: [lambda: torch.ops.zero_kernels_C.stream(shard.grad, *state, shard.param)]}


def torch_pipeline(shard: UpdateTensors) -> Callable[[], None]:
    step = torch.tensor(STEP - 1.0, device=shard.master.device)
    return pipeline(shard, lambda parameters: torch.optim.AdamW(parameters, fused=True, **HYPER), step)


def pipeline(shard: UpdateTensors, make: Maker, step: Tensor | int) -> Callable[[], None]:
    """Update in several passes: widen and unscale, an optimizer's step on the fp32 master, cast the parameter back.

    The optimizer's state is the shard's. ``step``, the steps made so far, is set in the group, too: some count there.
    """
    parameter = torch.nn.Parameter(shard.master)
    parameter.grad = shard.wide_grad
    optimizer = make([parameter])
    optimizer.param_groups[0]["step"] = step
    optimizer.state[parameter] = {"step": step, "exp_avg": shard.exp_avg, "exp_avg_sq": shard.exp_avg_sq}
    widen = _widen_on_gpu if shard.grad.is_cuda else _widen_on_cpu

    def run() -> None:
        widen(shard)
        optimizer.step()
        shard.param.copy_(shard.master)

    return run


def _widen_on_gpu(shard: UpdateTensors) -> None:
    """Widen in one pass, 6 bytes an element. The scale has a dimension, so that it makes the product fp32."""
    torch.mul(shard.grad, shard.grad_scale, out=shard.wide_grad)


def _widen_on_cpu(shard: UpdateTensors) -> None:
    """Widen in two passes, torch's fastest way: 33 ms for 64 Mi elements on 2 cores; a mixed ``mul`` takes 86."""
    shard.wide_grad.copy_(shard.grad).mul_(shard.grad_scale)
