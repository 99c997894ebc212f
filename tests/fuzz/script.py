"""The text of a program: what the ranks run, and what is printed of a failure. There is no other interpreter."""

from __future__ import annotations

from pathlib import Path

from programs import world

from fuzz import prelude
from fuzz.program import (
    RULES,
    STORES,
    AddGroup,
    AllReduce,
    Assign,
    Average,
    Backward,
    Boom,
    Chain,
    Clip,
    Drop,
    Edit,
    Enter,
    Evaluate,
    Freeze,
    Group,
    Leave,
    Load,
    LoadFull,
    Look,
    ModuleZero,
    Net,
    Observe,
    Op,
    Optim,
    Program,
    Read,
    Renew,
    Save,
    SaveFull,
    ScaleGrad,
    SetLr,
    Step,
    Thaw,
    Unit,
    Unscale,
    Update,
    Use,
    Zero,
)


def _group(o: int, group: Group) -> str:
    params = ", ".join(f"P{o}[{p}]" for p in group.params)
    more = ""
    if group.rule is not None:
        kind, own = RULES[group.rule]
        more += f', "rule": zero_optim.rules.{kind.removeprefix("Sharded")}({own})'
    if group.view is not None:
        more += f', "view": {{{group.view[0]!r}: {group.view[1]}}}'
    return f'{{"params": [{params}], "lr": {group.lr}, "weight_decay": {group.weight_decay}{more}}}'


def _constructor(o: int, optim: Optim, stage: int, store: str, groups: list[Group]) -> str:
    kind, own = RULES[optim.rule]
    options = [*([own] if own else []), f"bucket_cap_mb={optim.bucket_cap_mb}"]
    if optim.ema_decay is not None:
        options.append(f"ema_decay={optim.ema_decay}")
    if optim.split:
        options.append(f"master={optim.split!r}")
    if store:
        options.append(STORES[store])
    if stage != 3:
        options.append(f"stage={stage}")
        if optim.mesh:
            options.append("mesh=mesh()")
        if optim.cut:
            options.append('mesh=M["dp"]')
    if not optim.overlap_grad_reduce:
        options.append("overlap_grad_reduce=False")
    if optim.grad_reduce_dtype:
        options.append(f"grad_reduce_dtype=torch.{optim.grad_reduce_dtype}")
    if optim.max_grad_norm is not None:
        options.append(f"max_grad_norm={optim.max_grad_norm}")
    return f"o{o} = zero_optim.{kind}([{', '.join(_group(o, g) for g in groups)}], {', '.join(options)})"


def _number(c: float) -> str:
    return f'float("{c}")' if c in (float("inf"), -float("inf")) else repr(c)


def _link(link: object) -> str:
    if isinstance(link, Use):
        return f"use(P{link.o}, {link.p}, {_number(link.c)})"
    if isinstance(link, Boom):
        return "forward_boom" if link.forward else "boom"
    assert isinstance(link, Net)
    return f"call({', '.join([f'N{link.o}', *map(_inner, link.links)])})"


def _inner(link: object) -> str:
    if isinstance(link, Use):
        return f'("use", {link.p}, {_number(link.c)})'
    if isinstance(link, Unit):
        uses = "".join(f"({p}, {_number(c)}), " for p, c in link.uses)
        return f'("unit", {link.k}, ({uses}))'
    return '"boom"'


def _chain(chain: Chain) -> str:
    return "None" if chain is None else f"[{', '.join(map(_link, chain))}]"


