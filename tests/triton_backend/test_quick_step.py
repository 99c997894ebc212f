"""AdamW with moments of 8 bits, interpreted: the quick path with a GPU's estimates, and each value that is unusual."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from interpreter import interpreted
from kernel_cases import backend, same_bits
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, codecs, triton
from zero_kernels.hyper import HYPER_COLUMNS
from zero_kernels.rules.rule import square_root

pytest.importorskip("triton.language", reason="triton is not installed")

import triton.language as tl
from triton import jit

from zero_kernels.triton.quick_step import _reciprocal, _root, quotient

pytestmark = pytest.mark.kernels

ROWS = 8  # of a tile
USUAL = {
    "step_size": 1e-2, "decay": 0.999, "weight_decay": 0.0, "eps": 1e-8, "beta1": 0.9, "one_minus_beta1": 0.1,
    "beta2": 0.99, "one_minus_beta2": 0.01, "bias_correction2_sqrt": 0.2, "active": 1.0, "grad_factor": 1.0,
    "step_number": 3.0,
}  # fmt: skip
WRITTEN = ("master", "high", "m", "v", "of_m", "of_v", "marks")


@contextmanager
def estimates(off: int) -> Iterator[list[bool]]:
    """Has quotients and roots made as on a GPU, of reciprocals that are off by so many units in the last place. Gives
    the list of whether tiles were unusual."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(self: Any, x: Any, y: Any, z: Any) -> Any:
        rounded = (x.data.astype(np.float64) * y.data + z.data).astype(np.float32)
        return TensorHandle(np.where(np.isnan(rounded), nan, rounded), z.dtype.scalar)

    def asm(self: Any, text: str, constraints: str, values: list[Any], *_: Any) -> Any:
        x = values[0].data.astype(np.float64)
        x = np.where(np.abs(x) < 2.0**-126, np.copysign(0, x), x)
        near = (1 / (np.sqrt(x) if text.startswith("rsqrt") else x)).astype(np.float32)
        if text.startswith("rcp"):
            near = np.where(np.isfinite(near) & (near != 0), near.view(np.int32) + off, near.view(np.int32))
            near = near.astype(np.int32).view(np.float32)
        near = np.where(np.abs(near) < 2.0**-126, np.copysign(np.float32(0), near), near)
        return SimpleNamespace(get_result=lambda i: TensorHandle(near, values[0].dtype.scalar))

    nan = np.int32(0x7FFFFFFF).view(np.float32)  # a GPU's
    of_tiles: list[bool] = []
    quick = triton.step.quick_adamw

    def quick_adamw(*given: Any) -> Any:
        *updated, unusual = quick(*given)
        of_tiles.append(bool(unusual.handle.data.item()))
        return *updated, unusual

    no = type(triton.codecs._INTERPRETED)(False)
    with (
        mock.patch.object(InterpreterBuilder, "create_fma", fma),
        mock.patch.object(InterpreterBuilder, "create_inline_asm", asm),
        mock.patch.object(triton.codecs, "_INTERPRETED", no),
        mock.patch.object(triton.quick_step, "_INTERPRETED", no),
        mock.patch.object(triton.step, "quick_adamw", quick_adamw),
    ):
        yield of_tiles


Tile = SimpleNamespace  # grad, master, high, m, v: [8, 128]; of_m, of_v, the scales: [8]; hyper: [12]


def columns(**changed: float) -> Callable[[Tile], None]:
    def plant(tile: Tile) -> None:
        for name, value in changed.items():
            tile.hyper[HYPER_COLUMNS.index(name)] = value

    return plant


def no_moments(tile: Tile) -> None:
    for of in (tile.m, tile.v, tile.of_m, tile.of_v):
        of.zero_()


def fresh(grad: float) -> Callable[[Tile], None]:
    """A first step of parameters that are 0."""

    def plant(tile: Tile) -> None:
        no_moments(tile)
        tile.grad.copy_(grad * (1 + torch.arange(ROWS * ROW).view(ROWS, ROW) / 1500))
        tile.master.zero_()

    return plant


def negative_zeros(tile: Tile) -> None:
    no_moments(tile)
    tile.grad.fill_(-0.0)
    tile.master.fill_(-0.0)


