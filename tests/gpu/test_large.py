"""Shards of more than 2^31 elements: the kernels' indices are 64 bits wide, and the last element counts like the first.

What is compared are windows: the start, the end, and where an element's or a byte's index leaves 31 or 32 bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from places import ADAM_NAMES, DEVICE, KERNELS, ON_GPU, SEED, Place, check, four_slots, on_kernels, using
from torch import Tensor

import zero_kernels
from zero_kernels import ROW

pytestmark = pytest.mark.gpu

EDGE = 2**31 if ON_GPU else 2**18
NUMEL = EDGE + 1000
WINDOW = 2**20 if ON_GPU else 2**13  # elements
STARTS = (0, EDGE // 4, EDGE // 2, EDGE)  # 2^31 and 2^32 bytes of fp32 and of 16 bits lie at these
GIB = 2**30


def windows(numel: int = NUMEL) -> list[slice]:
    """Runs of whole rows around each of STARTS, and the end of `numel` with its tail."""
    inner = [max(0, start - WINDOW // 2) // ROW * ROW for start in STARTS]
    return [slice(start, start + WINDOW) for start in inner if start + WINDOW <= numel] + [
        slice((numel - WINDOW) // ROW * ROW, numel)
    ]


def need(nbytes: float) -> None:
    """Skip where the device has not so much free memory."""
    if ON_GPU:
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        if free < nbytes:
            pytest.skip(f"{nbytes / GIB:.0f} GiB are needed, {free / GIB:.0f} of {total / GIB:.0f} are free")


def normal(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator(device=DEVICE).manual_seed(SEED + seed)
    return torch.empty(numel, dtype=dtype, device=DEVICE).normal_(generator=generator)


def cut(tensors: Sequence[Tensor], at: slice) -> list[Tensor]:
    """Copies on the CPU."""
    return [tensor[at].cpu() if DEVICE != "cpu" else tensor[at].clone() for tensor in tensors]


def test_adam_step() -> None:
    need(NUMEL * 16 + GIB)
    grad = normal(NUMEL, torch.bfloat16, 1)
    written = [normal(NUMEL, torch.float32, seed) for seed in (2, 3, 4)]
    written[2].abs_()
    written.append(written[0].to(torch.bfloat16))
    generator = torch.Generator(device=DEVICE).manual_seed(SEED)
    rows = torch.randint(-1, 4, (-(-NUMEL // ROW),), dtype=torch.int32, device=DEVICE, generator=generator)
    rows[-1] = 1  # a slot that is updated
    for place in KERNELS:
        before = [cut([grad, *written], at) for at in windows()]
        table, scale = four_slots().to(DEVICE), torch.tensor(0.5, device=DEVICE)
        using(place, lambda table=table, scale=scale: zero_kernels.adam_step(grad, *written, rows, table, scale))
        for at, (part, *states) in zip(windows(), before, strict=True):
            of_rows = slice(at.start // ROW, -(-at.stop // ROW))
            with zero_kernels.use_backend("reference"):
                zero_kernels.adam_step(part, *states, rows[of_rows].cpu(), four_slots(), torch.tensor(0.5))
            check(cut(written, at), states, ADAM_NAMES[:4], f"{place}, elements {at.start} to {at.stop}")


@on_kernels
def test_pack_and_unpack(place: Place) -> None:
    """A gradient past 2^31 elements, and two that lie behind it in the bucket; the only NaN is its last element."""
    need((3 * NUMEL) * 2 + GIB)
    grads = [normal(NUMEL, torch.bfloat16, 5), normal(1000, torch.float16, 6), normal(777, torch.float32, 7)]
    grads[0][-1] = math.nan
    offsets = [3, NUMEL + 131, NUMEL + 1200]
    bucket = torch.full((NUMEL + 2000,), math.nan, dtype=torch.bfloat16, device=DEVICE)
    flags = torch.full((3,), 5, dtype=torch.int32, device=DEVICE)
    using(place, lambda: zero_kernels.pack(grads, offsets, bucket, 0.5, flags))
    assert flags.tolist() == [1, 0, 0]
    for at in windows():
        want = [(part.float() * 0.5).bfloat16() for part in cut(grads[:1], at)]
        shifted = slice(at.start + offsets[0], at.stop + offsets[0])
        check(cut([bucket], shifted), want, ["bucket"], f"{place}, elements {at.start} to {at.stop}")
    tail = torch.zeros(len(bucket) - NUMEL - offsets[0], dtype=torch.bfloat16)
    for grad, offset in zip(grads[1:], offsets[1:], strict=True):
        start = offset - NUMEL - offsets[0]
        tail[start : start + len(grad)] = (grad.cpu().float() * 0.5).bfloat16()
    check(cut([bucket], slice(NUMEL + offsets[0], None)), [tail], ["bucket's end"], place)
    back = [torch.zeros_like(grad) for grad in grads]
    using(place, lambda: zero_kernels.unpack(bucket, offsets, back, 2.0))
    for at in windows():
        check(cut(back[:1], at), cut(grads[:1], at), ["unpacked"], f"{place}, elements {at.start} to {at.stop}")
    want = [(grad.cpu().float() * 0.5).bfloat16().float().mul(2.0).to(grad.dtype) for grad in grads[1:]]
    check([tensor.cpu() for tensor in back[1:]], want, ["unpacked[1]", "unpacked[2]"], place)


def test_grad_stats() -> None:
    """Against the reference on the same device, whose every addition is a torch call; the last element decides inf.

    A small shard lies on either side, whose partials are added in another way.
    """
    need(NUMEL * 2 + 2 * GIB)
    shard = normal(NUMEL, torch.bfloat16, 8)
    shard[-1] = 1000.0
    shards = [shard[:9], shard, shard[:20_000]]
    for norm in (1.0, 2.0, math.inf):
        with zero_kernels.use_backend("reference"):
            want = zero_kernels.grad_stats(shards, norm).cpu()
        assert norm != math.inf or want[1].tolist() == [1000.0, 0.0]
        for place in KERNELS:
            with zero_kernels.use_backend(place.backend):
                got = zero_kernels.grad_stats(shards, norm).cpu()
            check([got], [want], ["stats"], f"{place}, {norm=}")
    shard[-1] = math.nan
    for place in KERNELS:
        with zero_kernels.use_backend(place.backend):
            assert zero_kernels.grad_stats(shard, math.inf)[1].item() == 1.0, place
