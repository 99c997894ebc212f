"""Random programs that call a model, parts of it and methods: legal by construction, as docs/zero3.md says what is.

- A block of ``far``, a module of another block, has no unit within it: a unit that calls another and has units itself
  may fail.
- Where ranks use different blocks, all units were called once in a forward before, in the order of registration.
- A backward that raises on one rank uses each parameter once, begins without gradients, and ``step`` is next.
- Checkpoints are not re-entrant: those change how often a gradient becomes ready.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from textwrap import indent
from typing import Any

from random_programs.draw import Draw
from random_programs.run import Program

FORMS = ((5, "tensor"), (1, "tuple"), (1, "list"), (1, "dict"), (1, "object"), (1, "inplace"))
KINDS = {"norm": 30, "gain": 40, "aux": 12, "drop": 12, "ckpt": 15}  # in percent
RARE = {"turned": 12, "unused": 12}


def program(draw: Draw, worlds: Sequence[int] = (2, 1, 3)) -> Program:
    return _Generator(draw, draw.pick(worlds)).program()


class _Generator(Draw):
    def __init__(self, draw: Draw, world: int) -> None:
        super().__init__(draw.draw)
        self.world = world
        self.parts: dict[str, str] = {}  # paths of modules, with their kinds
        self.inputs = 0

    def program(self) -> Program:
        # Each unit is called once in a forward, in the order of registration, and the ranks begin with such a forward.
        self.simple = self.chance(25)
        self.zero_first = self.chance(30)
        dtype = "bfloat16" if self.chance(30) else "float32"
        model = self.model()
        self.wrapped = model.startswith("Wrapper")
        ties = [] if self.simple else self.ties(model)
        units = self.units(calls_others=".far = " in " ".join(ties))
        self.frozen = [self.pick([*self.parts])] if self.chance(30) else []
        self.scaled = self.some(self.of("Lin"), 50)
        self.distinct = not ties and "depth" not in model  # a forward uses each parameter once
        lines = [f"m = made({model}, {dtype!r})", f"i = m{'.model' * self.wrapped}", *ties]
        lines += [f"{path}.requires_grad_(False)" for path in self.frozen]
        lines += [f"shard(m, units={units}{self.options()})", *self.methods(), "P = list(m.named_parameters())"]
        lines += [f"opt = optimizer(P{', max_grad_norm=0.05' * self.chance(10)})"]
        lines += [self.ended(f"a = call(m, {self.data()})", "back(loss(a, m))")] if self.simple else []
        lines.append(self.operation())
        for _ in range(5):
            lines += [self.operation()] if self.chance(60) else []
        return Program(self.world, "\n".join([*lines, "opt.zero_grad()", "see_all(m, opt)", ""]))

    # The model

    def block(self, path: str, depth: int = 0) -> str:
        rare = {} if self.simple else RARE
        arguments = [repr(kind) for kind, percent in {**KINDS, **rare}.items() if self.chance(percent)]
        self.parts |= {path: "Block", f"{path}.up": "Lin", f"{path}.down": "Lin"}
        if "'norm'" in arguments:
            self.parts[f"{path}.norm"] = "LayerNorm"
        form = self.weighted(FORMS)
        arguments += [f"form={form!r}"] if form != "tensor" else []
        if not self.simple and self.chance(15):
            arguments.append(f"depth={self.number(1, 2)}")
        if not self.simple and depth < 2 and self.chance(30):
            inner = self.pick(("Lin()", "nn.LayerNorm(H)", "Block"))
            if inner == "Block":
                inner = self.block(f"{path}.inner", depth + 1)
            else:
                self.parts[f"{path}.inner"] = inner.partition("(")[0]
            arguments.append(f"inner={inner}")
        return f"Block({', '.join(arguments)})"

    def model(self) -> str:
        self.blocks = self.number(1, 4)
        blocks = [self.block(f"i.blocks[{n}]") for n in range(self.blocks)]
        kinds = [*self.some(("emb", "head", "own"), 40), *(["stack"] if self.chance(25) else [])]
        arguments = [f"[{', '.join(blocks)}]", *map(repr, kinds)]
        self.parts |= {"i.blocks": "Stack"} if "stack" in kinds else {}
        self.parts |= {"i.head": "Lin"} if "head" in kinds else {}
        arguments += [f"ckpt={self.number(1, 2)}"] if self.chance(25) else []
        arguments += [f"form={self.pick(('tuple', 'dict', 'object'))!r}"] if self.chance(15) else []
        model = f"Model({', '.join(arguments)})"
        return self.weighted(((2, model), (1, f"Wrapper({model})"), (1, f"Wrapper({model}, 'own')")))

    def ties(self, model: str) -> list[str]:
        """What several modules have in common, and what a block calls of another one."""
        found, linears, last = [], self.of("Lin"), self.blocks - 1
        if self.chance(20):
            found.append("{}.weight = {}.weight".format(*self.shuffled(linears)))
        if self.chance(10) and last:
            found.append(f"i.blocks[{last}].down = i.blocks[0].{self.pick(('up', 'down'))}")
        if self.chance(10) and "'emb'" in model and "'head'" in model:
            found.append("i.head.weight = i.emb.weight")
        if self.chance(10):
            found.append(f"i.blocks.append(i.blocks[{self.number(0, last)}])")
        if self.chance(15) and last and not re.search("inner=(Block|Lin)", model):
            one, other = self.shuffled(range(self.blocks))[:2]
            found.append(f"i.blocks[{one}].far = [i.blocks[{other}]{self.pick(('', '.up', '.down'))}]")
        return found

    def units(self, *, calls_others: bool) -> str:
        choices = [(5, "(Block,)"), (1, "(nn.LayerNorm, Block)")]
        if not self.simple:
            others = ("(Block, Lin)", "(Lin,)", "('Block', nn.Embedding)", "('Lin', nn.LayerNorm)")
            choices += [(1, other) for other in others]
        choices += [(2, "(Stack,)"), (2, "(Stack, Block)")] if self.of("Stack") else []
        choices += [(1, "(Model, Block)"), (1, "('Model',)")] if self.wrapped else []
        if calls_others:  # a block that calls another one has no unit within it
            choices = [choice for choice in choices if "Lin" not in choice[1] and "Norm" not in choice[1]]
        return self.weighted(choices)

    def options(self) -> str:
        after = self.pick((False, self.world, 1)) if self.chance(40) else True
        prefetch = self.pick((0, 2, 3)) if self.chance(50) else 1
        return f", reshard_after_forward={after}, prefetch={prefetch}"

    def methods(self) -> list[str]:
        """Those that have to be registered, and some that need not be."""
        methods = ["register(i, 'score')", *(f"register({path}, 'half')" for path in self.of("Block"))]
        methods += [f"register({path}, 'scaled')" for path in self.scaled]
        return [*methods, *(["register(i, 'encode')"] if self.chance(25) else [])]

    def of(self, *kinds: str) -> list[str]:
        return [path for path, kind in self.parts.items() if kind in kinds]

    # Chains of calls

    def data(self) -> str:
        self.inputs += 1
        return f"X({self.inputs})"

    def link(self, name: str) -> str:
        """A line that calls something."""
        kind = self.weighted(((6, "part"), (3, "root"), (2, "method"), (1, "checkpoint"), (2, "one by one")))
        if kind == "root":
            return f"{name} = call({self.pick('mi')}, {name})"
        if kind == "one by one":
            return f"{name} = i.through({name}, [i.blocks[n] for n in {self.shuffled(range(self.blocks))}])"
        path = self.pick([*self.parts])
        if kind == "method" and self.chance(40):
            return f"{name} = i.{self.pick(('encode', 'score'))}({name})"
        if kind == "method" and self.parts[path] == "Block":
            return f"{name} = {path}.{self.pick(('half', 'both'))}({name})"
        if kind == "method" and path in self.scaled:
            return f"{name} = {path}.scaled({name})"
        return f"{name} = {'recomputed' if kind == 'checkpoint' else 'call'}({path}, {name})"

    def chain(self, name: str, most: int = 4, asks: bool | None = None) -> str:
        """Lines that make ``name`` from data."""
        asks = self.chance(40) if asks is None else asks
        lines = [f"x = {name} = {self.data()}{'.requires_grad_()' * asks}"]
        lines += [self.link(name) for _ in range(self.number(1, most))]
        return "\n".join([*lines, self.without_gradients()] if self.chance(20) else lines)

    def without_gradients(self) -> str:
        lines = [f"c = {self.data()}", *(self.link("c") for _ in range(self.number(1, 2))), "see(c)"]
        mode = self.pick(("torch.no_grad()", "torch.inference_mode()"))
        return f"with {mode}:\n{_within(lines)}"

    def ended(self, *lines: str) -> str:
        """With zero_grad, clip and step where users place them."""
        zero = self.weighted([(4, "opt.zero_grad()"), (1, "opt.zero_grad(set_to_none=False)"), (1, "m.zero_grad()")])
        clip = ["opt.clip_grad_norm_(0.05)"] if self.chance(10) else []
        lines = (*lines, *clip, "stepped(opt, m)")
        return "\n".join([zero, *lines] if self.zero_first else [*lines, zero])

    # Operations: each begins and ends without gradients, or begins with zero_grad

    def operation(self) -> str:
        kinds: list[tuple[int, Callable[[], str]]] = [(12, self.train), (4, self.accumulate), (4, self.evaluate)]
        kinds += [(2, self.read), (2, self.twin), (2, self.full_model), (2, self.to_and_fro), (2, self.edit)]
        kinds += [(3, self.backward_raises), (2, self.forward_fails), (1, self.renew)]
        kinds += [(6, self.skip)] if self.simple else [(1, lambda: "opt.observe()")]
        kinds += [(1, self.drop)] if self.wrapped else []
        kinds += [(1, self.thaw)] if self.frozen and not self.simple else []
        return self.weighted(kinds)()

    def train(self) -> str:
        others = ("joint", "two", "twice", "inputs", "closure", "inner")
        kind = self.weighted(((4, "one"), *((1, other) for other in others)))
        first = self.chain("a", asks=True if kind == "inputs" else None)
        seen = "if x.grad is not None: see(x.grad)"
        if kind == "one":
            return self.ended(first, "back(loss(a, m))", seen)
        if kind == "twice":
            return self.ended(first, "s = loss(a, m)", "back(s, retain_graph=True)", "back(s)")
        if kind == "inputs":
            double = self.pick(("retain_graph", "create_graph"))
            grad = f"(g,) = torch.autograd.grad(s, x, {double}=True)"
            return self.ended(first, "s = loss(a, m)", grad, "see(g)", "back(s + (g.float() ** 2).sum())")
        if kind == "inner":
            return self.ended(first, "back(loss(a.detach() * a, m))", seen)
        if kind == "closure":
            body = _within(["opt.zero_grad()", first, "back(loss(a, m))"])
            return f"def closure():\n{body}\nopt.step(closure)\nopt.zero_grad()"
        second = self.chain("b")
        if kind == "joint":
            return self.ended(first, second, "back(loss(a, m) + loss(b, m))")
        losses = self.shuffled(("s", "t"))
        return self.ended(first, "s = loss(a, m)", second, "t = loss(b, m)", *(f"back({name})" for name in losses))

    def accumulate(self) -> str:
        lines = []
        for _ in range(self.number(2, 3)):
            back = "with opt.no_sync(): back(loss(a, m))" if self.chance(50) else "back(loss(a, m))"
            lines += [self.chain("a", 2), back, *(["opt.zero_grad()"] if self.chance(15) else [])]
        return self.ended(*lines)

    def evaluate(self) -> str:
        lines = [self.without_gradients() for _ in range(self.number(1, 3))]
        return "\n".join(["m.eval()", *lines, "m.train()"] if self.chance(60) else lines)

    def some_module(self) -> str:
        return self.pick(("m", "i", self.pick([*self.parts])))

    def read(self) -> str:
        what = self.some_module()
        lines = [f"see({what})"]
        lines += [f"with torch.no_grad(): see(call({what}, {self.data()}))"] if self.chance(60) else []
        lines += [f"if rank == 0: call({what}, {self.data()})"] if self.chance(30) else []
        lines += [f"see(copied({what}.state_dict()))"] if self.chance(30) else []
        return f"with gathered({what}):\n{_within(lines)}\nauxiliary(m)"

    def edit(self) -> str:
        what = self.some_module()
        edit = f"for p in {what}.parameters(): p.mul_(0.75)"
        if self.chance(30):
            return f"with torch.no_grad(), caught, undone({what}):\n{_within([edit, 'raise Planned'])}"
        return f"with torch.no_grad(), gathered({what}, writeback=True):\n{_within([edit])}"

    def twin(self) -> str:
        what = self.pick(("m", "i", self.pick(self.of("Block"))))
        lines = ["auxiliary(m)", f"with gathered({what}): twin = copied({what})"]
        lines += [f"back(loss(call(twin, {self.data()}), twin))", "see([p.grad for p in twin.parameters()])"]
        lines += ["torch.optim.SGD(twin.parameters(), lr=0.5).step()", "see(twin)"]
        if what != "m":
            lines += [f"see(twin.{'score' if what == 'i' else 'half'}({self.data()}))", "auxiliary(twin)"]
        return "\n".join(lines)

    def full_model(self) -> str:
        trained = self.chance(20)
        return f"see(full_model({self.some_module()}, {self.pick((0, self.world - 1, None))}, trained_only={trained}))"

    def to_and_fro(self) -> str:
        what = self.some_module()
        saved = self.pick((f"full_model({what}, None)", f"copied({what}.state_dict())"))
        return "\n".join([f"saved = {saved}", self.train(), f"{what}.load_state_dict(saved)"])

    def broken(self) -> str:
        """What can be made to raise."""
        return self.pick(["i", *self.of("Lin", "Block")])

    def forward_fails(self) -> str:
        """On every rank."""
        where = self.broken()
        chain = self.chain("a") if self.chance(50) else f"call({self.pick('mi')}, {self.data()})"
        text = f"{where}.fails = True\nwith caught:\n{_within([chain])}\n{where}.fails = False\nauxiliary(m)"
        text = f"with torch.no_grad():\n{_within([text])}" if self.chance(30) else text
        return "\n".join([text, *([self.train()] if self.chance(60) else [])])

    def backward_raises(self) -> str:
        """On all ranks, or on one: then ``step`` comes next."""
        alone = self.distinct and self.chance(50)
        on_this = f"rank == {self.number(0, self.world - 1)}" if alone else "True"
        if alone or self.chance(60):
            where = self.broken()
            called = f"a = call({self.pick('mi')}, a)" if self.chance(60) else self.link("a")
            lines, after = [f"{where}.booms = {on_this}", called], [f"{where}.booms = False"]
        else:
            lines, after = [self.link("a"), "a = boom(a)", self.link("a")], []
        lines = [f"a = {self.data()}", *lines, "with caught: back(loss(a, m))", *after]
        step = ["stepped(opt, m)", "opt.zero_grad()"]
        if alone:
            return "\n".join(["opt.zero_grad()", *lines, *step])
        return "\n".join([*lines, *self.pick((step, ["opt.zero_grad()", self.train()], [self.train(), step[1]]))])

    def renew(self) -> str:
        new = ["opt.close()", "opt = optimizer(P)"]
        loads = [
            ["s = opt.state_dict()", *new, "opt.load_state_dict(s)"],
            ["s = full(opt, None)", *new, "load_full(opt, s)"],
        ]
        return "\n".join(self.pick((new, *loads)))

    def drop(self) -> str:
        """The wrapper."""
        self.wrapped = False
        return "m = i"

    def thaw(self) -> str:
        lines = ["opt.zero_grad()", f"{self.frozen.pop()}.requires_grad_(True)", f"a = call(m, {self.data()})"]
        return "\n".join([*lines, "back(loss(a, m))", "stepped(opt, m)", "opt.zero_grad()"])

    def skip(self) -> str:
        """Ranks that leave out blocks, each its own; or use a part of them."""
        name = self.pick(("skip", "part"))
        by_rank = []
        for _ in range(self.world):
            numbers = self.some(range(self.blocks), 50)
            by_rank.append(tuple(numbers[1:] if name == "skip" and len(numbers) == self.blocks else numbers))
        x = f"{self.data()}{'.requires_grad_()' * self.chance(50)}"
        return self.ended(f"a = call({self.pick('mi')}, {x}, {name}={by_rank}[rank])", "back(loss(a, m))")


def _within(lines: list[Any]) -> str:
    return indent("\n".join(lines), "    ")
