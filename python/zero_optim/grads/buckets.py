"""All buckets of an optimizer: which parameters are in one bucket, and where each is now.

At stages 0 to 2 a bucket has as many parameters as fit into it, at stage 3 those of a unit.
"""

from __future__ import annotations

import gc
import itertools
import operator
import warnings
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..comm.sharding import Sharding, whole_of
from ..errors import ParameterError
from ..params.flat_params import FlatParams
from ..params.layout import BucketLayout, LayoutPolicy, bucket_capacities, build_layout
from ..params.parameter_set import Shardings
from ..params.storage_order import described
from ..params.tensor_slice import is_cut, local_of, room_of
from ..rules.group_rules import GroupRules
from ..rules.update_rule import UpdateRule
from ..units.sharded_model import ShardedModel
from .bucket import Bucket
from .slots import GradState

MakeBuckets = Callable[[Sequence[int], Sequence[int]], list[Bucket]]


class Buckets:
    """The layout of the gradients, and what is kept for every slot of it.

    Args:
        labels: a name for each parameter, for messages; it grows.
        make: builds the buckets for an order; parameters become views of them. Its second argument is
            all parameters that are laid out by then, these included: they set the size of the buckets.

    Attributes:
        order: indices of the parameters, in the order of their slots.
        parts: the same, those together that were laid out at once. No bucket has parameters of two parts.
        all: the buckets, in the order in which they are launched.
        slot_of: by parameter: its bucket, the bucket's number, and the number of its slot there.
        slot_params: [slots] int64, the index of the parameter of each slot, bucket by bucket.
        nonfinite: [slots] int32, in the order of ``slot_params``: whether this rank's last gradient was not finite.
        refused: by parameter, why this rank could not use a gradient. The next step raises, whatever the layout is.
    """

    def __init__(self, labels: Sequence[str], sharding: Sharding, make: MakeBuckets) -> None:
        self._labels, self._sharding, self._make = labels, sharding, make
        self._in_place: set[int] = set()  # buckets whose parameters were found in place in this backward
        self.refused: dict[int, str] = {}
        self.parts: list[list[int]] = []
        self.all: list[Bucket] = []

    @property
    def order(self) -> list[int]:
        return [index for part in self.parts for index in part]

    def use(self, parts: Sequence[Sequence[int]], buckets: Sequence[Bucket]) -> None:
        """Use these buckets from now on. Their gradients stay where they are."""
        for bucket in self.all:  # ``release_parameters`` leaves them their arrivals
            bucket.arrivals.wait()
        self.parts, self.all = [list(part) for part in parts if part], list(buckets)
        device = self._sharding.device
        slots = [slot for bucket in buckets for slot in bucket.layout.slots]
        self.slot_params = torch.tensor([slot.param for slot in slots], dtype=torch.int64, device=device)
        self.nonfinite = torch.zeros(len(slots), dtype=torch.int32, device=device)
        for bucket, flags in zip(buckets, self.nonfinite.split([len(b.params) for b in buckets]), strict=True):
            bucket.packing.nonfinite, bucket.packing.refused = flags, self.refused
        self.slot_of = {
            slot.param: (bucket, number, index)
            for number, bucket in enumerate(self.all)
            for index, slot in enumerate(bucket.layout.slots)
        }
        self._used_of, self._used_now = (0, b""), bytearray()

    def grow(self, indices: Sequence[int]) -> list[Bucket]:
        """Take in parameters, in buckets after all others. Returns the new ones."""
        order = list(reversed(indices))
        new = self._make(order, [*self.order, *order])
        self.use([*self.parts, order], [*self.all, *new])
        return new

    def lay_out(self, *parts: Sequence[int]) -> None:
        """Build all buckets for ``parts``. Collective where there are reduced gradients, which move along."""
        for bucket in self.all:
            bucket.arrivals.wait()
            bucket.unsharding.wait()
        reduced = [bucket for bucket in self.all if bucket.state is GradState.REDUCED]
        device = self._sharding.device
        marks = torch.zeros(len(self._labels), dtype=torch.int32, device=device)
        marks[self.slot_params] = self.nonfinite
        terms = {bucket.layout.slots[index].param for bucket in self.all for index in bucket.packing.terms}
        for bucket in self.all:
            bucket.release_parameters()
        with self._sharding.world.raising_together("laying out the buckets", device):  # memory may be lacking
            upto = itertools.accumulate(map(list, parts), operator.add)
            self.use(parts, [bucket for part, of in zip(parts, upto, strict=True) for bucket in self._make(part, of)])
        self.nonfinite.copy_(marks[self.slot_params])
        for param in terms & self.slot_of.keys():
            bucket, _, index = self.slot_of[param]
            bucket.packing.terms.add(index)
        for bucket in self.all if reduced else ():  # each may receive gradients of any old bucket
            bucket.make_room()
        while reduced:  # one bucket at a time: whole gradients take memory
            self._move_gradients(reduced.pop(0))

    def _move_gradients(self, old: Bucket) -> None:
        """Collective. Copy this rank's part of every reduced gradient in ``old`` into the bucket that has it now."""
        held = old.grad_shard if old.sharding.shard_count > 1 else old.grad_buffer
        full = whole_of(old.sharding, held, "construction")
        handles = old.shown.reduced()
        for slot, parameter, handle, used in zip(old.layout.slots, old.params, handles, old.slots.used, strict=True):
            bucket, _, index = self.slot_of[slot.param]
            whole = full.narrow(0, slot.offset, slot.numel)
            # Another gradient that the user has put there since stays.
            bucket.take_over(index, whole, shown=parameter.grad is handle, used=bool(used))

    # -- checks of the parameters ----------------------------------------------------------------------------------

    def backward_begins(self) -> None:
        self._in_place.clear()
        for bucket in self.all:
            bucket.slots.touched.clear()  # if the last backward has raised: writes since then are the user's

    def check_in_place(self, number: int) -> None:
        """Check once a backward that the parameters of bucket ``number`` are views of it, unless it is sharded."""
        bucket = self.all[number]
        if number in self._in_place or (bucket.flat.sharded and not bucket.flat.shown):
            return
        if (moved := bucket.flat.first_moved()) is not None:
            self._raise_moved(bucket, moved)
        self._in_place.add(number)

    def check_not_cast(self) -> None:
        """Check in ``step`` that no parameter was cast after the last backward."""
        for bucket in self.all:
            if not bucket.flat.sharded and (cast := bucket.flat.first_cast()) is not None:
                self._raise_moved(bucket, cast)

    def _raise_moved(self, bucket: Bucket, slot: int) -> NoReturn:
        if self._sharding.reduces:  # a client that moves a model and wraps it in DDP needs the message on DDP first
            self.check_not_in_ddp()
        parameter = bucket.params[slot]
        raise ParameterError(
            f"{bucket.label(slot)} was moved, cast, or given another shape or memory format after the optimizer "
            f"was made (it is {described(parameter)} on {parameter.device}): call .to() / .half() before, or make "
            "a new optimizer"
        )

    def check_not_in_ddp(self) -> None:
        """Raise ParameterError where a live ``DistributedDataParallel`` holds one of the parameters."""
        # It reduces the gradients a second time, and torch does not show that from outside: at stage 0 the result is
        # wrong without any error. Clients wrap models on their own. So a walk over the interpreter's objects finds it.
        labels = {id(p): bucket.label(slot) for bucket in self.all for slot, p in enumerate(bucket.params)}
        found = _in_ddp(labels)
        if found:
            gc.collect()  # a wrapper that was dropped may wait in a cycle
            found = _in_ddp(labels)
        if found:
            raise ParameterError(
                f"{found[0]} is in a DistributedDataParallel module, which would reduce its gradient a second time: "
                "train the bare model; the optimizer averages gradients over ranks itself. Clients need not wrap: "
                "zero_optim.integrations has ShardedTrainer (transformers) in place of Trainer, prepare (accelerate) "
                "and ShardedStrategy (lightning)"
            )

    def used(self) -> bytearray:
        """One byte a parameter index: 1 where this rank has put a gradient for it into its bucket."""
        slots = b"".join(bucket.slots.used for bucket in self.all)
        if (len(self._labels), slots) != self._used_of:  # as a rule the same set, step after step
            self._used_of = len(self._labels), slots
            self._used_now = bytearray(len(self._labels))
            for index, flag in zip(self.slot_of, slots, strict=True):
                self._used_now[index] = flag
        return self._used_now


