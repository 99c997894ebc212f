"""The words of a program's text: optimizers over parameters of their own, and what is done with them.

``Words(library, ...)`` runs them on ``zero_optim`` or on ``plain``, which has the same names. All ranks run the same
text; what differs between them is written out, one chain of links for each rank. A chain is a backward: ``x = link(x)``
from its first link to its last, and backward goes through it from the last to the first. The gradient of ``use(a, 0,
c)`` is ``c`` times a pattern of numbers that are exact in every dtype.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import zero_optim
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from training_cases import Planned, debugging
from training_cases import raise_in_backward as boom

from random_programs import plain

RULES: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("AdamW", {"eps": 0.25}),
    "amsgrad": ("AdamW", {"eps": 0.25, "amsgrad": True}),
    "nesterov": ("SGD", {"momentum": 0.5, "nesterov": True}),
    "sgd": ("SGD", {}),
    "lion": ("Lion", {}),
    "muon": ("Muon", {"momentum": 0.5, "ns_gram": False}),
}
WHOLE, NO_DTENSOR = -1, -2  # of ``cut``: a DTensor that both ranks of a row have, and a plain parameter

Link = Callable[[Tensor], Tensor]
Chain = Sequence[Link] | None  # None: this rank runs no backward


def pattern(shape: Sequence[int], p: int) -> Tensor:
    """Odd multiples of 1/16: never zero, and sums of a few are exact in every dtype."""
    number = torch.arange(torch.Size(shape).numel())
    if len(shape) == 2 and min(shape) > 16:  # by turns, a large matrix would have rank 9 at most
        number = number * 2654435761 // 65536
    return ((2 * ((number * 5 + p) % 9) - 9) / 16).reshape(tuple(shape))


def start(shape: Sequence[int], p: int) -> Tensor:
    return (((torch.arange(torch.Size(shape).numel()) * 3 + 5 * p) % 17 - 8) / 8).reshape(tuple(shape))


def tensors_of(full: dict[str, Any]) -> dict[int, list[Any]]:
    """Of a full state: by number the steps, and what a parameter has beside its master and averages."""
    left_out = ("step", "master", "ema")
    return {
        number: [float(entry["step"]), *(entry[name].float() for name in sorted(entry) if name not in left_out)]
        for number, entry in full.get("state", {}).items()
    }


# -- parameters that two tensor-parallel ranks cut ---------------------------------------------------------------------


def matrix() -> DeviceMesh:
    """Four ranks as two rows that average, of two columns with a slice each."""
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def cut_along(p: nn.Parameter, dim: int, mesh: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    if dim == NO_DTENSOR:
        return p
    placement = Replicate() if dim == WHOLE else Shard(dim)
    whole = distribute_tensor(p.detach(), mesh, [placement], src_data_rank=None)
    return nn.Parameter(whole, requires_grad=p.requires_grad)


def part(whole: Tensor, dim: int, column: int, columns: int = 2) -> Tensor:
    """What a rank of this column has of it. A slice is as large as the first, as long as there is something left."""
    parts = whole.chunk(columns, dim) if dim >= 0 else (whole,) * columns
    return parts[column] if column < len(parts) else whole.narrow(dim, 0, 0)


def term(parameter: Tensor, p: int, c: float) -> Tensor:
    """Of a DTensor that both of two ranks have, the gradient comes in terms, of half each, where ``p`` is odd. Of
    packed experts a rank uses its own."""
    factor = c * pattern(parameter.shape, p + 3 * getattr(parameter, "expert", 0))
    if packed := getattr(parameter, "packed", None):
        parameter, factor = part(parameter, 0, *packed), part(factor, 0, *packed)
    elif hasattr(parameter, "placements"):
        from torch.distributed.tensor import Partial

        placement, column = parameter.placements[0], parameter.device_mesh.get_local_rank()
        terms = p % 2 == 1 and placement.is_replicate()
        dim = WHOLE if placement.is_replicate() else placement.dim
        factor = part(factor, dim, column, parameter.device_mesh.size()) / (1 + terms)
        parameter = parameter.to_local(grad_placements=[Partial()] if terms else None)
    return (parameter * factor.to(parameter.dtype)).float().sum()


# -- experts -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experts:
    """The experts of an optimizer, over the ranks of ``mesh``: ("edp", "ep"), or the other way round.

    Attributes:
        packed: numbers of those that are one tensor [experts, ...] of all ranks, of which each has a slice.
    """

    mesh: DeviceMesh
    packed: Sequence[int]

    @property
    def own(self) -> tuple[int, int]:
        """The number of this rank's experts, and in how many parts they are."""
        return self.mesh.get_local_rank("ep"), self.mesh["ep"].size()

    def copies(self, p: int, shape: Sequence[int], dtype: torch.dtype, *, ours: bool) -> list[nn.Parameter]:
        """This rank's parameter, which is not alone in plain torch: there each rank has those of all ranks."""
        here, count = self.own
        if p in self.packed:
            made = nn.Parameter(start(shape, p).to(dtype))
            if ours:
                return [cut_along(made, 0, self.mesh["ep"])]
            made.packed = self.own  # type: ignore[attr-defined]
            return [made]
        found = []
        for number in [here] if ours else range(count):
            found.append(nn.Parameter(start(shape, p + 7 * number).to(dtype)))
            found[-1].expert = number  # type: ignore[attr-defined]
        return found


