"""The hyper table: one fp32 row of coefficients per parameter slot. Its layout, and AdamW's."""

from collections.abc import Sequence

import torch

ROW = 128
"""Elements in a row, the granule of `row_slot`: every slot starts on a row and owns it alone."""

PADDING = "padding"
"""Name of the columns that nobody reads."""

STEP_NUMBER = "step_number"
"""Name of the column that has the step which the row was made for, rounded to fp32. Stochastic rounding reads it."""

ROW_KEY = "row_key"
"""Name under which `update_rows` gives the keys of rows beside the columns."""

_OWN = 9


def columns_of(*own: str) -> tuple[str, ...]:
    """The columns of a table, in order: a rule's own, at most nine, then `active`, `grad_factor` and `step_number` at
    their places.

    A row is padded to twelve, which are three loads of 16 bytes.

    Raises ValueError for more than nine, and for a name that is given twice or taken.
    """
    if len(own) > _OWN:
        raise ValueError(f"a rule has at most {_OWN} columns of its own, got {len(own)}: {', '.join(own)}")
    names = (*own, *[PADDING] * (_OWN - len(own)), "active", "grad_factor", STEP_NUMBER)
    for name in own:
        if names.count(name) > 1 or name in (PADDING, ROW_KEY):
            taken = ", ".join((*names[_OWN:], PADDING, ROW_KEY))
            raise ValueError(f"column {name!r} is given twice, or taken: these names are {taken}")
    return names


HYPER_COLUMNS = columns_of(
    "step_size",
    "decay",
    "weight_decay",
    "eps",
    "beta1",
    "one_minus_beta1",
    "beta2",
    "one_minus_beta2",
    "bias_correction2_sqrt",
)
"""Names of the columns of AdamW's table, in order."""

HYPER_COEFFICIENTS = ("lr", "beta1", "beta2", "eps", "weight_decay", "decoupled", "maximize")
"""Names of the rows of `coefficients`, from which the op `hyper_table` makes the columns."""

Coefficient = float | Sequence[float] | torch.Tensor


def hyper_table(
    lr: Coefficient,
    betas: tuple[Coefficient, Coefficient],
    eps: Coefficient,
    weight_decay: Coefficient,
    step: Coefficient,
    *,
    decoupled: bool | Sequence[bool] | torch.Tensor = True,
    maximize: bool | Sequence[bool] | torch.Tensor = False,
    active: bool | Sequence[bool] | torch.Tensor = True,
    device: torch.device | str = "cpu",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Make rows of the hyper table that `adam_step` reads.

    Each argument is a scalar, a sequence, or a tensor [slots] (any real dtype, or bool) already on `device`; all
    broadcast to the same number of slots. With tensors nothing is read on the host. `step` counts from 1: it is the
    number of the step being made. Arithmetic is float64, and each coefficient is rounded once to fp32:

        step_size = lr / (1 - beta1^step)        bias_correction2_sqrt = sqrt(1 - beta2^step)
        decay = 1 - lr * weight_decay and weight_decay = 0        where decoupled (AdamW, Loshchilov & Hutter 2019)
        decay = 1 and weight_decay as given                       where not (Adam with L2, Kingma & Ba 2015)
        grad_factor = -1 where maximize, else 1                   multiplies grad_scale

    `out`, fp32 [slots, len(HYPER_COLUMNS)], is written in place and returned; it then sets the device.

    Returns fp32 [slots, len(HYPER_COLUMNS)]. Raises ValueError for a scalar step below 1, for lengths that differ, for
    a tensor on another device; TypeError for a wrong `out`.
    """
    if out is not None:
        device = out.device
    if isinstance(step, int | float) and step < 1:
        raise ValueError(f"step must be 1 or more (the number of the step being made), got {step}")
    columns = {
        "lr": lr,
        "betas[0]": betas[0],
        "betas[1]": betas[1],
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled": decoupled,
        "maximize": maximize,
        "step": step,
        "active": active,
    }
    columns64 = [_as_float64(name, value, torch.device(device)) for name, value in columns.items()]
    try:
        *coefficients, count, is_active = torch.broadcast_tensors(*columns64)
    except RuntimeError:
        lengths = {name: value.numel() for name, value in zip(columns, columns64, strict=True) if value.dim()}
        raise ValueError(f"hyper_table needs one length for all sequences, got {lengths}") from None
    slots = is_active.numel()
    shape = (slots, len(HYPER_COLUMNS))
    if out is None:
        out = torch.empty(shape, dtype=torch.float32, device=device)
    elif out.dtype != torch.float32 or out.shape != shape:
        raise TypeError(f"out must be float32 {list(shape)}, got {out.dtype} {list(out.shape)}")
    torch.ops.zero_kernels.hyper_table(
        torch.stack(coefficients).view(len(HYPER_COEFFICIENTS), slots),
        None,
        count.reshape(-1).contiguous(),
        is_active.reshape(-1) != 0,
        out,
    )
    return out


def _as_float64(name: str, value: Coefficient, device: torch.device) -> torch.Tensor:
    if isinstance(value, int | float):
        return torch.full((), value, dtype=torch.float64, device=device)  # the number goes into a kernel: no copy
    if not isinstance(value, torch.Tensor):
        host = torch.tensor(value, dtype=torch.float64, pin_memory=device.type == "cuda")
        return host.to(device, non_blocking=True)
    if value.device.type != device.type:
        raise ValueError(f"{name} is on {value.device}, but the table is made on {device}: pass device=")
    if value.dim() > 1:
        raise ValueError(f"{name} must be a scalar or have one dimension [slots], got {list(value.shape)}")
    return value.to(torch.float64)