def _in_ddp(labels: Mapping[int, str]) -> list[str]:
    """List the ``labels`` of parameters, by ``id``, that a ``DistributedDataParallel`` module of the process has."""
    # type(), not isinstance: that asks lazy objects for their __class__, and loads them. A class is looked up in a set:
    # issubclass takes three times as long, 0.25 s for 420,000 objects (EPYC).
    kinds = _with_subclasses(DistributedDataParallel)
    modules = [thing for thing in gc.get_objects() if type(thing) in kinds]
    return [labels[id(p)] for module in modules for p in module.parameters() if id(p) in labels]


def _with_subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))


@dataclass(frozen=True)
class BucketKind:
    """The properties that all parameters of a bucket have in common. So whether they count in a norm goes by bucket.

    Attributes:
        cut: whether the tensor-parallel ranks have a slice each.
        sharding: the ranks that shard or replicate their state.
        rule: which updates them.
    """

    dtype: torch.dtype
    cut: bool
    sharding: Sharding
    rule: UpdateRule


def buckets_by_size(
    parameters: Mapping[int, Tensor],
    labels: Sequence[str],
    shardings: Shardings,
    rules: GroupRules,
    bucket_cap_mb: float | None,
    order: Sequence[int],
    upto: Sequence[int],
) -> list[Bucket]:
    """Build buckets for ``order``, as large as all parameters ``upto`` then allow."""
    known = {index: parameters[index] for index in upto}
    kinds: dict[int, BucketKind] = {}
    made: dict[tuple[object, ...], BucketKind] = {}
    for index, parameter in known.items():
        own = parameter.dtype, is_cut(parameter), shardings.of(index), rules.of(index)
        key = (*own[:2], *map(id, own[2:]))  # a sharding and a rule take long to hash
        kinds[index] = made.get(key) or made.setdefault(key, BucketKind(*own))
    rooms = {index: room_of(parameter) for index, parameter in known.items()}
    numels = {index: local_of(parameter).numel() for index, parameter in known.items()}
    costs = {index: kinds[index].rule.cost(tuple(parameter.shape)) for index, parameter in known.items()}
    buckets = []
    laid_out = layouts_by_size(rooms, kinds, bucket_cap_mb, order, costs)
    warn_of_padding(laid_out)
    for of, kind in laid_out:
        layout = of.holding(numels)
        flat = FlatParams(layout, [parameters[slot.param] for slot in layout.slots], kind.sharding)
        buckets.append(Bucket(layout, flat, labels, kind.sharding))
    return buckets


