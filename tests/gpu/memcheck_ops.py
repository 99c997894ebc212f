"""Every op once at each of a few small, odd and misaligned sizes; `test_memcheck.py` runs it under a memory checker.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python tests/gpu/memcheck_ops.py cuda cuda

Arguments: the backend, the device, and the ops: all of them by default; `2/4` is the second of four parts, and
`out_of_bounds` an op with an error. Without the caching allocator every tensor is an allocation of its own, so that one
element past its end is seen; tensors here therefore end where their allocation does.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "python")]

import zero_kernels  # noqa: E402
from zero_kernels import HYPER_COLUMNS, ROW, RULES  # noqa: E402

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SIZES = (0, 1, 7, 129, 2050, 4097)
FORMS = ((torch.bfloat16, torch.bfloat16), (torch.int8, torch.uint8), (torch.float32, torch.float32))


def make(numel: int, dtype: torch.dtype, device: str, offset: int = 0) -> Tensor:
    return torch.ones(numel + offset, dtype=dtype, device=device)[offset:]


def adam_step(device: str) -> int:
    calls = 0
    table = torch.ones(2, len(HYPER_COLUMNS), device=device)
    for numel, grad_dtype, param_dtype, offset in itertools.product(SIZES, FLOATS, (*FLOATS, None), (0, 1)):
        states = [make(numel, torch.float32, device, offset) for _ in range(3)]
        param = None if param_dtype is None else make(numel, param_dtype, device, offset)
        rows = (torch.arange(-(-numel // ROW), device=device) % 3 - 1).to(torch.int32)
        grad, flag, slots = make(numel, grad_dtype, device, offset), make(1, torch.float32, device), rows.new_zeros(2)
        zero_kernels.adam_step(grad, *states, param, rows, table)
        zero_kernels.adam_step(grad, *states, param, rows, table, flag, flag, slots)
        calls += 2
    return calls


def foreach_step(rule_name: str, device: str) -> int:
    """A rule over shards of all sizes at once, and more of them than a launch takes."""
    calls, rule = 0, RULES[rule_name]
    table = torch.ones(2, len(HYPER_COLUMNS), device=device)
    flag, slots = make(1, torch.float32, device), torch.zeros(2, dtype=torch.int32, device=device)
    # Triton compiles a kernel for each alignment, and for each tensor that is left out: not for every pair of these.
    shapes = itertools.product((SIZES, (257,) * 70), ((0, True), (1, False)))
    for sizes, (offset, has_output) in shapes:
        grads, masters = ([make(numel, torch.float32, device, offset) for numel in sizes] for _ in range(2))
        states = [make(numel, torch.float32, device, offset) for numel in sizes for _ in rule.states]
        outs = [make(numel, torch.bfloat16, device, offset) for numel in sizes] if has_output else []
        rows = [(torch.arange(-(-numel // ROW), device=device) % 3 - 1).to(torch.int32) for numel in sizes]
        zero_kernels.foreach_step(rule.name, grads, masters, states, outs, rows, table)
        zero_kernels.foreach_step(rule.name, grads, masters, states, outs, rows, table, flag, flag, slots)
        calls += 2
    return calls


def smaller_state(of_states: Sequence[torch.dtype], device: str) -> int:
    """A usual form of AdamW's moments, with masters that are split, and masters that are not."""
    calls, table = 0, torch.ones(2, len(HYPER_COLUMNS), device=device)
    for low, offset in itertools.product((None, torch.int16, torch.int8), (0, 1)):
        grads, params = ([make(numel, torch.bfloat16, device, offset) for numel in SIZES] for _ in range(2))
        masters = [make(numel, low or torch.float32, device, offset) for numel in SIZES]
        states = [make(numel, dtype, device, offset) for numel in SIZES for dtype in of_states]
        rows = [(torch.arange(-(-numel // ROW), device=device) % 3 - 1).to(torch.int32) for numel in SIZES]
        scales = [make(-(-len(state) // ROW), torch.float32, device) for state in states if state.itemsize == 1]
        zero_kernels.foreach_step(
            "adamw", grads, masters, states, params, rows, table, scales=scales or None, row_keys=rows
        )
        calls += 1
    return calls


def ema(device: str) -> int:
    """Of masters of every dtype, and once of more averages than a launch takes."""
    calls = 0
    dtypes = (*FLOATS, torch.int16, torch.int8)
    for dtype, offset, each in (*itertools.product(dtypes, (0, 1), (2,)), (torch.float32, 0, 17)):
        averages = [make(numel, torch.float32, device, offset) for numel in SIZES for _ in range(each)]
        masters = [make(numel, dtype, device, offset) for numel in SIZES]
        params = [] if dtype in FLOATS else [make(numel, torch.bfloat16, device, offset) for numel in SIZES]
        rows = [(torch.arange(-(-numel // ROW), device=device) % 3 - 1).to(torch.int32) for numel in SIZES]
        zero_kernels.ema(averages, masters, params, rows, torch.full((2, each), 0.5, device=device))
        calls += 1
    return calls


def pack(device: str) -> int:
    """Gradients of odd sizes with gaps between them, and once more of them than a launch takes."""
    calls = 0
    for bucket_dtype, offset in itertools.product(FLOATS, (0, 1)):
        many = [[i % 5 for i in range(1300)]] if (bucket_dtype, offset) == (torch.bfloat16, 0) else []
        for sizes in (*itertools.permutations((0, 7, 4097)), (2050,), (), *many):
            grads = [make(size, FLOATS[i % 3], device, offset) for i, size in enumerate(sizes)]
            ends = list(itertools.accumulate(size + 3 for size in sizes))
            offsets = [end - size for end, size in zip(ends, sizes, strict=True)]
            bucket = make(ends[-1] if ends else 5, bucket_dtype, device, offset)
            flags = torch.zeros(len(grads), dtype=torch.int32, device=device)
            zero_kernels.pack(grads, offsets, bucket, 0.5, flags)
            zero_kernels.unpack(bucket, offsets, grads, 2.0)
            calls += 2
    return calls


def grad_stats(device: str) -> int:
    sizes = (*SIZES, 8192, 8193, 30_001)
    for numel, dtype, offset, norm in itertools.product(sizes, FLOATS, (0, 1), (1.0, 2.0, math.inf)):
        zero_kernels.grad_stats(make(numel, dtype, device, offset), norm)
    for norm in (1.0, 2.0, math.inf):
        zero_kernels.grad_stats([make(numel, FLOATS[i % 3], device, i % 2) for i, numel in enumerate(sizes)], norm)
    zero_kernels.grad_stats([make(i % 300, FLOATS[i % 3], device) for i in range(1100)])
    return len(sizes) * 3 * 2 * 3 + 4


def hyper_table(device: str) -> int:
    for slots in (0, 1, 129):
        coefficients = torch.full((7, slots), 0.5, dtype=torch.float64, device=device)
        step = torch.ones(slots, dtype=torch.float64, device=device)
        out = torch.empty(slots, len(HYPER_COLUMNS), device=device)
        torch.ops.zero_kernels.hyper_table(coefficients, None, step, None, out)
        group, active = torch.zeros(slots, dtype=torch.int32, device=device), step != 0
        torch.ops.zero_kernels.hyper_table(coefficients.new_full((7, 1), 0.5), group, step, active, out)
    return 6


def symmetric_product(device: str) -> int:
    """Tiles with a rest, of whole ones and of one element, beside each other in memory and transposed."""
    shapes = ((1, 1), (33, 70), (64, 64), (130, 65), (300, 48), (2064, 16))
    for rows, columns in shapes:
        x, d = (torch.ones(2, *shape, dtype=torch.bfloat16, device=device) for shape in ((rows, columns), (rows, rows)))
        zero_kernels.symmetric_product(x, x.mT, d, alpha=0.5, beta=2.0)
        zero_kernels.symmetric_product(x.mT, x)
    return 2 * len(shapes)


def out_of_bounds(device: str) -> int:
    """Not one of the ops: a kernel that writes past its tensor, to see that the checker sees it."""
    import triton
    import triton.language as tl

    globals()["tl"] = tl  # where the compiler looks names up
    triton.jit(write_past_the_end)[(1,)](torch.zeros(3, device=device))
    return 1


def write_past_the_end(at):
    tl.store(at + 4096, 1.0)  # noqa: F821


OPS: dict[str, Callable[[str], int]] = {
    "adam_step": adam_step,
    **{f"smaller_state {forms[0]}": partial(smaller_state, forms) for forms in FORMS},
    **{f"foreach_step {rule}": partial(foreach_step, rule) for rule in RULES},
    "ema": ema,
    "pack": pack,
    "grad_stats": grad_stats,
    "hyper_table": hyper_table,
}


def chosen(ops: Sequence[str], known: Sequence[str]) -> Sequence[str]:
    """``ops``: names, a part as ``2/4``, or none for all that are known."""
    number, part, count = ops[0].partition("/") if ops else ("1", "/", "1")
    return known[int(number) - 1 :: int(count)] if part else ops


def main(backend: str, device: str, *ops: str) -> None:
    zero_kernels.use_backend(backend)
    known = OPS | ({"symmetric_product": symmetric_product} if backend == "triton" else {})
    for op in chosen(ops, list(known)):
        calls = out_of_bounds(device) if op == "out_of_bounds" else known[op](device)
        if device == "cuda":
            torch.cuda.synchronize()
        print(f"{op}: {calls} calls", flush=True)
    print("done", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
