"""The fp32 state of every bucket's shard: master, exp_avg, exp_avg_sq. Who updates it, moves it, saves it."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.state_dict import state_tensor
from ..comm.sharding import Sharding
from ..errors import StateMismatchError
from ..grads.bucket import Bucket
from ..params.flat_shard import FlatShard
from ..params.layout import SlotPiece

_version_of = operator.attrgetter("_version")


class ShardState:
    """State of one bucket's shard.

    Attributes:
        master: [shard_numel] fp32; None for fp32 parameters, which are their own master.
        exp_avg, exp_avg_sq: [shard_numel] fp32.
        row_slot: [shard_numel / ROW] int32, the parameter index of each row; -1 for padding.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket
        numel, device = bucket.layout.shard_numel, bucket.device
        self.master = None if bucket.dtype == torch.float32 else bucket.param_shard.float()
        self.exp_avg = torch.zeros(numel, dtype=torch.float32, device=device)
        self.exp_avg_sq = torch.zeros(numel, dtype=torch.float32, device=device)
        rows = bucket.layout.row_slot(bucket.sharding.shard)
        self.row_slot = torch.tensor(rows, dtype=torch.int32, device=device)

    def tensors(self) -> dict[str, Tensor]:
        named = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def update(self, hyper: Tensor, grad_scale: Tensor | None, found_inf: Tensor | None, marks: Tensor) -> None:
        """One fused pass: unscale, clip, update, cast into the bucket's parameters.

        ``hyper`` [parameters, columns]; ``marks`` [parameters] int32 get 1 where a skipped gradient is not finite.
        """
        bucket = self.bucket
        master, param_out = (bucket.param_shard, None) if self.master is None else (self.master, bucket.param_shard)
        torch.ops.zero_kernels.adam_step(
            bucket.grad_shard,
            master,
            self.exp_avg,
            self.exp_avg_sq,
            param_out,
            self.row_slot,
            hyper,
            grad_scale,
            found_inf,
            marks,
        )

    def refresh_master(self, index: int) -> None:
        """Take over what a user wrote into the parameter of slot ``index``; the rest keeps its precision."""
        if self.master is None:
            return
        piece = self.bucket.pieces[index]
        master = self.master.narrow(0, piece.in_shard, piece.numel)
        parameter = self.bucket.param_shard.narrow(0, piece.in_shard, piece.numel)
        master.copy_(torch.where(master.to(parameter.dtype) == parameter, master, parameter.float()))


