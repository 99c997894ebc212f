"""An update rule: the state it keeps, the numbers it reads of a group, and the op that updates a shard.

Nothing outside a rule spells the name of a state tensor. Memory, state dicts, whole states and statistics go by
the rule's list. Options, their ranges and defaults, are the rule's, too. A rule is a file beside this one, or a user's
own.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

import zero_kernels

from ..comm.collectives import Comm
from ..params.layout import CUT_AT_ROWS, LayoutPolicy, SlotPiece
from ..params.storage_order import StorageOrder, view_of
from ..params.tensor_slice import Joint
from .codec import CODECS, Begins, Codec, Per, StateTensor
from .options import EMA_DECAY, Decays, Fixed, Option

MASTER = "master"
"""The name of the master, of which the parameters are roundings, in the rules of the package."""


class Whole(NamedTuple):
    """A parameter that lies whole in a shard, or this rank's slice of one: from element ``start`` on, in this memory
    format. ``group`` is its parameter group, live. ``joint``: how slices make a whole; None: it is no slice."""

    param: int
    start: int
    shape: torch.Size
    order: StorageOrder
    group: Mapping[str, Any] = MappingProxyType({})
    joint: Joint | None = None

    @property
    def numel(self) -> int:
        return self.shape.numel()

    def of(self, along_shard: Tensor) -> Tensor:
        """View its part, [numel], of a tensor along the shard."""
        return along_shard.narrow(0, self.start, self.numel)

    def shaped(self, flat: Tensor) -> Tensor:
        """View ``flat`` [numel] in the parameter's shape."""
        return view_of(flat, self.shape, self.order)


class CutParameter(NamedTuple):
    """A parameter that is cut over ranks. ``whole``: as if it began a shard. ``parts``: the ranks that have some of it,
    in order, each with its piece."""

    whole: Whole
    parts: tuple[tuple[int, SlotPiece], ...]


class ToJoin(NamedTuple):
    """The parameters of a shard that a rule needs whole, where they are cut over ranks, or ranks divide the work.

    Attributes:
        wholes: the parameters in it, or slices of them, that no other shard has parts of.
        cuts: the parameters in it of which other shards have parts.
        ranks: those that have these shards; None: no parameter is in several shards.
        slices: the tensor-parallel ranks, which have the slices; None: there are no slices.
        replicas: ranks that have the same parameters, and divide the work; None: there are none.
    """

    wholes: Sequence[Whole]
    cuts: Sequence[CutParameter]
    ranks: Comm | None
    slices: Comm | None
    replicas: Comm | None


class ShardUpdate(NamedTuple):
    """The tensors that an update reads and writes.

    A tuple: a frozen dataclass takes four times as long to make, for every shard.

    Attributes:
        grad: [shard_numel] the reduced gradient, not unscaled yet.
        parameter: [shard_numel] in its own dtype.
        state: as it is stored, by name; along the shard.
        row_slot: [shard_numel / ROW] int32, the parameter index of each row; -1 for padding.
        hyper: [parameters, columns] fp32, a row of coefficients a parameter.
        grad_scale: [1] fp32, multiplies every gradient; None: nothing does.
        found_inf: [1] fp32; not 0: nothing is updated.
        marks: [parameters] int32, get 1 where a skipped gradient is not finite; None: they are not wanted.
        wholes: the parameters in it, where the rule has them whole, or a slice of each.
        row_keys: [shard_numel / ROW] int32, keys of each row's noise; None: nothing is rounded by noise.
    """

    grad: Tensor
    parameter: Tensor
    state: Mapping[str, Tensor]
    row_slot: Tensor
    hyper: Tensor
    grad_scale: Tensor | None
    found_inf: Tensor | None
    marks: Tensor | None
    wholes: Sequence[Whole] = ()
    row_keys: Tensor | None = None

    @property
    def common(self) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
        """The tensors that are the same for all shards, as ``foreach_step`` takes them."""
        return self.hyper, self.grad_scale, self.found_inf, self.marks


Rule = TypeVar("Rule", bound="UpdateRule")


