"""`symmetric_product`: schema, checks, fake and face. Triton alone has it, and computes half of the result.

It is none of the ops of `dispatch`, since it promises no bits: tensor cores add in an order of their own.
"""

import torch
from torch import Tensor

from zero_kernels import dispatch

_library = torch.library.Library("zero_kernels", "FRAGMENT")
_library.define(
    "symmetric_product(Tensor left, Tensor right, Tensor? added=None, float alpha=1.0, float beta=1.0) -> Tensor"
)


def symmetric_product(
    left: Tensor, right: Tensor, added: Tensor | None = None, *, alpha: float = 1.0, beta: float = 1.0
) -> Tensor:
    """alpha * left @ right + beta * added, where that is symmetric: X X^T, or polynomials of one symmetric matrix.

    Args:
        left: bf16 [rows, columns], or [n, rows, columns] of n matrices. Its strides may be any.
        right: bf16 [columns, rows], or [n, columns, rows], as `left.mT`.
        added: bf16 [rows, rows], or [n, rows, rows]. Only what it has on and below the diagonal is read.

    Returns contiguous bf16, exactly symmetric: what is above the diagonal is what is below it. Products are added up in
    fp32 by tensor cores, and each element is rounded once, to nearest even. The same shapes on the same kind of GPU
    have the same bits, whatever n is. Raises TypeError for a wrong dtype, ValueError for a wrong shape or device, and
    BackendError where `why_no_symmetric_product` has a reason.
    """
    return torch.ops.zero_kernels.symmetric_product(left, right, added, alpha, beta)


def why_no_symmetric_product(device: torch.device | str) -> str | None:
    """None where `symmetric_product` can run on tensors of `device`, else the reason in words."""
    return dispatch.why_unusable("triton", torch.device(device))


def _check(left: Tensor, right: Tensor, added: Tensor | None) -> None:
    given = {"left": left, "right": right} | ({} if added is None else {"added": added})
    *several, rows, columns = left.shape if left.dim() in (2, 3) else (0, 0, 0, 0)
    shapes = {"left": [*several, rows, columns], "right": [*several, columns, rows], "added": [*several, rows, rows]}
    for name, tensor in given.items():
        if tensor.dtype != torch.bfloat16:
            raise TypeError(f"{name} must be bfloat16, got {str(tensor.dtype).removeprefix('torch.')}")
        if tensor.device != left.device:
            raise ValueError(f"{name} is on {tensor.device}, left on {left.device}: move it there")
        if [*tensor.shape] != shapes[name]:
            wanted = "[rows, columns] or [n, rows, columns]" if name == "left" else str(shapes[name])
            raise ValueError(f"{name} must have shape {wanted}, got {[*tensor.shape]}")


def _run(left: Tensor, right: Tensor, added: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    _check(left, right, added)
    if (reason := why_no_symmetric_product(left.device)) is not None:
        raise dispatch.BackendError(f"symmetric_product needs Triton on a GPU, and {reason}: take torch.baddbmm")
    from zero_kernels.triton import symmetric

    return symmetric.symmetric_product(left, right, added, alpha, beta)


def _fake(left: Tensor, right: Tensor, added: Tensor | None = None, alpha: float = 1.0, beta: float = 1.0) -> Tensor:
    _check(left, right, added)
    return left.new_empty((*left.shape[:-1], left.shape[-2]))


for _key in ("CPU", "CUDA"):
    _library.impl("symmetric_product", _run, _key)
torch.library.register_fake("zero_kernels::symmetric_product", _fake, lib=_library)