class OptimizerState:
    """The shard states of all buckets, and the version of each parameter that the masters were last made from.

    Args:
        parameters: all trained parameters, by index.
    """

    def __init__(self, parameters: Mapping[int, Tensor], sharding: Sharding) -> None:
        self.parameters, self.sharding = parameters, sharding
        self.shards: list[ShardState] = []
        self.started = False  # whether exp_avg and exp_avg_sq may differ from zero
        self._all: list[Tensor] = []
        self._mastered: dict[int, Tensor] = {}  # those that have a master beside them
        self._versions: list[int] = []  # of these

    def grow(self, buckets: Sequence[Bucket]) -> None:
        """Make state for new buckets, whose parameters come last in ``parameters``."""
        self.refresh_edited()
        self.shards += [ShardState(bucket) for bucket in buckets]
        self.record_versions()

    # -- edits of parameters -------------------------------------------------------------------------------------

    def record_versions(self) -> None:
        self._all = list(self.parameters.values())
        self._mastered = {index: p for index, p in self.parameters.items() if p.dtype != torch.float32}
        self._versions = list(map(_version_of, self._mastered.values()))

    def refresh_edited(self) -> None:
        """Refresh the masters of parameters written in place since the last update, as their version counters tell."""
        versions = list(map(_version_of, self._mastered.values()))
        if versions != self._versions:
            pairs = zip(self._mastered, versions, self._versions, strict=True)
            self.refresh_masters({index for index, now, before in pairs if now != before})
            self._versions = versions

    def refresh_masters(self, indices: set[int]) -> None:
        for shard in self.shards:
            for number, slot in enumerate(shard.bucket.layout.slots):
                if slot.param in indices:
                    shard.refresh_master(number)

    def mark_updated(self) -> None:
        """Tell autograd that the parameters were written: a backward through a graph older than this must raise."""
        self.started = True
        torch.autograd.graph.increment_version(self._all)
        self._versions = [version + 1 for version in self._versions]

    # -- another layout ------------------------------------------------------------------------------------------

    def lay_out(self, buckets: Sequence[Bucket]) -> None:
        """Follow the parameters into new buckets. State that was started moves over, one old bucket at a time."""
        old, self.shards = self.shards if self.started else [], []
        self.shards = [ShardState(bucket) for bucket in buckets]
        places = {piece.slot.param: (shard.tensors(), piece) for shard in self.shards for piece in shard.bucket.pieces}
        for shard in old:
            for name, tensor in shard.tensors().items():
                full = self.sharding.gathered(tensor, "construction")
                for slot in shard.bucket.layout.slots:
                    tensors, piece = places[slot.param]
                    source = full.narrow(0, slot.offset + piece.in_param, piece.numel)
                    tensors[name].narrow(0, piece.in_shard, piece.numel).copy_(source)

    # -- state dicts ---------------------------------------------------------------------------------------------

    def _slots(self) -> Iterator[tuple[int, dict[str, Tensor]]]:
        """Every parameter's state, and itself as ``parameter``, in the order of the layout.

        Plain views where this rank holds all of it, else shards.
        """
        for shard in self.shards:
            bucket = shard.bucket
            views: dict[str, Sequence[Tensor]] = {}
            for name, tensor in {**shard.tensors(), "parameter": bucket.param_shard}.items():
                shards = bucket.shard_views(tensor, name)
                whole = self.sharding.shards == 1
                views[name] = [s.local.view(s.shape) for s in shards] if whole else shards
            for number, slot in enumerate(bucket.layout.slots):
                yield slot.param, {name: of_slot[number] for name, of_slot in views.items()}

    def export(self) -> dict[int, dict[str, Tensor]]:
        """State by parameter index. Tensors are views of live state; the order of the keys is that of the layout."""
        self.refresh_edited()
        state = dict(self._slots())
        for tensors in state.values():
            del tensors["parameter"]
        return state

    def plan_load(self, saved: Mapping[int, Mapping[str, Any]], labels: Sequence[str]) -> list[tuple[Tensor, Tensor]]:
        """(target, source) pairs that bring in state by parameter index. Nothing is written yet.

        Shards must cut parameters where this layout does; full tensors always fit. A master that was not saved comes
        from the parameter. Raises StateMismatchError.
        """
        copies = []
        for index, tensors in self._slots():
            parameter = tensors.pop("parameter")
            for name, target in tensors.items() if index in saved else ():
                unsaved = name == "master" and name not in saved[index]
                copies.append((target, parameter if unsaved else _source(saved[index], name, target, labels[index])))
        return copies

    def load(self, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Carry out a planned load."""
        for target, source in copies:
            _local(target).copy_(_local(source))
        self._distrust_masters()

    def restart(self, indices: set[int]) -> None:
        """Make the state of these parameters what it is at construction."""
        for shard, piece in self._pieces(indices):
            for tensor in (shard.exp_avg, shard.exp_avg_sq):
                tensor.narrow(0, piece.in_shard, piece.numel).zero_()
        self.restart_masters(indices)

    def restart_masters(self, indices: set[int]) -> None:
        for shard, piece in self._pieces(indices):
            if shard.master is not None:
                parameter = shard.bucket.param_shard.narrow(0, piece.in_shard, piece.numel)
                shard.master.narrow(0, piece.in_shard, piece.numel).copy_(parameter)

    def gathered(self) -> Iterator[tuple[int, str, Tensor]]:
        """Collective. Every parameter's whole tensors, flat, by index and name: those of one bucket at a time."""
        self.refresh_edited()
        for shard in self.shards:
            for name, tensor in shard.tensors().items():
                full = self.sharding.gathered(tensor, "state")
                for slot in shard.bucket.layout.slots:
                    yield slot.param, name, full.narrow(0, slot.offset, slot.numel)

    def distribute(self, names: Mapping[int, Sequence[str]], tensors: Mapping[int, Mapping[str, Tensor]]) -> None:
        """Collective. Take over whole tensors that rank 0 has, those of one bucket at a time.

        Args:
            names: by parameter index, the tensors that are given; the same on every rank.
            tensors: on rank 0, they themselves.
        """
        for shard in self.shards:
            for name, target in shard.tensors().items():
                given = [piece for piece in shard.bucket.pieces if name in names.get(piece.slot.param, ())]
                if not given:
                    continue
                full = target.new_empty(shard.bucket.layout.numel)
                for slot in (piece.slot for piece in given) if self.sharding.rank == 0 else ():
                    full.narrow(0, slot.offset, slot.numel).copy_(tensors[slot.param][name].reshape(-1))
                self.sharding.broadcast(full, "state")
                for piece in given:
                    source = full.narrow(0, piece.slot.offset + piece.in_param, piece.numel)
                    target.narrow(0, piece.in_shard, piece.numel).copy_(source)
        self._distrust_masters()

    def _pieces(self, indices: set[int]) -> Iterator[tuple[ShardState, SlotPiece]]:
        for shard in self.shards:
            for piece in shard.bucket.pieces:
                if piece.slot.param in indices:
                    yield shard, piece

    def _distrust_masters(self) -> None:
        """State was loaded. The next step takes masters from parameters where they do not round to them: the model may
        be loaded later, and a master may be older than the parameters, when another optimizer carried it along."""
        self.started = True
        self._versions = [-1] * len(self._versions)


def _local(tensor: Tensor) -> Tensor:
    return tensor.local if isinstance(tensor, FlatShard) else tensor


def _describe(tensor: Tensor) -> str:
    return repr(tensor) if isinstance(tensor, FlatShard) else f"a whole tensor of shape {tuple(tensor.shape)}"


def _source(entry: Mapping[str, Any], name: str, target: Tensor, label: str) -> Tensor:
    """The part of ``entry[name]`` that belongs into ``target``."""
    saved = state_tensor(entry, name, target.shape, label)
    if isinstance(target, FlatShard):
        if not isinstance(saved, FlatShard):
            return saved.reshape(-1).narrow(0, target.start, target.local.numel())
        if (saved.start, saved.local.numel()) == (target.start, target.local.numel()):
            return saved
    elif not isinstance(saved, FlatShard):
        return saved
    raise StateMismatchError(
        f"{name} of {label} was saved as {_describe(saved)}, this rank needs {_describe(target)}: load it with as many "
        "ranks, on the same rank, at the same stage, bucket_cap_mb and grad_reduce_dtype as it was saved; or save "
        "zero_optim.full_state_dict(opt), which loads anywhere"
    )