class _Writer:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.groups = [list(optim.groups) for optim in program.optims]
        self.stages = [optim.stage for optim in program.optims]
        self.added = [0] * len(program.optims)

    def setup(self) -> list[str]:
        lines = ["M = matrix()"] if any(optim.cut for optim in self.program.optims) else []
        for o, optim in enumerate(self.program.optims):
            made = f"make({list(optim.shapes)}, torch.{optim.dtype}, frozen={list(optim.frozen)})"
            if optim.cut:
                made = f'cut({made}, {list(optim.cut)}, M["tp"])'
            if optim.stage == 3:
                options = f"prefetch={optim.prefetch}, reshard_after_forward={optim.reshard_after_forward}"
                options += ", mesh=mesh()" if optim.mesh else ', mesh=M["dp"]' if optim.cut else ""
                options += ", param_offload='cpu'" if optim.param_offload else ""
                net = f"Net({made}, {list(optim.units)})"
                lines += [
                    f"N{o} = zero_optim.shard_module({net}, units=(Block,), {options})",
                    f"P{o} = N{o}.ordered()",
                ]
            else:
                lines.append(f"P{o} = {made}")
            lines.append(_constructor(o, optim, optim.stage, optim.store, self.groups[o]))
        if self.program.scale is not None:
            lines += [
                f"scaler = zero_optim.GradScaler(init_scale={self.program.scale}, growth_interval=2)",
                "scaler.scale(torch.ones(()))",
            ]
        return lines

    def holder(self, o: int) -> str:
        return f"N{o}" if self.stages[o] == 3 else f"P{o}"

    def all_grads(self) -> str:
        return "".join(f", grads({self.holder(o)})" for o in range(len(self.stages)))

    def call(self, op: Op, chains: str | None = None) -> str:
        """An expression, for what may also be done in a closure or a hook."""
        o = getattr(op, "o", None)
        match op:
            case Backward():
                scaler = "scaler" if self.program.scale is not None else "None"
                options = f"no_sync=[{', '.join(f'o{k}' for k in op.no_sync)}], scaler={scaler}, roots={op.roots}"
                chains = chains or "[" + ", ".join(map(_chain, op.ranks)) + "]"
                return f"backward({chains}[rank], {options})"
            case Zero():
                return f"o{o}.zero_grad(set_to_none={op.to_none})"
            case ModuleZero():
                module = f"N{o}" if self.stages[op.o] == 3 else f"module_of(P{o})"
                return f"{module}.zero_grad(set_to_none={op.to_none})"
            case Clip():
                some = "" if op.params is None else f", [{', '.join(f'P{o}[{p}]' for p in op.params)}]"
                return f"o{o}.clip_grad_norm_({op.max_norm}, {_number(op.norm_type)}{some})"
            case SetLr():
                return f"o{o}.param_groups[{op.group}].update(lr={op.lr})"
            case AllReduce():
                return f"own_sum({op.value}, rank)"
        raise TypeError(op)

    def step(self, op: Step) -> str:
        given = {"closure": op.closure, "before": op.before, "after": op.after}
        lists = [f"{name}=[{', '.join(f'lambda: {self.call(i)}' for i in of)}]" for name, of in given.items() if of]
        return f"step({', '.join([f'o{op.o}', *lists])})" if lists else f"o{op.o}.step()"

    def operation(self, index: int, op: Op) -> list[str]:
        """The lines of an operation; the last one tells ``see`` what it was to see."""
        o = getattr(op, "o", None)
        grads = f", grads({self.holder(o)})" if isinstance(o, int) else ""
        match op:
            case Backward():
                chains = ", ".join(map(_chain, op.ranks))
                return [f"chains = [{chains}]", f"see({index}, {self.call(op, 'chains')}{self.all_grads()})"]
            case Enter():
                return [f"block{o} = o{o}.no_sync()", f"block{o}.__enter__()", f"see({index})"]
            case Leave():
                return [f"block{o}.__exit__(None, None, None)", f"see({index})"]
            case Evaluate():
                return [f"see({index}, evaluate([{', '.join(map(_link, op.ranks))}][rank]))"]
            case Step():
                call = self.step(op) if self.program.scale is None else f"scaler.step(o{o})"
                return [call, f"see({index}, None)" if self.stages[o] == 3 else f"see({index}, values(P{o}))"]
            case Zero():
                return [self.call(op), f"see({index}{grads})"]
            case ModuleZero():
                return [self.call(op), f"see({index}{grads})"]
            case Clip():
                return [f"see({index}, float({self.call(op)}))"]
            case SetLr():
                return [self.call(op), f"see({index})"]
            case Save():
                return [f"saved{o} = copy.deepcopy(o{o}.state_dict())", f"see({index})"]
            case Load():
                return [f"o{o}.load_state_dict(saved{o})", f"see({index})"]
            case SaveFull():
                return [f"full{o} = zero_optim.full_state_dict(o{o})", f"see({index}, full(full{o}))"]
            case LoadFull():
                return [f"zero_optim.load_full_state_dict(o{o}, full{o})", f"see({index})"]
            case Observe():
                return [f"o{o}.observe()", f"see({index})"]
            case Renew():
                self.stages[o] = op.stage
                return [
                    f"o{o}.close()",
                    f"module_of(P{o}).zero_grad()",
                    _constructor(o, self.program.optims[o], op.stage, op.store, self.groups[o]),
                    f"see({index})",
                ]
            case AddGroup():
                group = self.program.optims[o].late[self.added[o]]
                self.added[o] += 1
                self.groups[o].append(group)
                return [f"o{o}.add_param_group({_group(o, group)})", f"see({index})"]
            case Thaw() | Freeze():
                return [f"P{o}[{op.p}].requires_grad_({isinstance(op, Thaw)})", f"see({index})"]
            case Edit():
                if self.stages[o] == 3:
                    return [
                        f"with torch.no_grad(), zero_optim.gather_parameters(N{o}, writeback=True):",
                        f"    N{o}.ordered()[{op.p}].mul_({op.factor} if rank == 0 else 7.0)  # rank 0's are kept",
                        f"see({index})",
                    ]
                return ["with torch.no_grad():", f"    P{o}[{op.p}].mul_({op.factor})", f"see({index})"]
            case Drop():
                return [f"P{o}[{op.p}].grad = None", f"see({index}{grads})"]
            case Assign():
                value = f"whole_on_row(P{o}[{op.p}], {op.p}, {list(op.ranks)}[rank])"
                return [f"P{o}[{op.p}].grad = {value}", f"see({index})"]
            case ScaleGrad():
                return [f"P{o}[{op.p}].grad.mul_({op.factor})", f"see({index})"]
            case AllReduce():
                return [f"see({index}, {self.call(op)})"]
            case Read():
                return [f"see({index}, whole(N{o}))"]
            case Average():
                read = f"whole(N{o})" if self.stages[o] == 3 else f"values(P{o})"
                return [f"see({index}, averages(o{o}), within(o{o}, lambda: {read}))"]
            case Look():
                return [f"look(o{o}, P{o})", f"see({index}{grads})"]
            case Unscale():
                return [f"scaler.unscale_(o{o})", f"see({index})"]
            case Update():
                return ["scaler.update()", f"see({index}, scaler.get_scale())"]
        raise TypeError(op)

    def end(self) -> list[str]:
        last = len(self.program.ops)
        seen = ", ".join(f"whole(N{o})" if stage == 3 else f"values(P{o})" for o, stage in enumerate(self.stages))
        return [f"see({last}, {seen})", *(f"o{o}.close()" for o in range(len(self.stages)))]


def text(program: Program) -> str:
    """``def program(rank, world, see)``. ``see(i, ...)`` is called once for each operation and once at the end."""
    writer = _Writer(program)
    lines = writer.setup()
    for index, op in enumerate(program.ops):
        lines += writer.operation(index, op)
    lines += writer.end()
    return "def program(rank, world, see):\n" + "".join(f"    {line}\n" for line in lines)


def stand_alone(program: Program, title: str) -> str:
    """A script to paste: what a rank is, the words, the program, and its start."""
    words = Path(prelude.__file__).read_text().replace("from programs.world import Planned, boom\n", "")
    comment = "".join(f"# {line}\n" for line in title.splitlines())
    main = f'if __name__ == "__main__":\n    spawn(program, {program.world})\n'
    return f"{comment}{Path(world.__file__).read_text()}\n\n{words}\n\n{text(program)}\n\n{main}"
