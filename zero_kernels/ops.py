"""The public ops: schema, checks, fake and face of each. `dispatch` picks the backend that runs them.

Calls go through `torch.ops.zero_kernels.*`, so they are visible to dispatch modes, the profiler and `torch.compile`.
Checks look at Python numbers only; no device value is ever read on the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zero_kernels import dispatch
from zero_kernels.codecs import FORMS, LOWS
from zero_kernels.hyper import HYPER_COEFFICIENTS, HYPER_COLUMNS, ROW, Coefficient, hyper_table
from zero_kernels.reference import Shard, StepArgs
from zero_kernels.rules import RULES

FLOATS = (torch.float16, torch.bfloat16, torch.float32)

SCHEMAS = (
    "foreach_step(str rule, Tensor[] grads, Tensor(a!)[] masters, Tensor(b!)[] states, Tensor(c!)[] params_out, "
    "Tensor[] row_slots, Tensor hyper, Tensor? grad_scale=None, Tensor? found_inf=None, "
    "Tensor(d!)? nonfinite_slots=None, Tensor(e!)[]? scales=None, Tensor[]? row_keys=None) -> ()",
    "ema(Tensor(a!)[] averages, Tensor[] masters, Tensor[] params, Tensor[] row_slots, Tensor rates) -> ()",
    "pack(Tensor[] grads, int[] offsets, Tensor(a!) bucket, float scale=1.0, Tensor(b!)? nonfinite=None) -> ()",
    "unpack(Tensor bucket, int[] offsets, Tensor(a!)[] grads, float scale=1.0) -> ()",
    "grad_stats(Tensor[] shards, float norm_type=2.0) -> Tensor",
    "hyper_table(Tensor coefficients, Tensor? group, Tensor step, Tensor? active, Tensor(a!) out) -> ()",
)

_library = torch.library.Library("zero_kernels", "DEF")
for _schema in SCHEMAS:
    _library.define(_schema)


def adam_step(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    param_out: Tensor | None,
    row_slot: Tensor,
    hyper: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    nonfinite_slots: Tensor | None = None,
) -> None:
    """One Adam or AdamW update of a flat shard, in place and in one pass over memory.

    Args:
        grad: [numel] fp16, bf16 or fp32.
        master, exp_avg, exp_avg_sq: [numel] fp32, updated in place.
        param_out: [numel] fp16, bf16 or fp32, receives the updated master, cast; None when the master is the parameter.
        row_slot: int32 [ceil(numel / ROW)]: for each row of 128 elements its row of `hyper`; -1 marks padding, which
            is left as it was.
        hyper: fp32 [slots, len(HYPER_COLUMNS)], made by `hyper_table`. Slots whose `active` is 0 are left alone.
        grad_scale: fp32, one element: multiplies the gradient as it is loaded (unscaling and clipping in one), times
            the slot's `grad_factor` in `hyper`.
        found_inf: fp32, one element: anything but 0 leaves all state and `param_out` as they were.
        nonfinite_slots: int32 [slots]: when `found_inf` is not 0, slots get 1 whose gradient, scaled as above, is not
            finite. Nothing is ever cleared in it.

    All tensors are contiguous and on one device. The arithmetic is written out in docs/ops.md; every backend gives
    the same bits. Raises TypeError for a wrong dtype, ValueError for a wrong shape, device or layout, and BackendError.
    """
    for name, tensor in {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}.items():
        if tensor.dtype != torch.float32:  # `foreach_step` takes other forms, too
            raise TypeError(f"{name} must be float32, got {str(tensor.dtype).removeprefix('torch.')}")
    params_out, shared = [] if param_out is None else [param_out], (hyper, grad_scale, found_inf, nonfinite_slots)
    foreach_step("adamw", [grad], [master], [exp_avg, exp_avg_sq], params_out, [row_slot], *shared)


def foreach_step(
    rule: str,
    grads: Sequence[Tensor],
    masters: Sequence[Tensor],
    states: Sequence[Tensor],
    params_out: Sequence[Tensor],
    row_slots: Sequence[Tensor],
    hyper: Tensor,
    grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
    nonfinite_slots: Tensor | None = None,
    scales: Sequence[Tensor] | None = None,
    row_keys: Sequence[Tensor] | None = None,
) -> None:
    """One update of one or more flat shards by a rule of `RULES`, in place and in one pass over memory.

    Args:
        rule: its name.
        grads: of each shard [numel] fp16, bf16 or fp32, all of one dtype.
        masters: of each shard [numel] fp32, updated in place. Or all int16, or all int8: the low parts of split
            masters, of which `params_out`, then in bf16, are the high halves, and are read, too.
        states: of each shard the tensors that `RULES[rule].states` names, [numel], updated in place: all of the first
            shard, then all of the second, ... The dtype says the form: fp32, bf16 (rounded stochastically), int8
            (with steps that are finest close to 0) or uint8 (roots). A state has one form in all shards.
        params_out: of each shard [numel] fp16, bf16 or fp32, all of one dtype; empty when the masters are the
            parameters.
        row_slots: of each shard int32 [ceil(numel / ROW)], as in `adam_step`.
        hyper: fp32 [slots, 12], with the columns of the rule, shared by all shards.
        grad_scale, found_inf, nonfinite_slots: shared by all shards, as in `adam_step`.
        scales: of each int8 and uint8 state fp32 [ceil(numel / ROW)], one a row, in the order of `states`.
        row_keys: of each shard int32 [ceil(numel / ROW)], any numbers; needed where states are in bf16. These are
            rounded by noise that is made of the row's key, the slot's `step_number` in `hyper`, the state and the
            element's place in the row.

    No two shards overlap. The bits are those of a call for each shard; those of "adamw" are those of `adam_step`.
    Raises what `adam_step` raises, and ValueError for an unknown rule, for lists of unlike lengths or without a shard.
    """
    if not grads:
        raise ValueError("foreach_step needs at least one shard")
    shared = (hyper, grad_scale, found_inf, nonfinite_slots)
    torch.ops.zero_kernels.foreach_step(rule, grads, masters, states, params_out, row_slots, *shared, scales, row_keys)


def ema(
    averages: Sequence[Tensor],
    masters: Sequence[Tensor],
    params: Sequence[Tensor],
    row_slots: Sequence[Tensor],
    rates: Tensor,
) -> None:
    """Exponential averages of the masters of one or more flat shards, in place and in one pass over memory.

    Each average becomes average + rate * (master - average), in fp32; where the rate is 0 it is left as it was.

    Args:
        averages: of each shard as many tensors, any number, [numel] fp32: all of the first shard, then all of the
            second, ...
        masters: of each shard [numel] fp32, fp16 or bf16. Or all int16, or all int8: the low parts of split masters.
        params: of each shard [numel] bf16, the high halves of split masters; else empty.
        row_slots: of each shard int32 [ceil(numel / ROW)]: for each row of 128 elements its row of `rates`; -1 marks
            padding, which is left as it was.
        rates: fp32 [slots, averages of a shard].

    Raises what `adam_step` raises, and ValueError for lists of unlike lengths or without a shard.
    """
    if not masters:
        raise ValueError("ema needs at least one shard")
    torch.ops.zero_kernels.ema(averages, masters, params, row_slots, rates)


def pack(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    scale: float = 1.0,
    nonfinite: Tensor | None = None,
) -> None:
    """Gather many gradients into one flat bucket, with cast and scale: bucket = cast(float(grad) * scale).

    Args:
        grads: contiguous tensors of any shape, each fp16, bf16 or fp32. One may be the very slot of the bucket that it
            goes to (then it is scaled in place); any other overlap is undefined.
        offsets: where each gradient starts in the bucket, in elements: ascending and without overlap.
        bucket: [numel] fp16, bf16 or fp32. Elements that no gradient covers become zero.
        scale: rounded once to fp32.
        nonfinite: int32 [len(grads)]: 1 where the gradient, before scaling, holds inf or NaN, else 0.

    Raises TypeError for a wrong dtype, ValueError for a wrong shape, offset, device or layout, and BackendError.
    """
    torch.ops.zero_kernels.pack(grads, offsets, bucket, scale, nonfinite)


def unpack(bucket: Tensor, offsets: Sequence[int], grads: Sequence[Tensor], scale: float = 1.0) -> None:
    """Scatter one flat bucket to many gradients: grads[i] = cast(float(bucket[offsets[i]:...]) * scale).

    Arguments and errors are those of `pack`; here the gradients are written.
    """
    torch.ops.zero_kernels.unpack(bucket, offsets, grads, scale)


def grad_stats(shard: Tensor | Sequence[Tensor], norm_type: float = 2.0) -> Tensor:
    """Norm term and count of non-finite values of a gradient shard, or of each of several, in one read.

    Args:
        shard: [numel] fp16, bf16 or fp32, contiguous; or a sequence of such tensors on one device.
        norm_type: p > 0, or inf.

    Returns fp32 [2], or [shards, 2] for a sequence: the sum of |g|^p (for inf: max |g|), and how many values are inf or
    NaN. For p of 1, 2 and inf the additions have one fixed order (docs/ops.md), so all backends give the same bits;
    another p is summed in float64 and rounded to fp32, which cannot hold every |g|^p: for a large p, scale the shard.
    Raises TypeError for a wrong dtype, ValueError for a norm that is not positive, a layout, devices that differ or an
    empty sequence, and BackendError.
    """
    if isinstance(shard, Tensor):
        return torch.ops.zero_kernels.grad_stats([shard], norm_type)[0]
    if not shard:
        raise ValueError("grad_stats needs at least one shard")
    return torch.ops.zero_kernels.grad_stats(shard, norm_type)


def fused_adamw_(
    grad: Tensor,
    master: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    param_out: Tensor | None = None,
    *,
    lr: Coefficient,
    betas: tuple[Coefficient, Coefficient],
    eps: Coefficient,
    weight_decay: Coefficient,
    step: Coefficient,
    grad_scale: float | Tensor = 1.0,
    found_inf: Tensor | None = None,
    decoupled: bool = True,
    maximize: bool = False,
) -> None:
    """`adam_step` with one set of hyper-parameters, for users of the kernel without the optimizer.

    The tensors have any one shape and are contiguous; dtypes and errors are those of `adam_step`. `step` counts from 1.
    With `decoupled=False` the weight decay is Adam's L2 term. `maximize` turns the gradient's sign.
    """
    device = grad.device
    hyper = hyper_table(lr, betas, eps, weight_decay, step, decoupled=decoupled, maximize=maximize, device=device)
    row_slot = torch.zeros(-(-grad.numel() // ROW), dtype=torch.int32, device=device)
    if not isinstance(grad_scale, Tensor):
        grad_scale = torch.full((), grad_scale, dtype=torch.float32, device=device)
    state = (_flat("master", master), _flat("exp_avg", exp_avg), _flat("exp_avg_sq", exp_avg_sq))
    out = None if param_out is None else _flat("param_out", param_out)
    adam_step(_flat("grad", grad), *state, out, row_slot, hyper, grad_scale, found_inf)


def _flat(name: str, tensor: Tensor) -> Tensor:
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous")
    return tensor.detach().view(-1)


def _check(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device, numel: int | None) -> None:
    """Raise the typed error that names the argument: dtype, device, contiguity, number of elements."""
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must be {wanted}, got {str(tensor.dtype).removeprefix('torch.')}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the other tensors on {device}: move it there")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {tuple(tensor.stride())}: call .contiguous()")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} must have {numel} elements, got {tensor.numel()} (shape {list(tensor.shape)})")


def _check_flat(
    name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], device: torch.device, numel: int | None
) -> None:
    if tensor.dim() != 1:
        raise ValueError(f"{name} must be flat (one dimension), got shape {list(tensor.shape)}: call .view(-1)")
    _check(name, tensor, dtypes, device, numel)


def _check_shard(args: StepArgs, shard: Shard, names: Sequence[str]) -> torch.device:
    """Check one shard, whose states have these `names`."""
    grad, master, states, param_out, row_slot, row_keys = shard
    hyper, device, numel, fp32 = args.hyper, grad.device, grad.numel(), (torch.float32,)
    _check_flat("grad", grad, FLOATS, device, None)
    _check_flat("master", master, (*fp32, *LOWS), device, numel)
    for name, state in zip(names, states, strict=True):
        _check_flat(name, state, tuple(FORMS), device, numel)
    if param_out is not None:
        _check_flat("param_out", param_out, FLOATS, device, numel)
    if master.dtype in LOWS and (param_out is None or param_out.dtype != torch.bfloat16):
        dtype = str(master.dtype).removeprefix("torch.")
        raise TypeError(
            f"master is {dtype}, the low part of a split master: param_out must be its high half, in bfloat16"
        )
    _check_flat("row_slot", row_slot, (torch.int32,), device, -(-numel // ROW))
    _check("hyper", hyper, fp32, device, None)
    if hyper.dim() != 2 or hyper.shape[1] != len(HYPER_COLUMNS):
        raise ValueError(
            f"hyper must have shape [slots, {len(HYPER_COLUMNS)}], got {list(hyper.shape)}: see hyper_table"
        )
    if args.grad_scale is not None:
        _check("grad_scale", args.grad_scale, fp32, device, 1)
    if args.found_inf is not None:
        _check("found_inf", args.found_inf, fp32, device, 1)
    if args.nonfinite_slots is not None:
        _check_flat("nonfinite_slots", args.nonfinite_slots, (torch.int32,), device, hyper.shape[0])
    if row_keys is not None:
        _check_flat("row_keys", row_keys, (torch.int32,), device, len(row_slot))
    return device


def _check_foreach_step(rule: str, *given: Any) -> torch.device:
    if rule not in RULES:
        raise ValueError(f"rule must be one of {', '.join(RULES)}, got {rule!r}")
    args = StepArgs(*given)
    _check_lengths(rule, args)
    names, grads = RULES[rule].states, args.grads
    for i, shard in enumerate(args.shards()):
        try:
            device = _check_shard(args, shard, names)
        except (TypeError, ValueError) as error:
            raise type(error)(f"shard {i}: {error}" if len(grads) > 1 else str(error)) from None
        if device != grads[0].device:
            raise ValueError(f"shard {i} is on {device}, shard 0 on {grads[0].device}: make a call for each device")
    if len(grads) > 1:
        alike = {"grads": grads, "masters": args.masters, "params_out": args.params_out}
        alike |= {f"states {name!r}": args.states[i :: len(names)] for i, name in enumerate(names)}
        for name, tensors in alike.items():
            if len({tensor.dtype for tensor in tensors}) > 1:
                raise TypeError(f"{name} must have one dtype: make a call for each dtype")
    if args.row_keys is None and any(state.dtype == torch.bfloat16 for state in args.states):
        raise ValueError("bfloat16 states are rounded stochastically: give row_keys, of zero_kernels.codecs.row_keys")
    for state, scale in zip(args.states, args.scale_of_states(), strict=True):
        if scale is not None:
            _check_flat("a scale", scale, (torch.float32,), state.device, -(-state.numel() // ROW))
    return grads[0].device


def _check_lengths(rule: str, args: StepArgs) -> None:
    names, count = RULES[rule].states, len(args.grads)
    lists = {"masters": args.masters, "params_out": args.params_out or args.grads, "row_slots": args.row_slots}
    lists |= {} if args.row_keys is None else {"row_keys": args.row_keys}
    for name, tensors in lists.items():
        if len(tensors) != count:
            raise ValueError(f"{name} must have one tensor a shard: {count} grads, {len(tensors)} {name}")
    if len(args.states) != count * len(names):
        each = f"{len(names)} ({', '.join(names)})" if names else "none"
        raise ValueError(f"states of {rule} are {each} a shard: {count} grads, {len(args.states)} states")


def _check_ema(
    averages: Sequence[Tensor],
    masters: Sequence[Tensor],
    params: Sequence[Tensor],
    row_slots: Sequence[Tensor],
    rates: Tensor,
) -> torch.device:
    device, dtype, count = masters[0].device, masters[0].dtype, len(masters)
    _check("rates", rates, (torch.float32,), device, None)
    if rates.dim() != 2 or len(averages) != count * rates.shape[1]:
        raise ValueError(
            f"rates must have shape [slots, averages of a shard], got {list(rates.shape)} for {len(averages)} averages "
            f"of {count} masters"
        )
    lists = {"row_slots": row_slots, "params": params if dtype in LOWS or params else masters}
    for name, tensors in lists.items():
        if len(tensors) != count:
            raise ValueError(f"{name} must have one tensor a shard: {count} masters, {len(tensors)} {name}")
    for i, master in enumerate(masters):
        numel, of = master.numel(), averages[i * rates.shape[1] : (i + 1) * rates.shape[1]]
        try:
            _check_flat("master", master, (*FLOATS, *LOWS), device, None)
            if master.dtype != dtype:
                raise TypeError("masters must have one dtype: make a call for each dtype")
            if dtype in LOWS:
                _check_flat("param", params[i], (torch.bfloat16,), device, numel)
            _check_flat("row_slot", row_slots[i], (torch.int32,), device, -(-numel // ROW))
            for k, average in enumerate(of):
                _check_flat(f"average {k}", average, (torch.float32,), device, numel)
        except (TypeError, ValueError) as error:
            raise type(error)(f"shard {i}: {error}") from None
    return device


def _check_slots(grads: Sequence[Tensor], offsets: Sequence[int], bucket: Tensor) -> torch.device:
    device = bucket.device
    _check_flat("bucket", bucket, FLOATS, device, None)
    if len(grads) != len(offsets):
        raise ValueError(f"offsets must have one entry a gradient: {len(grads)} gradients, {len(offsets)} offsets")
    end = 0
    for i, (grad, offset) in enumerate(zip(grads, offsets, strict=True)):
        _check(f"grads[{i}]", grad, FLOATS, device, None)
        if offset < end:
            raise ValueError(f"offsets[{i}] = {offset} must be at least {end}, where the slot before it ends")
        end = offset + grad.numel()
    if end > bucket.numel():
        raise ValueError(f"offsets reach to element {end}, but bucket has {bucket.numel()}")
    return device


def _check_pack(
    grads: Sequence[Tensor],
    offsets: Sequence[int],
    bucket: Tensor,
    scale: float,
    nonfinite: Tensor | None,
) -> torch.device:
    device = _check_slots(grads, offsets, bucket)
    if nonfinite is not None:
        _check_flat("nonfinite", nonfinite, (torch.int32,), device, len(grads))
    return device


def _check_unpack(bucket: Tensor, offsets: Sequence[int], grads: Sequence[Tensor], scale: float) -> torch.device:
    return _check_slots(grads, offsets, bucket)


def _check_grad_stats(shards: Sequence[Tensor], norm_type: float) -> torch.device:
    for i, shard in enumerate(shards):
        _check_flat(f"shards[{i}]" if len(shards) > 1 else "shard", shard, FLOATS, shards[0].device, None)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, got {norm_type}")
    return shards[0].device


def _check_hyper_table(
    coefficients: Tensor, group: Tensor | None, step: Tensor, active: Tensor | None, out: Tensor
) -> torch.device:
    device, rows = out.device, len(HYPER_COEFFICIENTS)
    _check("out", out, (torch.float32,), device, None)
    if out.dim() != 2 or out.shape[1] != len(HYPER_COLUMNS):
        raise ValueError(f"out must have shape [slots, {len(HYPER_COLUMNS)}], got {list(out.shape)}")
    slots = out.shape[0]
    _check("coefficients", coefficients, (torch.float64,), device, None if group is not None else rows * slots)
    if coefficients.dim() != 2 or coefficients.shape[0] != rows:
        raise ValueError(f"coefficients must have shape [{rows}, groups], got {list(coefficients.shape)}")
    if group is not None:
        _check_flat("group", group, (torch.int32,), device, slots)
    _check_flat("step", step, (torch.float64,), device, slots)
    if active is not None:
        _check_flat("active", active, (torch.bool,), device, slots)
    return device


def _fake_nothing(*args: Any) -> None:
    """Fake of the ops that only write their arguments."""


def _fake_grad_stats(shards: Sequence[Tensor], norm_type: float) -> Tensor:
    return shards[0].new_empty(len(shards), 2, dtype=torch.float32)


@dataclass(frozen=True)
class Registered:
    """The facts about an op beside its schema: its check, which gives the device, and which arguments it writes."""

    check: Callable[..., torch.device]
    mutated: tuple[int, ...]


REGISTERED: dict[str, Registered] = {}


def _register(op: str, check: Callable[..., torch.device], fake: Callable[..., Any], mutated: tuple[int, ...]) -> None:
    """Bind the op on every device to: check the arguments, pick the backend, run it, tell autograd what changed."""
    schema = getattr(torch.ops.zero_kernels, op).default._schema
    defaults = tuple(argument.default_value for argument in schema.arguments)

    def run(*args: Any) -> Any:
        args += defaults[len(args) :]  # the dispatcher drops trailing arguments that equal their defaults
        result = dispatch.select(op, check(*args))(*args)
        for i in mutated:
            if args[i] is not None:
                torch.autograd.graph.increment_version(args[i])
        return result

    def run_fake(*args: Any) -> Any:
        args += defaults[len(args) :]
        check(*args)
        return fake(*args)

    for key in ("CPU", "CUDA"):
        _library.impl(op, run, key)
    torch.library.register_fake(f"zero_kernels::{op}", run_fake, lib=_library)
    REGISTERED[op] = Registered(check, mutated)


_register("foreach_step", _check_foreach_step, _fake_nothing, mutated=(2, 3, 4, 9, 10))
_register("ema", _check_ema, _fake_nothing, mutated=(0,))
_register("pack", _check_pack, _fake_nothing, mutated=(2, 4))
_register("unpack", _check_unpack, _fake_nothing, mutated=(2,))
_register("grad_stats", _check_grad_stats, _fake_grad_stats, mutated=())
_register("hyper_table", _check_hyper_table, _fake_nothing, mutated=(4,))
