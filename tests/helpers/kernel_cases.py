"""Inputs that hurt, the backends to compare, and what it means for two tensors to hold the same bits."""

import functools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, RULES, Rule, codecs, compiled

FLOATS = (torch.float16, torch.bfloat16, torch.float32)
SIZES = (0, 1, 7, 127, 128, 129, 4095, 4097, 1_000_003)
ISAS = compiled.status().isas
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


@contextmanager
def backend(name: str) -> Iterator[None]:
    """A backend, or the cpu backend on the instruction set of that name."""
    if name not in ISAS:
        with zero_kernels.use_backend(name):
            yield
        return
    compiled.use_isa(name)
    try:
        with zero_kernels.use_backend("cpu"):
            yield
    finally:
        compiled.use_isa(None)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Run torch's parallel loops on `count` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@functools.lru_cache(maxsize=32)
def awkward(numel: int, dtype: torch.dtype, seed: int, offset: int = 0) -> Tensor:
    """Values over all magnitudes, a tenth of them special, starting `offset` elements into an allocation.

    Made once and shared: clone it before writing.
    """
    generator = torch.Generator().manual_seed(seed)
    total = numel + offset
    exponents = torch.randint(-30, 20, (total,), generator=generator).float()
    x = (torch.randn(total, generator=generator) * torch.exp2(exponents)).to(dtype)
    info = torch.finfo(dtype)
    specials = [0.0, -0.0, info.max, info.min, info.tiny, -info.tiny / 2, info.tiny * info.eps]
    specials += [math.inf, -math.inf, math.nan]
    special = torch.tensor(specials, dtype=torch.float64).to(dtype)
    where = torch.rand(total, generator=generator) < 0.1
    choice = torch.randint(0, len(specials), (total,), generator=generator)
    return torch.where(where, special[choice], x)[offset:]


def dominated(numel: int, seed: int) -> Tensor:
    """fp32 values from 0 to 1, of which every 1024th outweighs the rest. So a sum tells the order of those."""
    values = torch.rand(numel, generator=torch.Generator().manual_seed(seed))
    return torch.where(torch.arange(numel) % 1024 == 0, values, values * 2.0**-30)


def at_offset(x: Tensor, offset: int) -> Tensor:
    """A copy of flat `x` that starts `offset` elements into its allocation."""
    return torch.cat([x.new_zeros(offset), x])[offset:]


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal dtype, shape and bits; a NaN equals any NaN."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    differs = a.view(BITS[a.element_size()]) != b.view(BITS[b.element_size()])
    return not (differs & ~(a.isnan() & b.isnan())).any()


# Four slots: decoupled, decoupled with decay, L2 that maximizes, and one that is not active.
_COEFFICIENTS = {
    "lr": [1e-3, 1e-2, 0.1, 1.0],
    "beta1": [0.9, 0.3, 0.5, 0.9],
    "beta2": [0.999, 0.99, 0.9, 0.95],
    "eps": [1e-8, 1e-6, 0.0, 1e-8],
    "weight_decay": [0.0, 0.1, 0.1, 0.2],
    "decoupled": [1, 1, 0, 1],
    "maximize": [0, 0, 1, 0],
    "momentum": [0.9, 0.3, 0.5, 0.9],
    "dampening": [0.5, 0.1, 0.0, 0.0],
    "nesterov": [0, 0, 1, 0],
}
_STEPS = [1, 2, 1000, 3]
_FACTORS = [1.0, 0.37, 0.7, 0.0]  # as clipping of a subset makes them


def rule_table(rule: Rule) -> Tensor:
    """A rule's table of four slots."""
    coefficients = torch.tensor([_COEFFICIENTS[name] for name in rule.coefficients], dtype=torch.float64)
    table, active = torch.empty(4, len(rule.columns)), torch.tensor([True, True, True, False])
    rule.fill_table(coefficients, None, torch.tensor(_STEPS, dtype=torch.float64), active, table)
    table[:, rule.columns.index("grad_factor")] *= torch.tensor(_FACTORS)
    return table