def also(*plants: Callable[[Tile], None]) -> Callable[[Tile], None]:
    def plant(tile: Tile) -> None:
        for each in plants:
            each(tile)

    return plant


def put(name: str, value: float) -> Callable[[Tile], None]:
    """Into one place of the tile's fifth row."""
    return lambda tile: getattr(tile, name)[4].view(-1)[-1].fill_(value)


def spread(tile: Tile) -> None:
    """Roots that are near 0 beside the largest of their row."""
    no_moments(tile)
    tile.grad.mul_(2.0**-12)
    tile.grad[:, 3] = 1.0


USUAL_TILES: dict[str, Callable[[Tile], None]] = {
    "as in a training": lambda tile: None,
    "of two steps": columns(step_size=-0.3, decay=1.0, beta1=0.5, one_minus_beta1=0.5, beta2=0.5, one_minus_beta2=0.5),
    "zeros": fresh(0.0),
    "-0": negative_zeros,
    "first step": fresh(2.0**-10),
    "small and large": spread,
    "close to the least": fresh(2.0**-45),
    "close to the most": also(put("of_m", 2.0**59), put("grad", 2.0**12)),
    "inactive": columns(active=0.0),
    "L2": columns(weight_decay=0.1),
    "no beta1": also(negative_zeros, columns(beta1=0.0)),
    "no beta1, and 0 beside a negative decay": also(
        negative_zeros, lambda tile: tile.master.zero_(), columns(beta1=0.0, decay=-0.5), lambda tile: tile.m.fill_(-9)
    ),
    "negative beta1": also(negative_zeros, columns(beta1=-0.9)),
    "negative scale": also(negative_zeros, put("of_m", -1.0)),
}

UNUSUAL_TILES: dict[str, Callable[[Tile], None]] = {
    "no eps": also(columns(eps=0.0), put("of_v", 0.0), lambda tile: tile.grad[4].zero_()),
    "large eps": columns(eps=math.inf),
    "eps NaN": columns(eps=math.nan),
    "no correction": columns(bias_correction2_sqrt=0.0),
    "large correction": columns(bias_correction2_sqrt=1e30),
    "large step": columns(step_size=3e38),
    "large decay": columns(decay=-3e38),
    "decay NaN": columns(decay=math.nan),
    "scale NaN": put("of_m", math.nan),
    "large moment": put("of_m", 1e36),
    "large root": put("of_v", 1e4),
    "root NaN": put("of_v", math.nan),
    "negative moment": columns(beta2=-0.99),
    "gradient NaN": put("grad", math.nan),
    "gradient inf": put("grad", -math.inf),
    "large gradient": put("grad", 1e30),
    "least gradient": fresh(2.0**-133),
    "subnormal moments": also(fresh(2.0**-123), columns(one_minus_beta2=0.0)),
    "small second moments": fresh(2.0**-52),
}

UNUSUAL_MASTERS: dict[str, tuple[float, int]] = {
    "inf": (math.inf, -5),
    "-inf": (-math.inf, 5),
    "NaN": (math.nan, 3),
    "0 beside a low half": (0.0, -1),
    "large": (2.0**125, 0),
    "largest": (torch.finfo(torch.bfloat16).max, 9),
}
"""The high half and the low one. Masters of one part are usual, whatever they are."""


def tile_of(seed: int) -> Tile:
    random = torch.Generator().manual_seed(seed)
    shape = (ROWS, ROW)
    master = torch.randn(shape, generator=random) * 0.02
    tile = Tile(
        grad=(torch.randn(shape, generator=random) * 2.0**-10).bfloat16(),
        master=master,
        high=master.bfloat16(),
        m=torch.randint(-128, 128, shape, generator=random).to(torch.int8),
        v=torch.randint(0, 256, shape, generator=random).to(torch.uint8),
        of_m=torch.rand(ROWS, generator=random) * 2.0**-10,
        of_v=torch.rand(ROWS, generator=random) * 2.0**-9,
        hyper=torch.tensor([USUAL[name] for name in HYPER_COLUMNS]),
    )
    tile.hyper[HYPER_COLUMNS.index("bias_correction2_sqrt")] = float(torch.rand(1, generator=random)) * 0.9 + 0.1
    return tile


