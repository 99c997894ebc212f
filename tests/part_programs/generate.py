"""Draws programs, as text in the words of ``words``."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Chunk = str  # lines that make sense together
Op = tuple[Chunk, ...]  # begins and ends without gradients, or begins with zero_grad


@dataclass(frozen=True)
class Program:
    """``model`` is the expression that makes it, as a nested tuple; see ``_expression``."""

    seed: int
    world: int
    dtype: str
    model: tuple[Any, ...]
    edits: tuple[str, ...]  # made before shard_module: what is tied, frozen, known to other blocks
    units: str
    options: tuple[tuple[str, Any], ...]  # of shard_module
    optimizer: tuple[tuple[str, Any], ...]
    methods: tuple[str, ...]
    ops: tuple[Op, ...]

    @property
    def clips(self) -> bool:
        return "grad_norm" in str(self)

    def __str__(self) -> str:
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        optimizer = "".join(f", {name}={value!r}" for name, value in self.optimizer)
        inside = "m.model" if self.model[0] == "Wrapper" else "m"
        lines = [
            f"# seed {self.seed}: {self.world} ranks",
            f"m = made({_expression(self.model)})",
            f"i = {inside}",
            *self.edits,
            f"shard(m, units={self.units}{options})",
            *self.methods,
            "P = list(m.named_parameters())",
            f"opt = optimizer(P{optimizer})",
        ]
        for number, op in enumerate(self.ops):
            lines += [f"# {number}", *op]
        return "\n".join([*lines, "opt.zero_grad()", "see_all(m, opt)"])


def _expression(node: Any) -> str:
    """A node is (class, positional arguments, keyword arguments)."""
    if not (isinstance(node, tuple) and len(node) == 3):
        return repr(node)
    name, args, options = node
    parts = [_expression(a) for a in args] + [f"{key}={_expression(value)}" for key, value in options]
    return f"{name}({', '.join(parts)})"


# -- drawing


@dataclass
class Part:
    path: str
    kind: str
    block: int | None = None  # the number of the block it is of


@dataclass
class Draw:
    """A program in the making."""

    rng: random.Random
    world: int
    wrapped: bool = False
    parts: list[Part] = field(default_factory=list)
    blocks: int = 0
    simple: bool = True  # every unit is called once in a forward, in the order in which they are registered
    distinct: bool = True  # no parameter is used twice
    listed: bool = True
    number: int = 0
    zero_first: bool = False
    dropped: bool = False
    frozen: list[str] = field(default_factory=list)

    def maybe(self, chance: float) -> bool:
        return self.rng.random() < chance

    def data(self) -> int:
        self.number += 1
        return self.number

    def some(self, *kinds: str) -> list[str]:
        return [p.path for p in self.parts if p.kind in kinds]


def _block(d: Draw, path: str, index: int, depth: int = 0) -> tuple[Any, ...]:
    rng, options = d.rng, []
    form = rng.choice(["tensor"] * 5 + ["tuple", "list", "dict", "data", "inplace"])
    if form != "tensor":
        options.append(("form", form))
    for name, values in (("ckpt", (True, False)), ("depth", (1, 2))):
        if d.maybe(0.15):
            options.append((name, rng.choice(values)))
            d.distinct &= name != "depth"
    for name in ("aux", "gain", "norm", "drop", "turned", "unused"):
        if d.maybe({"gain": 0.4, "norm": 0.3}.get(name, 0.12)):
            options.append((name, True))
    if d.maybe(0.3) and depth < 2:
        inner = "Scale" if d.maybe(0.3) else "Lin" if d.maybe(0.3) else "Block"
        d.parts.append(Part(f"{path}.inner", inner, index))
        node = _block(d, f"{path}.inner", index, depth + 1) if inner == "Block" else (inner, (), ())
        options.append(("inner", node))
    d.parts += [Part(f"{path}.up", "Lin", index), Part(f"{path}.down", "Lin", index)]
    if dict(options).get("norm"):
        d.parts.append(Part(f"{path}.norm", "LayerNorm", index))
    if {"depth", "turned", "unused"} & dict(options).keys() or "inner" in dict(options):
        d.simple = False
    return ("Block", (), tuple(options))


def _model(d: Draw) -> tuple[Any, ...]:
    rng, options = d.rng, []
    d.blocks = rng.randint(1, 4)
    blocks = []
    for n in range(d.blocks):
        d.parts.append(Part(f"i.blocks[{n}]", "Block", n))
        blocks.append(_block(d, f"i.blocks[{n}]", n))
    if d.maybe(0.25):
        options.append(("holds", "stack"))
        d.parts.append(Part("i.blocks", "Stack"))
        d.listed = False
    for name in ("emb", "head", "own", "pairs"):
        if d.maybe(0.4):
            options.append((name, True))
    if "head" in dict(options):
        d.parts.append(Part("i.head", "Lin"))
    if d.maybe(0.25):
        options.append(("ckpt", d.maybe(0.5)))
    if d.maybe(0.15):
        options.append(("form", rng.choice(["tuple", "dict", "data"])))
    model = ("Model", tuple(blocks), tuple(options))
    if d.maybe(0.5):
        d.wrapped = True
        model = ("Wrapper", (model,), (("own", True),) if d.maybe(0.5) else ())
    return model


def _edits(d: Draw, model: tuple[Any, ...]) -> list[str]:
    """What several modules share, what a block calls of another one, what is frozen."""
    rng, edits = d.rng, []
    linears, inside = d.some("Lin"), dict((model[1][0] if d.wrapped else model)[2])
    if d.maybe(0.2) and len(linears) > 1:
        a, b = rng.sample(linears, 2)
        edits.append(f"{a}.weight = {b}.weight")
    if d.maybe(0.1) and d.blocks > 1:
        edits.append(f"i.blocks[{d.blocks - 1}].down = i.blocks[0].{rng.choice(['up', 'down'])}")
    if d.maybe(0.1) and inside.get("emb") and inside.get("head"):
        edits.append("i.head.weight = i.emb.weight")
    if d.maybe(0.1) and d.listed:
        edits.append(f"i.blocks.append(i.blocks[{rng.randrange(d.blocks)}])")
    if d.maybe(0.15) and d.blocks > 1:
        a, b = rng.sample(range(d.blocks), 2)
        edits.append(f"i.blocks[{a}].far = [i.blocks[{b}]{rng.choice(['', '.up', '.down'])}]")
    if edits:
        d.simple = d.distinct = False
    if d.maybe(0.3):
        d.frozen = rng.sample([p.path for p in d.parts], 1)
        edits += [f"freeze({path})" for path in d.frozen]
    return edits


def _units(d: Draw) -> str:
    choices = ["(Block,)"] * 5 + ["(Block, Lin)", "(Lin,)", "('Block', nn.Embedding)", "('Lin', nn.LayerNorm)"]
    if d.some("Stack"):
        choices += ["(Stack,)", "(Stack, Block)"] * 2
    if d.wrapped:
        choices += ["(Model, Block)", "('Model',)"]
    if d.some("Scale"):
        choices += ["(Scale, Block)"]
    units = d.rng.choice(choices)
    names = re.findall(r"\w+", units)
    if "Embedding" in names or units == "('Lin', nn.LayerNorm)" or "Lin" in names:
        d.simple = False
    return units


def _options(d: Draw) -> tuple[list[tuple[str, Any]], list[tuple[str, Any]]]:
    rng, options, optimizer = d.rng, [], []
    if d.maybe(0.4):
        options.append(("reshard_after_forward", rng.choice([False, d.world, 1] if d.world > 1 else [False])))
    if d.maybe(0.5):
        options.append(("prefetch", rng.choice([0, 2, 3])))
    if d.maybe(0.1):
        optimizer.append(("max_grad_norm", 0.05))
    if d.maybe(0.1):
        optimizer.append(("lr", 0.02))
    return options, optimizer


def _methods(d: Draw) -> list[str]:
    methods = ["register(i, 'score')"]
    methods += [f"register({path}, 'half')" for path in d.some("Block")]
    methods += [f"register({path}, 'scaled')" for path in d.some("Lin") if d.maybe(0.5)]
    if d.maybe(0.3):
        methods.append("register(i, 'generate')")
    if d.maybe(0.2):
        methods.append("register(i, 'encode')")
    return methods


def program(seed: int) -> Program:
    rng = random.Random(seed)
    d = Draw(rng, rng.choice([2, 2, 2, 2, 2, 3, 3, 1]), zero_first=rng.random() < 0.3)
    dtype = "bfloat16" if d.maybe(0.3) else "float32"
    model = _model(d)
    edits = _edits(d, model)
    units = _units(d)
    options, optimizer = _options(d)
    methods = _methods(d)
    d.scaled = [re.findall(r"register\((.*), 'scaled'\)", m)[0] for m in methods if "scaled" in m]  # type: ignore
    ops: list[Op] = []
    if d.simple and d.maybe(0.5):
        ops.append((*_ended(d, [f"a = call(m, X({d.data()}))\nback(loss(a) + auxiliary(m))"]),))
    else:
        d.simple = False
    for _ in range(rng.randint(1, 6)):
        ops.append(_op(d))
    return Program(
        seed,
        d.world,
        dtype,
        model,
        tuple(edits),
        units,
        tuple(options),
        tuple(optimizer),
        tuple(methods),
        tuple(ops),
    )


# -- operations


def _op(d: Draw) -> Op:
    kinds: dict[Callable[[Draw], list[Chunk]], int] = {
        _train: 12,
        _accumulate: 4,
        _evaluate: 4,
        _generate: 1,
        _read: 2,
        _edit: 1,
        _twin: 2,
        _whole: 2,
        _to_and_fro: 2,
        _fails: 2,
        _booms: 3,
        _renew: 1,
        _observe: 0 if d.simple else 1,
        _drop: 1 if d.wrapped and not d.dropped else 0,
        _skip: 6 if d.simple else 0,
        _thaw: 1 if d.frozen and not d.simple else 0,
    }
    made = d.rng.choices(list(kinds), list(kinds.values()))[0](d)
    return tuple(made)


def _root(d: Draw) -> str:
    return d.rng.choice(["m", "i"])


def _link(d: Draw, var: str, used: set[int | None] | None = None) -> str:
    """A line that calls something. ``used``: the blocks that may not be called again."""
    rng = d.rng
    while True:
        kind = rng.choices(
            ["root", "part", "method", "checkpoint", "one by one"], [3 if used is None else 0, 6, 2, 1, 2]
        )[0]
        if kind == "root":
            return f"{var} = call({_root(d)}, {var})"
        if kind == "one by one":
            numbers = [n for n in range(d.blocks) if used is None or n not in used]
            if d.maybe(0.4):
                rng.shuffle(numbers)
            if used is not None:
                used.update(numbers)
            return f"for n in {numbers}:\n    {var} = call(i.blocks[n], {var})"
        part = rng.choice(d.parts)
        if used is not None:
            if part.block in used or part.kind == "Stack":
                continue
            used.add(part.block)
        if kind == "checkpoint":
            return f"{var} = call({part.path}, {var}, {d.maybe(0.5)})"
        if kind == "part":
            return f"{var} = call({part.path}, {var})"
        if used is None and d.maybe(0.4):
            return f"{var} = i.{rng.choice(['encode', 'score'])}({var})"
        if part.kind == "Block":
            return f"{var} = {part.path}.{rng.choice(['half', 'both'])}({var})"
        if part.path in d.scaled:
            return f"{var} = {part.path}.scaled({var})"


def _chain(d: Draw, var: str, most: int = 4) -> list[str]:
    """Lines that make ``var`` from data."""
    inputs = f"x = {var} = X({d.data()})" + (".requires_grad_()" if d.maybe(0.4) else "")
    lines = [inputs] + [_link(d, var) for _ in range(d.rng.randint(1, most))]
    if d.maybe(0.2):
        lines.append(_aside(d))
    return lines


def _aside(d: Draw) -> str:
    mode = d.rng.choice(["torch.no_grad()", "torch.inference_mode()"])
    body = _link(d, "c").replace("\n", "\n    ")
    return f"with {mode}:\n    c = X({d.data()})\n    {body}\n    see(c)"


def _ended(d: Draw, chunks: list[Chunk], clip: bool = True) -> list[Chunk]:
    """With zero_grad, clip and step where users place them."""
    zero = d.rng.choice(
        ["opt.zero_grad()"] * 4 + ["opt.zero_grad(set_to_none=False)", "m.zero_grad()", "i.zero_grad()"]
    )
    zero = "opt.zero_grad()" if zero == "i.zero_grad()" and d.wrapped else zero
    end = []
    if clip and d.maybe(0.1):
        end.append("opt.clip_grad_norm_(0.05)")
    end.append("stepped(opt, m)")
    if d.zero_first:
        return [zero, *chunks, "\n".join(end)]
    return [*chunks, "\n".join([*end, zero])]


def _train(d: Draw) -> list[Chunk]:
    rng = d.rng
    kind = rng.choice(["one"] * 4 + ["joint", "two", "two reversed", "twice", "inputs", "closure", "dropped", "inner"])
    first = "\n".join(_chain(d, "a"))
    seen = "\nif x.grad is not None: see(x.grad)"
    if kind == "one":
        return _ended(d, [f"{first}\nback(loss(a) + auxiliary(m)){seen}"])
    if kind == "twice":
        return _ended(d, [f"{first}\ns = loss(a) + auxiliary(m)\nback(s, retain_graph=True)\nback(s)"])
    if kind == "inputs":
        lines = [f"x = a = X({d.data()}).requires_grad_()", *[_link(d, "a") for _ in range(rng.randint(1, 3))]]
        double = ", create_graph=True" if d.maybe(0.6) else ", retain_graph=True"
        lines.append(f"(g,) = torch.autograd.grad(loss(a), x{double})\nsee(g)")
        return _ended(d, ["\n".join(lines) + "\nback(loss(a) + (g.float() ** 2).sum() + auxiliary(m))"])
    if kind == "inner":
        return _ended(d, [f"{first}\nback(loss(a.detach() * a) + auxiliary(m)){seen}"])
    if kind == "closure":
        body = (first + "\nback(loss(a) + auxiliary(m))").replace("\n", "\n    ")
        return [f"def closure():\n    opt.zero_grad()\n    {body}\nopt.step(closure)\nopt.zero_grad()"]
    second = "\n".join(_chain(d, "b"))
    if kind == "dropped":
        return _ended(d, [f"{second}\nb = x = None\n{first}\nback(loss(a) + auxiliary(m))"])
    if kind == "joint":
        return _ended(d, [f"{first}\n{second}\nback(loss(a) + loss(b) + auxiliary(m))"])
    order = "ab" if kind == "two" else "ba"
    third = f"back(loss({order[0]}))\nback(loss({order[1]}) + auxiliary(m))"
    return _ended(d, [f"{first}\n{second}\n{third}"])


def _accumulate(d: Draw) -> list[Chunk]:
    chunks = []
    for _ in range(d.rng.randint(2, 3)):
        lines = "\n".join(_chain(d, "a", 2))
        if d.maybe(0.5):
            back = "with opt.no_sync():\n    back(loss(a) + auxiliary(m))"
        else:
            back = "back(loss(a) + auxiliary(m))"
        chunks.append(f"{lines}\n{back}")
        if d.maybe(0.15):
            chunks.append("opt.zero_grad()")
    return _ended(d, chunks)


def _evaluate(d: Draw) -> list[Chunk]:
    mode = d.rng.choice(["torch.no_grad()", "torch.inference_mode()"])
    chunks = []
    for _ in range(d.rng.randint(1, 3)):
        lines = "\n    ".join([f"c = X({d.data()})", *[_link(d, "c") for _ in range(d.rng.randint(1, 2))]])
        lines = re.sub(r"\n( *)    c = call\(i.blocks\[n\]", r"\n        c = call(i.blocks[n]", lines)
        chunks.append(f"with {mode}:\n    {lines}\n    see(c)")
    return ["m.eval()", *chunks, "m.train()"] if d.maybe(0.6) else chunks


def _generate(d: Draw) -> list[Chunk]:
    return [f"with torch.no_grad():\n    see(i.generate(X({d.data()}), {d.rng.randint(1, 3)}))"]


def _gathered(d: Draw) -> str:
    return d.rng.choice(["m", "i", d.rng.choice(d.parts).path])


def _read(d: Draw) -> list[Chunk]:
    what = _gathered(d)
    lines = [f"see({what})"]
    if d.maybe(0.6):
        lines.append(f"with torch.no_grad(): see(call({what}, X({d.data()})))")
    if d.maybe(0.3):
        lines.append(f"if rank == 0: call({what}, X({d.data()}))")
    if d.maybe(0.3):
        lines.append(f"kept = copy.deepcopy({what}.state_dict())")
    body = "\n    ".join(lines)
    after = "\nsee(kept)" if "kept" in body else ""
    return [f"with zero_optim.gather_parameters({what}):\n    {body}{after}\nauxiliary(m)"]


def _edit(d: Draw) -> list[Chunk]:
    what = _gathered(d)
    body = f"for p in {what}.parameters(): p.mul_(0.75)"
    if d.maybe(0.3):
        return [f"with torch.no_grad(), caught(), undone({what}):\n    {body}\n    raise Boom"]
    return [f"with torch.no_grad(), zero_optim.gather_parameters({what}, writeback=True):\n    {body}"]


def _twin(d: Draw) -> list[Chunk]:
    what = d.rng.choice(["m", "i", d.rng.choice(d.some("Block"))])
    lines = [
        "auxiliary(m)",
        f"with zero_optim.gather_parameters({what}):\n    twin = copy.deepcopy({what})",
        f"back(loss(call(twin, X({d.data()}))) + auxiliary(twin))",
        "see([p.grad for p in twin.parameters()])",
        "torch.optim.SGD(twin.parameters(), lr=0.5).step()\nsee(twin)",
    ]
    if what == "i":
        lines.append(f"see(twin.score(X({d.data()})))\nauxiliary(twin)")
    if what.startswith("i.blocks"):
        lines.append(f"see(twin.half(X({d.data()})))")
    return ["\n".join(lines)]


def _whole(d: Draw) -> list[Chunk]:
    who = d.rng.choice(["0", "world - 1", "None"])
    trained = ", trained_only=True" if d.maybe(0.2) else ""
    return [f"see(zero_optim.full_model_state_dict({_gathered(d)}, {who}{trained}))"]


def _to_and_fro(d: Draw) -> list[Chunk]:
    what = d.rng.choice(["m", "i", d.rng.choice(d.parts).path])
    if d.maybe(0.5):
        saved = f"saved = copy.deepcopy({what}.state_dict())"
    else:
        saved = f"saved = zero_optim.full_model_state_dict({what}, rank=None)"
    return [saved + "\n" + "\n".join(_train(d)) + f"\n{what}.load_state_dict(saved)"]


def _fails(d: Draw) -> list[Chunk]:
    """A forward raises on every rank."""
    linears = d.some("Lin")
    if d.maybe(0.5):
        where = d.rng.choice(linears)
        lines = "\n    ".join(line.replace("\n", "\n    ") for line in _chain(d, "a"))
        fails = f"{where}.fail = True\nwith caught():\n    {lines}\n{where}.fail = None\nauxiliary(m)"
    else:
        fails = f"with caught(): call({_root(d)}, X({d.data()}), fail={d.rng.randrange(d.blocks)})\nauxiliary(m)"
    if d.maybe(0.3):
        fails = "with torch.no_grad():\n    " + fails.replace("\n", "\n    ")
    return [fails, *(_train(d) if d.maybe(0.6) else [])]


def _booms(d: Draw) -> list[Chunk]:
    """A backward raises: on all ranks, or on one, and then ``step`` comes next."""
    ranks: Any = True if d.maybe(0.5) or not d.distinct else d.rng.randrange(d.world)
    lines = [f"a = X({d.data()})"]
    before = after = ""
    kind = d.rng.choice(["between", "within", "root"])
    if kind == "root":
        lines.append(f"a = call({_root(d)}, a, boom_at=({d.rng.randrange(d.blocks)}, {ranks}))")
    elif kind == "within":
        where = d.rng.choice(d.some("Lin") + d.some("Block"))
        before, after = f"{where}.boom = {ranks}\n", f"\n{where}.boom = None"
        lines.append(f"a = call({_root(d)}, a)" if d.maybe(0.5) else _link(d, "a"))
    else:
        used: set[int | None] = set()
        for n in range(3):
            if len(used) < d.blocks:
                lines.append(_link(d, "a", used))
            if n == 0:
                lines.append(f"a = boom(a, {ranks})")
    text = before + "\n".join([*lines, "with caught(): back(loss(a) + auxiliary(m))"]) + after
    if ranks is not True:
        return [f"opt.zero_grad()\n{text}\nstepped(opt, m)\nopt.zero_grad()"]
    next_ = d.rng.choice(["", "opt.zero_grad()", "stepped(opt, m)\nopt.zero_grad()"])
    if next_.startswith("stepped"):
        return [f"{text}\n{next_}"]
    return ["\n".join([text, next_, *_train(d), "opt.zero_grad()"])]


def _renew(d: Draw) -> list[Chunk]:
    how = d.rng.choice(["state_dict", "full", ""])
    if how == "state_dict":
        return ["s = opt.state_dict()\nopt.close()\nopt = optimizer(P)\nopt.load_state_dict(s)"]
    if how == "full":
        return ["s = full_state(opt)\nopt.close()\nopt = optimizer(P)\nload_full_state(opt, s)"]
    return ["opt.close()\nopt = optimizer(P)"]


def _observe(d: Draw) -> list[Chunk]:
    return ["opt.observe()"]


def _drop(d: Draw) -> list[Chunk]:
    d.dropped, d.wrapped = True, False
    return ["m = i"]


def _thaw(d: Draw) -> list[Chunk]:
    path = d.frozen.pop()
    return [
        f"opt.zero_grad()\n{path}.requires_grad_(True)\na = call(m, X({d.data()}))\n"
        "back(loss(a) + auxiliary(m))\nstepped(opt, m)\nopt.zero_grad()"
    ]


def _skip(d: Draw) -> list[Chunk]:
    """Ranks that leave out blocks, each its own; or use a part of them."""
    numbers = range(d.blocks)
    name = d.rng.choice(["skip", "skip", "part"])
    most = d.blocks - 1 if name == "skip" else d.blocks
    by_rank = {r: tuple(sorted(d.rng.sample(numbers, d.rng.randint(0, most)))) for r in range(d.world)}
    x = f"X({d.data()})" + (".requires_grad_()" if d.maybe(0.5) else "")
    return _ended(d, [f"a = call({_root(d)}, {x}, {name}={by_rank}[rank])\nback(loss(a) + auxiliary(m))"])