def layouts_by_size(
    numels: Mapping[int, int],
    kinds: Mapping[int, BucketKind],
    bucket_cap_mb: float | None,
    order: Sequence[int],
    costs: Mapping[int, int],
) -> list[tuple[BucketLayout, BucketKind]]:
    """Lay out parameters by index: as many in a bucket as fit. ``costs``: see ``build_layout``."""
    cap_bytes = None if bucket_cap_mb is None else bucket_cap_mb * 2**20
    # Numbers stand for the kinds, which take long to hash and to compare: one object serves many parameters.
    distinct = {id(kind): kind for kind in kinds.values()}
    every = list(dict.fromkeys(distinct.values()))
    number_of = {key: every.index(kind) for key, kind in distinct.items()}
    numbers = {index: number_of[id(kind)] for index, kind in kinds.items()}
    policies: dict[Hashable, LayoutPolicy] = {number: kind.rule.layout for number, kind in enumerate(every)}
    found: list[BucketLayout] = []
    for sharding in dict.fromkeys(kind.sharding for kind in every):
        of_sharding = {number: kind.dtype for number, kind in enumerate(every) if kind.sharding == sharding}
        own = {index: number for index, number in numbers.items() if number in of_sharding}
        itemsizes = {number: sharding.reduce_dtype(dtype).itemsize for number, dtype in of_sharding.items()}
        shards, on_cpu = sharding.shard_count, sharding.device.type == "cpu"
        capacities = bucket_capacities(numels, own, cap_bytes, itemsizes, shards, on_cpu=on_cpu)
        placed = [index for index in order if index in own]
        found += build_layout(numels, own, placed, capacities, shards, policies, costs)
    place = {index: number for number, index in enumerate(order)}
    found.sort(key=lambda layout: max(place[slot.param] for slot in layout.slots))
    return [(layout, kinds[layout.slots[0].param]) for layout in found]