def tiles(low: torch.dtype | None) -> list[Tile]:
    plants = [*USUAL_TILES.values(), *UNUSUAL_TILES.values()]
    made = [tile_of(seed) for seed in range(len(plants) + len(UNUSUAL_MASTERS))]
    for tile, plant in zip(made, plants, strict=False):
        plant(tile)
    for tile in made if low is not None else ():
        tile.high, tile.master = codecs.split_master(tile.master, low)
    for tile, (high, away) in zip(made[len(plants) :], UNUSUAL_MASTERS.values(), strict=True):
        (tile.master if low is None else tile.high)[3, 7] = high
        if low is not None:
            tile.master[3, 7] = away
        columns(decay=1.003)(tile)  # by which the largest comes to be above bf16's largest
    return made


def update(name: str, made: list[Tile], found_inf: float) -> list[Tensor]:
    def joined(of: str) -> Tensor:
        return torch.cat([getattr(tile, of).reshape(-1) for tile in made])

    slots = torch.arange(len(made), dtype=torch.int32).repeat_interleave(ROWS)
    slots[2::ROWS] = -1
    written = [joined(of) for of in WRITTEN[:-1]]
    master, high, m, v, of_m, of_v = written
    marks = torch.zeros(len(made), dtype=torch.int32)
    hyper = torch.stack([tile.hyper for tile in made])
    found = (torch.tensor(0.5), torch.tensor([found_inf]), marks)
    with backend(name):
        lists = ([joined("grad")], [master], [m, v], [high], [slots], hyper)
        zero_kernels.foreach_step("adamw", *lists, *found, scales=[of_m, of_v])
    return [*written, marks]


@jit
def _quotients(a, b, quotients, roots, N: tl.constexpr):
    at = tl.arange(0, N)
    x, divisor = tl.load(a + at), tl.load(b + at)
    tl.store(quotients + at, quotient(x, divisor, _reciprocal(divisor)))
    tl.store(roots + at, _root(tl.abs(x)))


@interpreted
def test_quotients_and_roots_are_rounded_as_ieee_rounds_them() -> None:
    """Of a million operands over all that is usual, and of one pair for which the reciprocal needs its correction."""
    numel, random = 2**20, torch.Generator().manual_seed(1)

    def drawn(least: int, most: int) -> Tensor:
        exponents = torch.randint(least, most + 1, (numel,), generator=random)
        return torch.ldexp(1 + torch.rand(numel, generator=random), exponents)

    for off in (-1, 0, 1):
        a, b = drawn(-100, 59) * torch.randn(numel, generator=random).sign(), drawn(-60, 18)
        a[0], b[0] = float.fromhex("0x1.5e2caap+0"), float.fromhex("0x1.cf5f6ap+0")
        quotients, roots = torch.empty(numel), torch.empty(numel)
        with estimates(off):
            _quotients[(1,)](a, b, quotients, roots, numel)
        assert same_bits(quotients, a / b)
        usual = a.abs() < 2.0**20
        assert same_bits(roots[usual], square_root(a.abs())[usual])


@interpreted
@pytest.mark.parametrize("low", (None, *codecs.LOWS), ids=str)
def test_the_quick_way_has_the_bits_of_the_reference(low: torch.dtype | None) -> None:
    """And takes what is usual alone."""
    made = tiles(low)
    names = [*USUAL_TILES, *UNUSUAL_TILES, *UNUSUAL_MASTERS]
    want = update("reference", made, 0.0)
    for off in (-1, 0, 1):
        with estimates(off) as unusual:
            got = update("triton", made, 0.0)
        for ours, theirs, written in zip(got, want, WRITTEN, strict=True):
            parts = zip(ours.chunk(len(made)), theirs.chunk(len(made)), names, strict=True)
            assert [name for a, b, name in parts if not same_bits(a, b)] == [], (written, off)
        usual = [name for name, of_tile in zip(names, unusual, strict=True) if not of_tile]
        assert usual == [*USUAL_TILES, *(UNUSUAL_MASTERS if low is None else ())], off


@interpreted
def test_a_skipped_step_marks_slots() -> None:
    made = tiles(torch.int8)
    want, got = (update(name, made, 1.0) for name in ("reference", "triton"))
    assert all(map(same_bits, want, got)) and got[-1].sum() == 2
