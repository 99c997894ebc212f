"""Moves an optimizer's memory off the device, for something else that wants the device, and brings it back.

::

    sleep   settle ── drop gradients ── copy everything out ── have all ranks done it? ── free ── ASLEEP
    wake    take memory, copy everything in ── have all ranks done it? ── show the parameters ── OWN

Memory is freed only when every rank has its copies, and a rank that cannot wake has all of them free it again. So a
failure leaves every rank as it was. Storages are emptied and filled in place: tensors that view them stay valid.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .comm.sharding import Sharding
from .comm.streams import allocate, bytes_of, deallocate, is_there, on_device
from .comm.together import check_same
from .errors import GradientError, OutOfMemoryError, ParameterError, ZeroOptimError
from .grads.reducer import Reducer
from .mode import ASLEEP, CurrentMode, Mode
from .params.flat_params import FlatParams
from .params.layout import round_up
from .params.parameter_set import ParameterSet
from .step.telemetry import Measured
from .stores.host_memory import ALIGNMENT, HostMemory, Mark
from .stores.state_store import StateStore
from .units.sharded_model import ShardedModel

MOVES_STORAGES = hasattr(torch.UntypedStorage, "_swap_data_ptr_")  # so that parameters can sleep at stages 0 to 2


class Rest:
    """One run of host memory, pinned where a GPU copies, in which tensors lie one after another."""

    def __init__(self, device: torch.device) -> None:
        self._device, self.memory = device, HostMemory(pinned=device.type == "cuda", device=device)
        self._run = self.memory.take(0)
        self._places: list[Tensor] = []  # [bytes] uint8 each, of what was saved

    def save(self, flats: Sequence[Tensor]) -> None:
        """Copy all ``flats``, in place of what was saved before. Raises OffloadError; ``flats`` are not changed."""
        rooms = [round_up(flat.nbytes, ALIGNMENT) for flat in flats]
        if self._run.nbytes < sum(rooms):
            self.close()  # before more is taken: host memory need not hold both
            self._run = self.memory.take(sum(rooms))
        parts = self._run[: sum(rooms)].split(rooms)
        self._places = [part[: flat.nbytes] for part, flat in zip(parts, flats, strict=True)]
        self._copy(zip(self._places, flats, strict=True))

    def load(self, flats: Iterable[Tensor]) -> None:
        """Copy the first saved tensors into ``flats``, of the sizes saved. Each copy runs while ``flats`` makes the
        next, or ends."""
        self._copy(zip(flats, self._places, strict=False))

    def _copy(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        over = Mark(self._device)
        try:
            for target, source in pairs:  # on the current stream: earlier work of the device may use the memory
                target.copy_(source, non_blocking=True)
        finally:
            over.set()
            over.wait()  # the memory of the sources is freed next; after an error that of the targets

    def close(self) -> None:
        """Give everything back."""
        self.memory.give_back(self._run)
        self._run, self._places = self.memory.take(0), []  # a slab goes back to the system with its last view
        self.memory.trim()


class Asleep:
    """The memory that one optimizer has put to rest. Its mode says whether it sleeps."""

    def __init__(
        self,
        mode: CurrentMode,
        parameters: ParameterSet,
        sharding: Sharding,
        reducer: Reducer,
        store: StateStore,
        sharded_model: ShardedModel | None,
        measured: Measured | None,
    ) -> None:
        self._mode, self._parameters, self._sharding = mode, parameters, sharding
        self._reducer, self._store, self._sharded_model, self._measured = reducer, store, sharded_model, measured
        self.rest = Rest(sharding.device)  # kept for the next sleep
        self._moved: list[Tensor] = []  # [bytes] uint8 each, those of ``flats`` first
        self.flats: list[FlatParams] = []  # the parameters that are asleep; empty where they stay awake
        self._forwards: Any = None  # the handle of the hook that refuses forwards

    # -- to sleep ------------------------------------------------------------------------------------------------

    def check(self, *, parameters: bool) -> None:
        """Collective. Raise where a sleep would lose something."""
        check_same(self._sharding.world, [f"sleep(parameters={parameters})"], "sleep", "give sleep")
        with self._sharding.world.raising_together("sleep"):
            if unapplied := self._reducer.unapplied():
                others = f" and {len(unapplied) - 1} others" if len(unapplied) > 1 else ""
                raise GradientError(
                    f"sleep would lose the gradients of {unapplied[0]}{others}, which no step has applied: call "
                    "opt.step(), or opt.zero_grad(), before"
                )
            if self._sharded_model is not None:
                self._sharded_model.schedule.check_not_gathered("sleep")
            plain = [flat for flat in self._flats_there() if not flat.sharded] if parameters else []
            if plain and not MOVES_STORAGES:
                raise ZeroOptimError(
                    f"sleep(parameters=True) at stages 0 to 2 needs torch 2.13, not {torch.__version__}"
                )
            # Where a parameter is no view of its flat tensor any more, its memory would not be freed.
            moved = {id(flat.params[number]) for flat in plain for number in flat.elsewhere()}
            for index, parameter in enumerate(self._parameters.all):
                if id(parameter) in moved:
                    raise ParameterError(
                        f"{self._parameters.name(index)} was moved, cast or given new data after the optimizer was "
                        "made: sleep cannot take it along. Write into it instead, or make a new optimizer"
                    )

    def sleep(self, *, parameters: bool) -> None:
        """Collective. Save everything, and free it. The caller has dropped all gradients, and nothing is in flight."""
        flats = self._flats_there() if parameters else []
        with self._sharding.world.raising_together("sleep"):
            for bucket in self._reducer.buckets:
                bucket.leave_memory()
            held = map(bytes_of, filter(is_there, [*map(_memory_of, flats), *self._store.residents()]))
            moved = [*{memory.data_ptr(): memory for memory in held}.values()]  # each storage once
            self.rest.save(moved)
        # Every rank has its copies now.
        self._moved, self.flats = moved, flats
        for flat in self._plain_flats:
            flat.put_away()
        self._free()
        if asleep := {id(parameter) for flat in self._plain_flats for parameter in flat.params}:
            self._forwards = register_module_forward_pre_hook(_refuser(asleep))
        if flats and self._sharded_model is not None:
            self._sharded_model.schedule.sleeping.add(self)
        self._mode.now = Mode.ASLEEP

    def _flats_there(self) -> list[FlatParams]:
        """List the flat parameters on the device that are trained; at stage 3 also the others."""
        flats = [bucket.flat for bucket in self._reducer.buckets]
        units = [] if self._sharded_model is None else self._sharded_model.units
        flats += [flat for unit in units for flat in unit.flats if not flat.trained]
        return [flat for flat in dict.fromkeys(flats) if not flat.offloaded and is_there(_memory_of(flat))]

    @property
    def _plain_flats(self) -> list[FlatParams]:
        """The flat tensors whose parameters are views of them all the time; others are gathered before."""
        return [flat for flat in self.flats if not flat.sharded]

    def _free(self) -> None:
        for tensor in (*self._moved, *self._reducer.main_grads.values()):
            deallocate(tensor)
        for bucket in self._reducer.buckets:
            deallocate(bucket.grad_buffer)
        self._reducer.rounds.buffers.deallocate()
        self._store.drop_frames()
        if self._measured is not None:
            self._measured.free()
        if (device := self._sharding.device).type == "cuda":
            with on_device(device):
                torch.cuda.empty_cache()  # other processes are to have it

    # -- awake again -----------------------------------------------------------------------------------------------

    def wake(self) -> None:
        """Collective. See ``ShardedOptimizer.wake``."""
        if self._mode.now is not Mode.ASLEEP:
            return
        try:
            with self._sharding.world.raising_together("wake"):
                self._load()
        except BaseException:
            self._free()
            raise
        self._show_parameters()
        self._moved = []
        self._mode.now = Mode.OWN

    def _load(self) -> None:
        try:
            self.rest.load(self._take_memory())
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"wake needs {sum(tensor.nbytes for tensor in self._moved):,} bytes on {self._sharding.device}, and "
                f"some for gradients: {str(error).splitlines()[0]}. It is still asleep: free what uses the device, and "
                "call opt.wake() again"
            ) from error

    def _take_memory(self) -> Iterator[Tensor]:
        """Allocate everything. Yields what is to be copied in, as soon as it has memory."""
        yield from map(allocate, self._moved)
        unsharded = [bucket for bucket in self._reducer.buckets if not bucket.flat.sharded]  # others as gradients come
        for tensor in (*(bucket.grad_buffer for bucket in unsharded), *self._reducer.main_grads.values()):
            allocate(tensor).zero_()
        if self._sharded_model is None:  # else they have memory while gradients are reduced
            self._reducer.rounds.buffers.reallocate()
        self._store.make_frames()

    def _show_parameters(self) -> None:
        for flat in self._plain_flats:
            flat.bring_back()
        if self._forwards is not None:
            self._forwards.remove()
            self._forwards = None
        if self._sharded_model is not None:
            self._sharded_model.schedule.sleeping.discard(self)
        self.flats = []

    def close(self) -> None:
        """Give everything back. Parameters that are asleep come back: raises where that fails."""
        try:
            if self._mode.now is Mode.ASLEEP and self.flats:
                self.rest.load(map(allocate, self._moved[: len(self.flats)]))
                self._show_parameters()
        finally:
            self.rest.close()
            self._moved = []
            self._mode.now = Mode.OWN


def _memory_of(flat: FlatParams) -> Tensor:
    return flat.shard if flat.sharded else flat.full


def _refuser(asleep: Container[int]) -> Callable[[nn.Module, Any], None]:
    """Make a hook that refuses forwards of modules with sleeping parameters. ``asleep``: their ids."""

    def refuse(module: nn.Module, arguments: Any) -> None:
        for name, parameter in module._parameters.items():
            if id(parameter) in asleep:
                raise ZeroOptimError(f"the forward of {type(module).__name__} reads {name}: {ASLEEP}")

    return refuse