class Shards:
    """What `foreach_step` is given of several shards, each of them at another place in its allocations.

    `calm`: without special values, and of magnitudes whose sums are finite.

    Attributes:
        written: masters, states and params_out, in one list: what a call writes.
    """

    def __init__(
        self,
        rule: str,
        sizes: Sequence[int],
        grad: torch.dtype,
        param: torch.dtype | None,
        offset: int = 0,
        calm: bool = False,
    ) -> None:
        self.rule, self.table = rule, rule_table(RULES[rule])
        places = [(numel, offset + i % 5 if offset else 0) for i, numel in enumerate(sizes)]
        self.grads = [at_offset(awkward(numel, grad, 1 + i), at) for i, (numel, at) in enumerate(places)]
        self.masters = [at_offset(awkward(numel, torch.float32, 2 + i), at) for i, (numel, at) in enumerate(places)]
        self.states = [
            at_offset(awkward(numel, torch.float32, 3 + i + 7 * s).abs(), at)
            for i, (numel, at) in enumerate(places)
            for s in range(len(RULES[rule].states))
        ]
        self.params = [at_offset(awkward(numel, param, 5 + i), at) for i, (numel, at) in enumerate(places) if param]
        for tensor in (*self.grads, *self.written) if calm else ():
            tensor.nan_to_num_(0.1, 0.2, -0.3).clamp_(-9, 9)
        generator = torch.Generator().manual_seed(sum(sizes))
        rows = [-(-numel // ROW) for numel in sizes]
        self.row_slots = [torch.randint(-1, 4, (n,), dtype=torch.int32, generator=generator) for n in rows]

    @property
    def written(self) -> list[Tensor]:
        return [*self.masters, *self.states, *self.params]

    def run(self, name: str, **shared: Any) -> list[Tensor]:
        """What the named backend makes of copies of `written`."""
        masters, states, params = ([_twin(x) for x in group] for group in (self.masters, self.states, self.params))
        shared.setdefault("grad_scale", torch.tensor(0.37))
        with backend(name):
            zero_kernels.foreach_step(
                self.rule, self.grads, masters, states, params, self.row_slots, self.table, **shared
            )
        return [*masters, *states, *params]


class EncodedShards(Shards):
    """`Shards` whose states have these forms, in the order of the rule's. `low`: the masters, which awkward parameters
    are the high halves of, are split, and the low parts have that dtype. `huge`:
    every second row has a gradient that is the largest of its dtype.

    Attributes:
        scales: of the states, in their order.
        row_keys: of each shard.
    """

    def __init__(
        self,
        rule: str,
        *args: Any,
        forms: Sequence[torch.dtype],
        low: torch.dtype | None = None,
        huge: bool = False,
        **kwargs: Any,
    ) -> None:
        self.scales: list[Tensor] = []
        super().__init__(rule, *args, **kwargs)
        for grad in self.grads if huge else ():
            grad[5 :: 2 * ROW] = torch.finfo(grad.dtype).max
        self.row_keys = [at_offset(codecs.row_keys(i, i, len(rows)), i % 3) for i, rows in enumerate(self.row_slots)]
        for i, state in enumerate(self.states):
            form, values = (
                codecs.FORMS[forms[i % len(RULES[rule].states)]],
                torch.nn.functional.pad(state, (0, -len(state) % ROW)),
            )
            stored, *scale = form.encode(values.view(-1, ROW)) if len(state) else form.encode(state.new_zeros(1, ROW))
            self.states[i] = at_offset(stored.reshape(-1)[: len(state)].clone(), state.storage_offset())
            self.scales += [at_offset(of.reshape(-1)[: -(-len(state) // ROW)], i % 3) for of in scale]
        if low is not None:
            lows = [awkward(len(master), torch.float32, 8).view(torch.int32).to(low) for master in self.masters]
            self.masters = [at_offset(x, master.storage_offset()) for x, master in zip(lows, self.masters, strict=True)]

    @property
    def written(self) -> list[Tensor]:
        return [*super().written, *self.scales]

    def lists(self, **shared: Any) -> tuple[list[Any], list[Tensor]]:
        """The arguments of a call after the rule, with copies of `written`, and these copies."""
        groups = (self.masters, self.states, self.params, self.scales)
        masters, states, params, scales = ([_twin(x) for x in group] for group in groups)
        shared.setdefault("grad_scale", torch.tensor(0.37))
        of_all = [shared.get(name) for name in ("grad_scale", "found_inf", "nonfinite_slots")]
        lists = [self.grads, masters, states, params, self.row_slots, self.table, *of_all, scales or None]
        return [*lists, self.row_keys], [*masters, *states, *params, *scales]

    def run(self, name: str, **shared: Any) -> list[Tensor]:
        lists, written = self.lists(**shared)
        with backend(name):
            torch.ops.zero_kernels.foreach_step(self.rule, *lists)
        return written


class Averaged:
    """What `ema` is given of several shards: masters of a dtype, `each` averages of every one, four slots and padding.

    `dtype`: int16 or int8 for the low parts of split masters. `offset`: of each shard one tensor is misaligned.
    """

    def __init__(self, sizes: Sequence[int], dtype: torch.dtype, each: int, offset: int = 0) -> None:
        split, generator = dtype in codecs.LOWS, torch.Generator().manual_seed(sum(sizes))
        self.masters, self.params, self.averages = [], [], []
        for i, numel in enumerate(sizes):
            master = awkward(numel, torch.float32 if split else dtype, 2 + i)
            tensors = [master.view(torch.int32).to(dtype) if split else master]
            tensors += [awkward(numel, torch.float32, 9 + i + k) for k in range(each)]
            tensors += [awkward(numel, torch.bfloat16, 5 + i)] if split else []
            tensors = [at_offset(x, offset * (at == i % len(tensors))) for at, x in enumerate(tensors)]
            self.masters += tensors[:1]
            self.averages += tensors[1 : 1 + each]
            self.params += tensors[1 + each :]
        self.row_slots = [torch.randint(-1, 4, (-(-n // ROW),), generator=generator).int() for n in sizes]
        self.rates = torch.rand(4, each, generator=generator)
        self.rates.diagonal().copy_(torch.tensor([0.0, 1.0, -0.0, 1e-3])[:each])

    def lists(self) -> tuple[list[Any], list[Tensor]]:
        """The arguments of a call, with copies of the averages, and these copies."""
        averages = [_twin(x) for x in self.averages]
        return [averages, self.masters, self.params, self.row_slots, self.rates], averages

    def run(self, name: str) -> list[Tensor]:
        """What the named backend makes of copies of the averages."""
        lists, averages = self.lists()
        with backend(name):
            zero_kernels.ema(*lists)
        return averages


def joined(high: Tensor, low: Tensor) -> Tensor:
    """A split master, by integers."""
    bits = (high.view(torch.int16).long() << 16) + low.long() * (256 if low.dtype == torch.int8 else 1)
    both = bits.to(torch.int32).view(torch.float32)
    return torch.where(high.isfinite() & ~both.isnan(), both, high.float())


def _twin(x: Tensor) -> Tensor:
    """A copy that is aligned as `x` is."""
    return at_offset(x, x.storage_offset())