class Swap(torch.autograd.Function):
    """Tokens travel between the ranks that have all experts: each waits for the others, in forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        dist.all_reduce(torch.zeros(1), group=group)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        dist.all_reduce(torch.zeros(1), group=ctx.group)
        return grad * 1.0, None


# -- the model of stage 3 ----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Parameters of its own, by number, and units. A link is ``{p: c}`` of its own, ``(unit, {p: c})``, or ``boom``."""

    def __init__(self, own: dict[int, nn.Parameter], units: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        for p, parameter in own.items():
            setattr(self, f"p{p}", parameter)
        self.units = nn.ModuleList(units)

    def forward(self, x: Tensor, links: Sequence[Any]) -> Tensor:
        for link in links:
            if callable(link):
                x = link(x)
            elif isinstance(link, tuple):
                x = self.units[link[0]](x, [link[1]])
            else:
                x = sum((term(getattr(self, f"p{p}"), p, c) for p, c in link.items()), x)
        return x * 1.0

    def ordered(self) -> list[nn.Parameter]:
        named = {int(name.rpartition("p")[2]): p for name, p in self.named_parameters()}
        return [named[p] for p in sorted(named)]


class Unit(Net):
    """A part of one."""


def net_of(parameters: Sequence[nn.Parameter], units: Sequence[int]) -> Net:
    """``units`` has the unit of each parameter, or -1: the root."""
    of_unit = [{p: parameters[p] for p, u in enumerate(units) if u == k} for k in range(-1, max(units) + 1)]
    return Net(of_unit[0], [Unit(own) for own in of_unit[1:]])


# -- the words ---------------------------------------------------------------------------------------------------------


@dataclass
class Handle:
    """An optimizer of a program, with its parameters: a text may use both. ``make(stage, store)`` makes it anew.
    ``copies``: by number of an expert, all of that number that this rank has."""

    opt: Any
    params: list[Any]
    net: Net | None
    stage: int
    cut: Sequence[int]
    copies: dict[int, list[Any]]
    experts: Experts | None
    make: Callable[..., Any]
    given: list[dict[str, Any]]
    late: list[dict[str, Any]]


class Words:
    """``see(value)`` takes what both libraries must agree on. ``stored``: whether state goes where the text says."""

    def __init__(self, library: Any, rank: int, world: int, see: Callable[[Any], None], stored: bool = True) -> None:
        self.library, self.rank, self.world, self.see, self.stored = library, rank, world, see, stored
        self.handles: list[Handle] = []
        self._scaler: Any = None
        self._mesh: DeviceMesh | None = None
        self.exact = True  # of forward values: roundings add up, and of slices each rank adds up its own

    def names(self) -> dict[str, Any]:
        words = {name: getattr(self, name) for name in dir(Words) if not name.startswith("_") and name != "names"}
        return {**words, "boom": boom, "rank": self.rank, "world": self.world}

    # Making

    def optimizer(
        self,
        shapes: Sequence[Sequence[int]],
        stage: int = 2,
        groups: Sequence[dict[str, Any]] | None = None,
        late: Sequence[dict[str, Any]] = (),
        frozen: Sequence[int] = (),
        units: Sequence[int] | None = None,
        dtype: str = "float32",
        cut: Sequence[int] = (),
        mesh: str = "",
        experts: Sequence[int] = (),
        packed: Sequence[int] = (),
        expert_mesh: Sequence[tuple[str, int]] = (),
        rule: str = "adamw",
        store: str | None = None,
        device_budget: int | None = None,
        param_offload: str | None = None,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        bucket_cap_mb: float = 0.002,
        poison: bool = False,
        **options: Any,
    ) -> Handle:
        """``groups`` have the numbers of their parameters; None: one of all. ``late``: for ``add_group``, in turn.
        ``poison``: buffers are filled with NaN when they are released. ``mesh``: over which of its ranks state is.
        ``experts``, ``packed``: see ``Experts``, over a mesh of these dimensions."""
        made = [nn.Parameter(start(shape, p).to(getattr(torch, dtype))) for p, shape in enumerate(shapes)]
        of, copies = None, {}
        if experts:
            names, sizes = zip(*expert_mesh, strict=True)
            of = Experts(init_device_mesh("cpu", sizes, mesh_dim_names=names), packed)
            ours = self.library is zero_optim
            copies = {p: of.copies(p, shapes[p], made[p].dtype, ours=ours) for p in experts}
            for p, own in copies.items():
                made[p] = own[of.own[0] if len(own) > 1 else 0]
        for p in frozen:
            for parameter in copies.get(p, [made[p]]):
                parameter.requires_grad_(False)
        grid = self._grid(bool(cut), mesh)
        if cut and self.library is zero_optim:
            assert self._mesh is not None
            made = [cut_along(p, dim, self._mesh["tp"]) for p, dim in zip(made, cut, strict=True)]
        self.exact &= dtype == "float32" and not cut and "muon" not in (rule, *(g.get("rule") for g in groups or ()))
        net = None
        if stage == 3:
            offload = {"param_offload": param_offload} if param_offload and self.stored else {}
            net = net_of(made, units if units is not None else range(len(shapes)))
            how: dict[str, Any] = {"prefetch": prefetch, "reshard_after_forward": reshard_after_forward}
            if of is not None:
                of_experts = dict.fromkeys(units[p] if units is not None else p for p in experts)
                how["experts"] = {f"units.{unit}": of.mesh["edp"] for unit in of_experts}
            net = self.library.shard_module(net, units=(Unit,), **how, **grid, **offload)
            made = net.ordered()
            copies = {p: [made[p]] if len(own) == 1 else own for p, own in copies.items()}
        group_of = partial(self._group, made, of, copies)
        given = [group_of(group) for group in groups or [{"params": range(len(shapes))}]]

        def make(stage: int, store: str | None = store, budget: int | None = device_budget) -> Any:
            more = {} if stage == 3 else {"stage": stage, **grid}
            if stage == 0:
                more.pop("state_over", None)
            if store and self.stored:
                more |= {"state_offload": store} | ({"device_budget": budget} if store == "paged" else {})
            groups = [{**group} for group in given]
            more |= {"rule": self._rule(rule), "bucket_cap_mb": bucket_cap_mb}
            with debugging(poison):
                return self.library.ShardedOptimizer(groups, **more, **options)

        later = [group_of(group) for group in reversed(late)]
        handle = Handle(make(stage), made, net, stage, cut, copies, of, make, given, later)
        self.handles.append(handle)
        return handle

    def _grid(self, cut: bool, mesh: str) -> dict[str, Any]:
        if cut and self._mesh is None:
            self._mesh = matrix()
        if cut:
            return {"mesh": self._mesh["dp"]}  # type: ignore[index]
        if mesh:
            grid = init_device_mesh("cpu", (2, self.world // 2), mesh_dim_names=("replicate", "shard"))
            return {"mesh": grid, "state_over": mesh}
        return {}

    def _group(
        self, made: Sequence[Any], of: Experts | None, copies: dict[int, list[Any]], group: dict[str, Any]
    ) -> dict[str, Any]:
        found = {"lr": 0.125, "weight_decay": 0.0, **group}
        found["params"] = [one for p in group["params"] for one in copies.get(p, [made[p]])]
        if "mesh" in group:  # of experts; the value is its dimension
            found["mesh"] = of.mesh[group["mesh"]] if self.library is zero_optim else None  # type: ignore[union-attr]
        return found | ({"rule": self._rule(group["rule"])} if "rule" in group else {})

    def _rule(self, name: str) -> Any:
        kind, options = RULES[name]
        return getattr(self.library.rules, kind)(**options)

    def scaler(self, scale: float) -> None:
        """From here on every step is the scaler's."""
        self._scaler = self.library.GradScaler(init_scale=scale, growth_interval=2)
        self._scaler.scale(torch.ones(()))

    # Links

    def use(self, a: Handle, p: int, c: float = 1.0) -> Link:
        return lambda x: x + term(a.params[p], p, c)

    def every(self, a: Handle, c: float = 1.0) -> list[Link]:
        return [self.use(a, p, c) for p in range(len(a.params))]

    def net(self, a: Handle, *links: Any) -> Link:
        return lambda x: a.net(x, links)  # type: ignore[misc]

    def swap(self, a: Handle) -> Link:
        return lambda x: Swap.apply(x, a.experts.mesh.get_group("ep"))  # type: ignore[union-attr]

    def units(self, a: Handle, *numbers: int, raises_after: int | None = None) -> Link:
        """Calls of units, each of which uses the parameter of its number; what raises comes after one of them."""
        links: list[Any] = []
        for k in numbers:
            links += [(k, {k: 1.0}), *([boom] if k == raises_after else [])]
        return self.net(a, *links)

    # Operations, which all ranks run in this order

    def back(self, *chains: Chain, no_sync: Sequence[Handle] = (), roots: int = 1) -> None:
        """Of each rank its chain; one is that of all. ``roots``: how many tensors the backward begins at."""
        chain = chains[self.rank] if len(chains) > 1 else chains[0]
        with contextlib.ExitStack() as stack:
            for a in no_sync:
                stack.enter_context(a.opt.no_sync())
            self.see(None if chain is None else self._backward(chain, roots))

    def _backward(self, chain: Sequence[Link], roots: int) -> Any:
        try:
            ends, long = [], max(1, -(-len(chain) // roots))
            for first in range(0, len(chain) or 1, long):
                x = torch.full((), 0.0 if first else 1.0, requires_grad=True)
                for link in chain[first : first + long]:
                    x = link(x)
                ends.append(x)
            torch.autograd.backward([self._scaler.scale(x) if self._scaler else x * 1.0 for x in ends])
        except Planned as error:
            return str(error)
        return float(sum(x.detach() for x in ends)) if self.exact else None

    def evaluate(self, *links: Link) -> None:
        """A forward without gradients."""
        with torch.no_grad():
            value = float((links[self.rank] if len(links) > 1 else links[0])(torch.ones(())))
        self.see(value if self.exact else None)

    def step(self, *handles: Handle, closure: Any = None, before: Any = None, after: Any = None) -> None:
        """``closure``, and hooks before and after the step, are functions without arguments."""
        for a in handles:
            hooks = []
            if before is not None:
                hooks.append(a.opt.register_step_pre_hook(lambda *_: before()))
            if after is not None:
                hooks.append(a.opt.register_step_post_hook(lambda *_: after()))
            if self._scaler is not None:
                self._scaler.step(a.opt)
            else:
                a.opt.step(closure) if closure is not None else a.opt.step()
            for hook in hooks:
                hook.remove()
            if a.stage != 3:
                self.see(self._values(a))

    def zero(self, *handles: Handle, to_none: bool = True) -> None:
        for a in handles:
            a.opt.zero_grad(set_to_none=to_none)

    def module_zero(self, *handles: Handle, to_none: bool = True) -> None:
        """``zero_grad`` of a module that holds all of an optimizer's parameters."""
        for a in handles:
            (a.net or nn.ParameterList(a.params)).zero_grad(set_to_none=to_none)

    def clip(self, a: Handle, max_norm: float, norm_type: float = 2.0, params: Sequence[int] | None = None) -> None:
        some = () if params is None else ([one for p in params for one in a.copies.get(p, [a.params[p]])],)
        self.see(float(a.opt.clip_grad_norm_(max_norm, norm_type, *some)))

    def count(self, a: Handle, *tokens: int) -> None:
        """Of each rank its tokens; one number is that of all."""
        own = tokens[self.rank % len(tokens)]
        a.opt.count(torch.tensor(float(own)) if own % 2 else own)

    def unscale(self, a: Handle) -> None:
        self._scaler.unscale_(a.opt)

    def update(self) -> None:
        self._scaler.update()
        self.see(float(self._scaler.get_scale()))

    def set_lr(self, a: Handle, group: int, lr: float) -> None:
        a.opt.param_groups[group]["lr"] = lr

    def saved(self, a: Handle) -> Any:
        return copy.deepcopy(a.opt.state_dict())

    def full(self, a: Handle) -> Any:
        """The whole state; rank 0 sees it."""
        state = self.library.full_state_dict(a.opt)
        self.see(tensors_of(state))
        return state

    def check(self, a: Handle) -> None:
        if self.library is zero_optim:
            zero_optim.check_replicas(a.opt)

    def load_full(self, a: Handle, state: Any) -> None:
        self.library.load_full_state_dict(a.opt, state)

    def renew(self, a: Handle, stage: int | None = None, **store: Any) -> None:
        """``close``, no gradients, and a new optimizer on the same parameters."""
        a.opt.close()
        nn.ParameterList(a.params).zero_grad()
        a.stage = a.stage if stage is None else stage
        a.opt = a.make(a.stage, **store)

    def add_group(self, a: Handle) -> None:
        a.given.append(a.late.pop())
        a.opt.add_param_group({**a.given[-1]})

    def edit(self, a: Handle, p: int, factor: float) -> None:
        """The parameter times a number, in place; at stage 3 what rank 0 writes holds."""
        with torch.no_grad():
            if a.net is None or (p in a.copies and self.library is plain):
                for parameter in a.copies.get(p, [a.params[p]]):
                    parameter.mul_(factor)
                return
            counts = self.rank == 0 or (p in a.copies and a.experts.mesh.get_local_rank("edp") == 0)
            with self.library.gather_parameters(a.net, writeback=True):
                local = a.net.ordered()[p]
                getattr(local, "to_local", lambda: local)().mul_(factor if counts else 7.0)

    def assign(self, a: Handle, p: int, *factors: float) -> None:
        """A gradient: of each rank its factor times the pattern."""
        like = a.params[p]
        value = (factors[self.rank] * pattern(like.shape, p + 3 * getattr(like, "expert", 0))).to(like.dtype)
        if packed := getattr(like, "packed", None):
            own, value = value, torch.zeros_like(value)
            part(value, 0, *packed).copy_(part(own, 0, *packed))
        elif hasattr(like, "placements"):
            from torch.distributed.tensor import distribute_tensor

            value = distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
        like.grad = value

    def all_reduce(self, value: float) -> None:
        """The user's own, on the default group."""
        total = torch.tensor(value * (self.rank + 1))
        dist.all_reduce(total)
        self.see(float(total))

    def read(self, a: Handle) -> None:
        """All parameters; at stage 3 gathered."""
        with self.library.gather_parameters(a.net) if a.net is not None else contextlib.nullcontext():
            self.see(self._values(a))

    def average(self, a: Handle) -> None:
        """``ema_state_dict`` by number, as parameters of stage 3 have names, and all within ``swap_to_ema``."""
        names = [name for group in a.opt.param_groups for name in group.get("param_names", ())]
        number = {name: n for n, name in enumerate(names)}
        averages = a.opt.ema_state_dict(rank=None)
        self.see({number.get(key, key): value.detach().float().reshape(-1).clone() for key, value in averages.items()})
        with a.opt.swap_to_ema():
            self.read(a)

    def reset(self, a: Handle, keep: str | None = "master", keep_ema: bool = True) -> None:
        a.opt.reset_state(keep, keep_ema=keep_ema)

    def look(self, a: Handle) -> None:
        """What must change nothing: ``stats``, ``state_dict``, and gradients by ``torch.autograd.grad``."""
        a.opt.stats()
        a.opt.state_dict()
        trained = [p for p in a.params if p.requires_grad]
        torch.autograd.grad(sum(p.float().sum() for p in trained), trained)

    def _values(self, a: Handle) -> list[Tensor]:
        params = a.net.ordered() if a.net is not None else a.params
        found = []
        for p, parameter in enumerate(params):
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            if a.cut and self.library is plain:
                local = part(parameter, a.cut[p], self.rank % 2)
            if packed := getattr(parameter, "packed", None):
                local = part(parameter, 0, *packed)
            found.append(local.detach().float().reshape(-1).clone())
        return found

    def end(self) -> None:
        """What every text ends with."""
        for a in self.handles:
            self.read(a)
        for a in self.handles:
            a.opt.close()