class UpdateRule:
    """An optimizer's arithmetic, and what is special to it. A rule is a subclass; ``docs/rules.md`` makes one.

    A rule that is written in Python gives ``make_columns`` and ``update_rows``. One with a kernel of its own gives
    ``update``, and may give ``fill_table``.

    Args:
        values: defaults of options, by name. Raises TypeError for a name that is no option's.

    Attributes:
        options: its options, in the order of the numbers that ``fill_table`` reads.
        tensors: the state of a shard, in the order of state dicts. One of them may begin as the parameter.
        own_columns: names of the numbers that ``update_rows`` reads of a parameter, beside its gradient and state.
        counterparts: names of the classes whose state is alike, such as torch's. Checkpoints go from one to the other.
        torch_options: options that torch's groups have in addition, and their defaults.
        own_option, foreign_options: a saved group with one of the latter, and without the former, is of another
            optimizer. Other options decide nothing, since schedulers and users add options of their own.
        needs_steps: whether state is of no use without the number of updates that it has had.
        compiled: arguments of ``torch.compile``, which fuses ``update_rows``; its bits are the compiler's then. None:
            torch's ops run one after another.
        nonnegative: names of state that is never below 0, as a mean of squares: a codec may have more room for it then.
        codecs: how tensors are stored that are not stored as they are, by name; see ``Codec``.
        averages: the exponential averages of the master that are kept beside the rule's own state, the last of
            ``tensors``; see ``with_averages``.
        layout: where in a bucket parameters lie, at stages 0 to 2. ``WholeParameters`` is for a rule that needs whole
            matrices. Such a rule has an ``update`` of its own.
        joins_parts: whether such a rule works at stage 3, too, where all parameters are cut over ranks, and where
            tensor-parallel ranks have slices of them. It has ``before_joining``, ``join`` and ``after_joining`` then,
            which take the place of ``update`` there.
        joined_in: the dtype in which ranks exchange parts to be made whole.
        plain_slices: number of tensor-parallel ranks that have plain slices of a cut parameter, one each.
    """

    options: tuple[Option, ...] = ()
    tensors: tuple[StateTensor, ...] = ()
    own_columns: tuple[str, ...] = ()
    counterparts: frozenset[str] = frozenset()
    torch_options: Mapping[str, Any] = MappingProxyType({})
    own_option = ""
    foreign_options: tuple[str, ...] = ()
    needs_steps = True
    compiled: Mapping[str, Any] | None = None
    nonnegative: frozenset[str] = frozenset()
    codecs: Mapping[str, Codec] = MappingProxyType({})
    averages: tuple[str, ...] = ()
    layout: LayoutPolicy = CUT_AT_ROWS
    joins_parts = False
    joined_in = torch.float32
    plain_slices = 1
    _ema: zero_kernels.Prepared  # set by ``prepared``

    def __init__(self, **values: Any) -> None:
        known = {option.name: option.default for option in self.options}
        unknown = [name for name in values if name not in known]
        if unknown:
            raise TypeError(f"{self.name} has no option {unknown[0]!r}: it has {', '.join(known) or 'none'}")
        self.defaults = {**known, **values}

    @property
    def name(self) -> str:
        """The class's name, which checkpoints record."""
        return type(self).__name__

    @property
    def coefficients(self) -> tuple[str, ...]:
        """Names of the numbers that a parameter group gives to the rule itself."""
        own = [option for option in self.options if not isinstance(option, Decays)]
        return tuple(name for option in own for name in option.coefficients)

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns of the table: the rule's own, and ``active`` and ``grad_factor``.

        ``active`` is 0 for a parameter that is not updated. ``grad_factor`` multiplies its gradient.
        """
        return zero_kernels.columns_of(*self.own_columns)

    @property
    def fixed(self) -> dict[str, Any]:
        """Values of the ``Fixed`` options, by name: the same for all groups."""
        return {option.name: self.defaults[option.name] for option in self.options if isinstance(option, Fixed)}

    @property
    def described(self) -> dict[str, Any]:
        """Entries of a group's description beside its options: arguments of the constructor about the arithmetic."""
        return {}

    def check(self) -> None:
        """Raise ValueError or TypeError for what cannot be, whatever the parameters are."""
        known = {tensor.name: tensor for tensor in self.tensors}
        for name, codec in self.codecs.items():
            if type(codec) not in map(type, CODECS.values()):
                ours = ", ".join(f"{type(one).__name__}()" for one in CODECS.values())
                raise TypeError(f"the codec of {name!r} is a {type(codec).__name__}: give one of {ours}")
            tensor = known.get(name)
            if tensor is None:
                raise ValueError(f"there is a codec for {name!r}, and the state is {', '.join(known)}")
            begins = Begins.PARAMETER if codec.reads_parameter else Begins.ZERO
            if tensor.begins is not begins or tensor.per is not Per.ELEMENT or tensor.dtype != torch.float32:
                kind = "the master" if codec.reads_parameter else "fp32, a value an element, and zero at first"
                raise ValueError(
                    f"{name!r} cannot be stored by the codec {codec.name!r}: that is for state that is {kind}"
                )

    def for_groups(self, groups: Sequence[Mapping[str, Any]]) -> UpdateRule:
        """Give the rule for these parameter groups, the first that the optimizer has: they may decide what state there
        is. Raises ValueError."""
        return self

    @property
    def splits_work(self) -> bool:
        """Whether ranks that have the same whole parameters divide the work of their update, by ``join``."""
        return False

    def cost(self, shape: tuple[int, ...]) -> int:
        """The cost of updating a parameter of this shape, in multiplications or another unit that the rules of one
        optimizer have in common. Whole parameters are assigned to ranks by it."""
        return math.prod(shape)

    def with_averages(self, decays: Decays) -> UpdateRule:
        """Give this rule with an exponential average of the master for each of ``decays``: e = e + (1 - decay) (p - e),
        after an update has made p. The first update makes it p."""
        made = copy.copy(self)
        made.averages = decays.coefficients
        made.tensors = (*self.tensors, *(StateTensor(name, Begins.AVERAGE) for name in made.averages))
        made.options = (*self.options, decays)
        return made

    def with_codecs(self, codecs: Mapping[str, Codec]) -> UpdateRule:
        """Give this rule with state that is stored by ``codecs``, by the names of state tensors."""
        made = copy.copy(self)
        made.codecs = {**self.codecs, **codecs}
        return made

    def needs_whole(self, joint: Joint) -> bool:
        """Whether it needs all slices of such a parameter together."""
        return not self.layout.cuts

    def check_group(self, number: int, group: Mapping[str, Any]) -> None:
        """Raise ValueError for an option of a parameter group that is out of range, or cannot be followed."""
        owner = f"parameter group {number}"
        for option in self.options:
            if option.name not in group and not option.optional:
                raise ValueError(f"{owner} has no {option.name}")
            value, own = group.get(option.name, option.default), self.defaults.get(option.name)
            option.check(value, owner)
            if isinstance(option, Fixed) and option.name in group and not option.same(value, own):
                raise ValueError(
                    f"{option.name} of {owner} is {value!r}, and the optimizer was made with {own!r}, which is one for "
                    f"all groups: make it with {option.name}={value!r}"
                )
        if group.get(EMA_DECAY) is not None and not self.averages:
            raise ValueError(f"{EMA_DECAY} of {owner}: the optimizer keeps no averages: give it {EMA_DECAY}, too")

    def refuse_parameter(self, parameter: Tensor, group: Mapping[str, Any]) -> str | None:
        """Return why the rule cannot update this parameter of ``group``, and what to do. None: it can."""
        return None

    def refuse_device(self, device: torch.device) -> str | None:
        """Return why it cannot update where state is on ``device``, and what to do. None: it can."""
        return None

    def refuse_saved(self, number: int, group: Mapping[str, Any]) -> str | None:
        """Return why state of a group with these options means something else here. None: it does not."""
        return None

    def refuse_options(self, number: int, group: Mapping[str, Any]) -> str | None:
        """Return that a state dict with these options is of another optimizer. None: it is not."""
        # Checkpoints are not asked: their state tensors show it, and may be left out.
        found = [name for name in self.foreign_options if name in group]
        if self.own_option in group or not found:
            return None
        return (
            f"the state is of another optimizer: its parameter group {number} has {', '.join(found)}, and no "
            f"{self.own_option}. Load the model alone, and let the optimizer begin anew"
        )

    def read_groups(self, groups: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
        """Read numbers, or tensors of one element: a list for each of ``coefficients``, then for each decay."""
        return [column for option in self.options for column in option.read(groups)]

    def describe(self, group: Mapping[str, Any]) -> tuple[str, ...]:
        """List the options by which ``group`` describes its parameters: ``refuse_parameter`` goes by them."""
        given = [(option, group.get(option.name, option.default)) for option in self.options if option.stays]
        return tuple(f"{option.name}={value!r}" for option, value in given if value != option.default)

    # -- the table -----------------------------------------------------------------------------------------------

    def fill_table(self, by_group: Tensor, group_of: Tensor, steps: Tensor, active: Tensor, table: Tensor) -> None:
        """Make ``table`` [parameters, columns] fp32, on the device.

        ``by_group`` [coefficients, groups] float64; ``group_of`` [parameters] int32; ``steps`` [parameters] float64,
        this one counted; ``active`` [parameters] bool, whether it is updated.
        """
        self._as_kernel().fill_table(by_group, group_of, steps, active, table)

    def make_columns(self, given: Mapping[str, Tensor], steps: Tensor) -> Mapping[str, Tensor]:
        """Make the rule's own columns, [parameters] float64, of the ``given`` coefficients, [parameters] float64.

        ``steps``: [parameters] float64, updates of each parameter, this one counted; 0 where it never had one. Each is
        rounded once to fp32. Nothing may be read by the host.
        """
        return {name: given[name] for name in self.own_columns}

    def _as_kernel(self) -> zero_kernels.Rule:
        """Give this rule in the form of the kernel package's own, with a list of states in place of names."""
        names = tuple(t.name for t in self.tensors if t.name not in (master_of(self), *self.averages))

        def table(given: Mapping[str, Tensor], steps: Tensor) -> Mapping[str, Tensor]:
            sign = {"grad_factor": 1 - 2 * given["maximize"]} if "maximize" in given else {}
            return {**sign, **self.make_columns(given, steps)}

        def update(g: Tensor, p: Tensor, own: Sequence[Tensor], c: Mapping[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            state = dict(zip(names, own, strict=True))
            new, changed = self.update_rows(g, p.float(), state, c)
            return new, [{**state, **changed}[name] for name in names]

        return zero_kernels.Rule(self.name, names, self.coefficients, self.columns, table, update)

    # -- the update ----------------------------------------------------------------------------------------------

    def prepared(self: Rule) -> Rule:
        """This rule, for updates of the same shards: their tensors keep dtypes and sizes, and what was checked and
        prepared for the first update holds for the others. ``update`` is called on such a rule alone."""
        made = copy.copy(self)
        made._ema = zero_kernels.Prepared("ema")
        if self.compiled is not None:
            made.update_rows = torch.compile(self.update_rows, **self.compiled)  # type: ignore[method-assign]
        return made

    def update(self, shards: Sequence[ShardUpdate]) -> None:
        """Make one fused pass over each shard: unscale, clip, update, cast into the parameter.

        Parameters have one dtype, and gradients one. ``common`` is the same for all shards.
        """
        rule, codecs, master = self._as_kernel(), self.codecs, master_of(self)
        parts = {name: parts_of(codecs, StateTensor(name)) for name in rule.states}

        def update(
            g: Tensor, p: Tensor, stored: Sequence[Tensor], c: Mapping[str, Tensor]
        ) -> tuple[Tensor, list[Tensor]]:
            """Update some rows: decode their state before it, and encode it after."""
            given = iter(stored)
            own = {name: [next(given) for _ in of] for name, of in parts.items()}
            decoded = [codecs[name].decode(of) if name in codecs else of[0] for name, of in own.items()]
            new, changed = rule.update(g, p, decoded, c)
            encoded = [
                codecs[name].encode_in_update(value, c, number) if name in codecs else (value,)
                for number, (name, value) in enumerate(zip(rule.states, changed, strict=True))
            ]
            return new, [part for of in encoded for part in of]

        stored_master = None if master is None else parts_of(codecs, StateTensor(master))[0].name
        states = [part.name for of in parts.values() for part in of]
        zero_kernels.update_rows(update, rule.columns, *lists_of(shards, stored_master, states))

    def follow(self, shards: Sequence[ShardUpdate], rates: Tensor) -> None:
        """Move the averages towards the masters, which ``update`` has made. ``rates``: [parameters, averages] fp32, how
        far; 0: not at all."""
        masters, params = masters_of(self, shards)
        averages = [shard.state[name] for shard in shards for name in self.averages]
        self._ema(averages, masters, params, [shard.row_slot for shard in shards], rates)

    def before_joining(self, shard: ShardUpdate) -> Tensor:
        """Do the part of an update that comes before parameters are made whole. Returns the tensor to be made whole,
        [shard_numel] in ``joined_in``, along the shard."""
        raise NotImplementedError(f"{self.name} joins parts, and has no before_joining")

    def join(self, held: Sequence[Tensor], shards: Sequence[ToJoin]) -> None:
        """Collective. Make parameters whole, each on one rank, and send back what that rank makes of them, in place.

        ``held``: the result of ``before_joining`` for each of these shards, on the device.
        """
        raise NotImplementedError(f"{self.name} joins parts, and has no join")

    def after_joining(self, shard: ShardUpdate, to_join: ToJoin, joined: Tensor) -> None:
        """Do the rest of the update of this shard, with ``joined``, the result of ``join``."""
        raise NotImplementedError(f"{self.name} joins parts, and has no after_joining")

    def update_rows(
        self, g: Tensor, p: Tensor, state: Mapping[str, Tensor], c: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Give the new master and state of whole rows: the arithmetic, in torch, of a rule written in Python.

        Args:
            g: [rows, 128] fp32, the gradient, unscaled and clipped.
            p: [rows, 128] fp32, the master.
            state: by name, the other state: [rows, 128], or [rows, 1] of one value a row; in its own dtype.
            c: by name, the columns of the table, [rows, 1] fp32.

        Returns ``(p, state)``, of the same shapes. What is not in ``state`` stays.
        """
        raise NotImplementedError(f"{self.name} has neither update_rows nor update")


def masters_of(rule: UpdateRule, shards: Sequence[ShardUpdate]) -> tuple[list[Tensor], list[Tensor]]:
    """List the masters of shards, or their low halves, and the parameters that are their high halves; else nothing."""
    master = master_of(rule)
    stored = None if master is None else parts_of(rule.codecs, StateTensor(master))[0].name
    parameters = [shard.parameter for shard in shards]
    if stored is None or stored not in shards[0].state:
        return parameters, []
    masters = [shard.state[stored] for shard in shards]
    return masters, [] if masters[0].dtype.is_floating_point else parameters


def lists_of(shards: Sequence[ShardUpdate], master: str | None, states: Sequence[str]) -> tuple[Any, ...]:
    """List the arguments of ``update_rows`` behind the columns, in its order. ``master`` and ``states`` (the rule's
    own): names of stored tensors."""
    apart = master in shards[0].state  # else the parameters are their own masters
    return (
        [shard.grad for shard in shards],
        [shard.state[str(master)] if apart else shard.parameter for shard in shards],
        [shard.state[name] for shard in shards for name in states],
        [shard.parameter for shard in shards] if apart else [],
        [shard.row_slot for shard in shards],
        *shards[0].common,
        None if shards[0].row_keys is None else [shard.row_keys for shard in shards],
    )


def parts_of(codecs: Mapping[str, Codec], tensor: StateTensor) -> tuple[StateTensor, ...]:
    """List the stored tensors of ``tensor``: itself, where it has no codec."""
    return codecs[tensor.name].parts(tensor) if tensor.name in codecs else (tensor,)


def tensors_for(rule: UpdateRule, dtype: torch.dtype) -> list[StateTensor]:
    """List the logical state of parameters of ``dtype``."""
    return [tensor for tensor in rule.tensors if tensor.begins is not Begins.PARAMETER or tensor.dtype != dtype]


def stored_for(rule: UpdateRule, dtype: torch.dtype) -> list[StateTensor]:
    """List the stored state of parameters of ``dtype``."""
    return [part for tensor in tensors_for(rule, dtype) for part in parts_of(rule.codecs, tensor)]


def exported_for(rule: UpdateRule, dtype: torch.dtype) -> list[StateTensor]:
    """List the tensors that a state dict has of parameters of ``dtype``: the stored ones, but for a split master, which
    is joined."""
    exported: list[StateTensor] = []
    for tensor in tensors_for(rule, dtype):
        codec = rule.codecs.get(tensor.name)
        exported += [tensor] if codec is None or codec.reads_parameter else codec.parts(tensor)
    return exported


def stored_names(rule: UpdateRule) -> list[str]:
    """List the names of all stored state."""
    return [part.name for tensor in rule.tensors for part in parts_of(rule.codecs, tensor)]


def has_master(rule: UpdateRule, dtype: torch.dtype) -> bool:
    """True if parameters of ``dtype`` have a more precise copy in the state that is whole without them."""
    tensors = (tensor for tensor in tensors_for(rule, dtype) if tensor.begins is Begins.PARAMETER)
    return any(tensor.name not in rule.codecs for tensor in tensors)


def master_of(rule: UpdateRule) -> str | None:
    """Find the name of the master, of which parameters are roundings. None: there is none."""
    return next((tensor.name for tensor in rule.tensors if tensor.begins is Begins.PARAMETER), None)