MUCH_PADDING, MANY_BYTES = 0.25, 2**26
"""Padding is warned of if it is more than this fraction of the parameters, and more than this many bytes."""


def warn_of_padding(laid_out: Sequence[tuple[BucketLayout, BucketKind]]) -> None:
    """Warn where the parameters that no rank cuts are too few for their shard group."""
    # Before memory is taken for them: it may not be enough.
    whole = [(layout, kind) for layout, kind in laid_out if not kind.rule.layout.cuts]
    for sharding in dict.fromkeys(kind.sharding for _, kind in whole):
        of_sharding = [(layout, kind) for layout, kind in whole if kind.sharding == sharding]
        slots = [slot for layout, _ in of_sharding for slot in layout.slots]
        taken = sum(slot.numel for slot in slots)
        padding = sum(layout.numel for layout, _ in of_sharding) - taken
        nbytes = padding * of_sharding[0][1].dtype.itemsize
        if padding > MUCH_PADDING * taken and nbytes > MANY_BYTES and sharding.world.rank == 0:
            rule = of_sharding[0][1].rule.name
            warnings.warn(
                f"{rule}: {sharding.shard_count} ranks shard few matrices ({len(slots)}), and cut none. So there is "
                f"{padding / taken:.0%} of padding in their buckets, {nbytes:,} bytes on each rank. Take stage=3, or "
                "a mesh of two dimensions, with smaller shard groups (docs/parallelism.md)",
                stacklevel=2,
            )


def buffer_nbytes(buckets: Iterable[tuple[int, torch.dtype]], sharding: Sharding) -> int:
    """Count the bytes of a buffer for any of these ``buckets``, each by its elements and dtype."""
    sizes = (numel * sharding.reduce_dtype(dtype).itemsize for numel, dtype in buckets)
    return max(sizes, default=0) if sharding.reduces else 0


def buckets_of_units(
    sharded: ShardedModel,
    parameters: Mapping[int, Tensor],
    labels: Sequence[str],
    shardings: Shardings,
    rules: GroupRules,
    order: Sequence[int],
    upto: Sequence[int],
) -> list[Bucket]:
    index_of = {id(parameters[index]): index for index in order}
    wanted = {key: (rules.of(index), shardings.of(index).grad_divisor) for key, index in index_of.items()}
    flats = sharded.flats_to_train(wanted)
    buckets = []
    for flat in flats:
        indices = [index_of[id(parameter)] for parameter in flat.params]
        sharding = shardings.of(indices[0])
        layout = replace(flat.layout.renumbered(indices), shards=sharding.shard_count)  # of state
        buckets.append(Bucket(layout, flat, labels, sharding))
    return buckets
