"""State that is stored by a codec: the arithmetic, and that whoever looks at it sees values."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import oracle_float64
import pytest
import torch
from cells import slow_after
from harness import run_ranks
from torch import Tensor, nn
from zero_optim.rules import AdamW, Bf16, Codec, Int8, Root8, Split, Split8, StateTensor, UpdateRule

from zero_kernels import ROW, RULES

SHAPES = ((300,), (7, 19), (2, 128), (5,))
OPTIONS = {"lr": 0.25, "weight_decay": 0.125}
CODECS = {"exp_avg": Int8(), "exp_avg_sq": Root8()}
SPLIT = {**CODECS, "master": Split()}
SPLIT8 = {**CODECS, "master": Split8()}


# ---- one row ---------------------------------------------------------------------------------------------------------


def _rows() -> Tensor:
    """[rows, 128], of every magnitude, and rows of one kind of value."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randn(200, ROW, generator=generator) * torch.logspace(-36, 18, 200).unsqueeze(1)
    spread = torch.randn(40, ROW, generator=generator) * torch.logspace(-20, 0, ROW)
    alone = torch.zeros(5, ROW)
    alone[range(5), range(5)] = torch.tensor([1.0, -3e38, 2.0**-149, 2.0**-126, 2.0**-64])
    steps = torch.arange(-256, 256).view(4, ROW).float()
    return torch.cat((random, spread, alone, steps, torch.zeros(1, ROW)))


@pytest.mark.parametrize("codec", [Int8(), Root8()], ids=lambda codec: codec.name)
def test_what_was_decoded_once_is_decoded_again(codec: Codec) -> None:
    values = _rows() if codec.name == "int8" else _rows().abs()
    parts = codec.encode(values)
    found = codec.decode(parts)
    again = codec.encode(found)
    assert torch.equal(codec.decode(again), found)
    every = torch.arange(256).view(2, ROW).to(torch.uint8)
    for scale in (2.0**-63, 1e-9, 0.7, 1.0, 3.0, 1e18, 2.0**64 - 2.0**40):
        stored = every.view(parts[0].dtype).clone()
        stored[:, 0] = 127 if codec.name == "int8" else 255  # the largest
        stored[stored == -128] = 127
        found = codec.decode((stored, torch.full((2, 1), scale)))
        assert torch.equal(codec.decode(codec.encode(found)), found)


def test_int8_is_as_near_as_it_says() -> None:
    values = _rows().clamp(min=-(2.0**64 - 2.0**40))
    stored, scale = Int8().encode(values)
    assert all(map(torch.equal, Int8().encode(_rows()), (stored, scale))), "the largest that there is"
    assert stored.dtype == torch.int8 and scale.dtype == torch.float32
    assert torch.equal(scale, torch.where(values.abs().amax(1) < 2.0**-100, 0.0, values.abs().amax(1)).unsqueeze(1))
    off = (Int8().decode((stored, scale)).double() - values.double()).abs()
    live = scale > 0
    assert (off <= torch.where(live, scale.double() / 64 / 2 * 1.01, 2.0**-100)).all(), "half a step, the widest"
    near_zero = values.abs() < scale / 64
    assert (off <= scale.double() / 240 / 2)[near_zero & live].all(), "half a step, close to 0"
    assert (off == 0)[values == 0].all()


def test_root8_is_as_near_as_it_says_and_never_0_where_there_was_more() -> None:
    values = _rows().abs()
    stored, scale = Root8().encode(values)
    assert stored.dtype == torch.uint8
    roots = values.double().sqrt()
    found = Root8().decode((stored, scale)).double().sqrt()
    live = (scale > 0) & (stored > 1)
    assert ((found - roots).abs() <= scale.double() / 255 / 2 * 1.001)[live].all()
    assert (stored > 0)[(values > 0) & (scale > 0)].all()
    assert (stored == 0)[values == 0].all()


# ---- a master --------------------------------------------------------------------------------------------------------


def _bits(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(torch.int32).view(torch.float32)


def test_a_master_of_24_bits_is_near() -> None:
    """In units of its parameter's last place: 1/512 off at most, and 1/256 close to the middle between two."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(0, 2**31, (2**20,), generator=generator).to(torch.int32).view(torch.float32)
    subnormals = torch.arange(0, 2**23, 7).to(torch.int32).view(torch.float32)
    powers = ((torch.arange(2, 255) << 23).view(-1, 1) + torch.arange(-(2**15), 2**15, 37)).to(torch.int32)
    for values in (random, subnormals, powers.view(torch.float32).reshape(-1)):
        values = values[values < _bits(0x7F7F8000)]  # whose parameters are finite
        values = torch.cat((values, -values))[: len(values) // ROW * 2 * ROW].view(-1, ROW)
        parameter = values.bfloat16()
        found = Split8().decode((*Split8().encode(values), parameter)).double()
        unit = torch.maximum(2.0 ** (parameter.double().abs().frexp().exponent - 8.0), torch.tensor(2.0**-133))
        off, away = (found - values.double()).abs() / unit, (values.double() - parameter.double()).abs() / unit
        assert off.max() <= 1 / 256 and off[away <= 127.5 / 256].max() == 1 / 512
        assert torch.equal(found.bfloat16(), parameter), "the parameter is the rounded master"
    for bits, kept in (
        (0, 0),
        (1, 0),
        (2**31 + 0x81, 2**31 + 0x100),
        (0x3F800080, 0x3F800000),  # ties, to even
        (0x3F800180, 0x3F800200),
        (0x3F7FFF81, 0x3F800000),  # a carry into the exponent
        (0x3F7F7F80, 0x3F7F7F00),  # the bound of 127, below the middle and above it
        (0x3F7F8000, 0x3F7F8100),
        (0x7F7F7FFF, 0x7F7F7F00),
        (0x7F7F8000, 0x7F800000),  # the parameter of these is inf
        (0x7F7FFFFF, 0x7F800000),
        (0x7F800000, 0x7F800000),
        (0xFF800000, 0xFF800000),
    ):
        (low,) = Split8().encode(_bits(bits).view(1, 1))
        found = Split8().decode((low, _bits(bits).bfloat16().view(1, 1)))
        assert torch.equal(found.view(torch.int32), _bits(kept).view(torch.int32).view(1, 1)), hex(bits)


# ---- an optimizer ----------------------------------------------------------------------------------------------------


def _gradient(index: int, step: int) -> Tensor:
    n = torch.Size(SHAPES[index]).numel()
    return (((torch.arange(n) * 5 + 3 * index + 7 * step) % 17 - 8) / 16).reshape(SHAPES[index])


def _make(dtype: torch.dtype) -> list[nn.Parameter]:
    return [nn.Parameter(_gradient(index, 9).to(dtype)) for index in range(len(SHAPES))]


class Oracle:
    """One parameter in rows, in one process: AdamW between decoding and encoding."""

    def __init__(self, parameter: Tensor, index: int, codecs: dict[str, Codec]) -> None:
        self._of_m, self._of_v, self._split = codecs["exp_avg"], codecs["exp_avg_sq"], codecs.get("master")
        self.numel, self.index, self.dtype = parameter.numel(), index, parameter.dtype
        self.p, m, v = torch.zeros(3, -(-self.numel // ROW), ROW)
        self.p.view(-1)[: self.numel] = parameter.detach().float().reshape(-1)
        self.m, self.v = self._of_m.encode(m), self._of_v.encode(v)

    def step(self, number: int) -> None:
        g = torch.zeros_like(self.p)
        g.view(-1)[: self.numel] = _gradient(self.index, number).to(self.dtype).float().reshape(-1)
        rule, one = RULES["adamw"], torch.ones(1, dtype=torch.float64)
        options = [own for (own,) in AdamW(**OPTIONS).read_groups([AdamW(**OPTIONS).defaults])]
        table = rule.table({n: one * x for n, x in zip(rule.coefficients, options, strict=True)}, one * (number + 1))
        columns = {name: value.float().view(1, 1) for name, value in table.items()}
        decoded = (self._of_m.decode(self.m), self._of_v.decode(self.v))
        self.p, (m, v) = rule.update(g * columns["grad_factor"], self.p, decoded, columns)
        self.m, self.v = self._of_m.encode(m), self._of_v.encode(v)
        if self._split is not None:
            self.p = self._split.decode([*self._split.encode(self.p), self.p.bfloat16()])

    def parameter(self) -> Tensor:
        return self.p.reshape(-1)[: self.numel].to(self.dtype)

    def state(self) -> dict[str, Tensor]:
        values = {"exp_avg": self._of_m.decode(self.m), "exp_avg_sq": self._of_v.decode(self.v)}
        if self.dtype != torch.float32:
            values["master"] = self.p
        return {name: value.reshape(-1)[: self.numel].reshape(SHAPES[self.index]) for name, value in values.items()}


def _train(params: list[nn.Parameter], opt: Any, steps: range, factor: int) -> None:
    """``factor``: rank 0 has all ranks' gradients, so that their average is exact."""
    for step in steps:
        terms = [(p * (factor * _gradient(i, step)).to(p.dtype)).float().sum() for i, p in enumerate(params)]
        sum(terms[1:], terms[0]).backward()
        opt.step()
        opt.zero_grad()


def _rule(codecs: dict[str, Codec]) -> UpdateRule:
    return AdamW(**OPTIONS).with_codecs(codecs)


def _life(
    rank: int, world_size: int, stage: int, dtype: torch.dtype, store: str | None, codecs: dict[str, Codec], folder: str
) -> Any:
    """Train, save in three ways, train on. From each of them train on in a new optimizer."""
    import zero_optim
    from zero_optim import checkpoint

    factor = world_size if rank == 0 else 0
    place = {"stage": stage, "bucket_cap_mb": 0.001}
    offload = f"nvme:{folder}" if store == "nvme" else store
    params = _make(dtype)
    master = None if "master" in codecs else "fp32"
    opt = zero_optim.ShardedOptimizer(params, _rule(codecs), **place, state_offload=offload, master=master)
    with oracle_float64.watch(opt) as watching:
        _train(params, opt, range(3), factor)
        report = watching.report()
    memory = opt.stats()["memory"]
    full = zero_optim.full_state_dict(opt, rank=None)
    groups, own = opt.state_dict()["param_groups"], copy.deepcopy(opt.state_dict()["state"])
    checkpoint.save(f"{folder}/coded", nn.ParameterList(params), opt)
    middle = [p.detach().clone() for p in params]
    opt.engine.reducer.restore_order(opt.engine.reducer.layout.order[::-1])  # state moves to other buckets
    moved = zero_optim.full_state_dict(opt, rank=None)["state"]
    _train(params, opt, range(3, 5), factor)
    opt.close()

    loads = {
        "own": lambda model, opt: opt.load_state_dict({"state": own, "param_groups": groups}),
        "full": lambda model, opt: zero_optim.load_full_state_dict(opt, full if rank == 0 else None),
        "checkpoint": lambda model, opt: checkpoint.load(f"{folder}/coded", nn.ParameterList(model), opt),
    }
    found: dict[str, Any] = {"moved": moved}
    for how, load in loads.items():
        copies = [nn.Parameter(p.clone()) for p in middle]
        again = zero_optim.ShardedOptimizer(copies, _rule(codecs), master=master, **place)
        load(copies, again)
        _train(copies, again, range(3, 5), factor)
        found[how] = [p.detach().clone() for p in copies]
        again.close()
    return [p.detach().clone() for p in params], full["state"], memory, report, found


@pytest.mark.parametrize(
    ("world_size", "stage", "dtype", "store", "codecs"),
    slow_after(
        5,
        [
            (1, 2, torch.float32, None, CODECS),
            (2, 0, torch.bfloat16, "paged", SPLIT),
            (2, 1, torch.bfloat16, "cpu", CODECS),
            (3, 1, torch.bfloat16, "nvme", SPLIT8),
            (1, 2, torch.bfloat16, None, SPLIT),
            (1, 2, torch.bfloat16, None, SPLIT8),
            (2, 2, torch.bfloat16, "cpu", SPLIT8),
        ],
    ),
)
def test_state_that_is_stored_by_a_codec_is_kept_shown_saved_and_counted(
    world_size: int, stage: int, dtype: torch.dtype, store: str | None, codecs: dict[str, Codec], tmp_path: Path
) -> None:
    oracles = [Oracle(parameter, index, codecs) for index, parameter in enumerate(_make(dtype))]
    for step in range(3):
        for oracle in oracles:
            oracle.step(step)
    state = [oracle.state() for oracle in oracles]
    for step in range(3, 5):
        for oracle in oracles:
            oracle.step(step)
    by_rank = run_ranks(world_size, _life, stage, dtype, store, codecs, str(tmp_path))
    for params, full, _, report, found in by_rank:
        assert report.elements.of_bound <= 1 and report.compared
        _same_state(full, state)
        _same_state(found["moved"], state)
        for seen in (params, *(found[how] for how in ("own", "full", "checkpoint"))):
            for parameter, oracle in zip(seen, oracles, strict=True):
                assert torch.equal(parameter.reshape(-1), oracle.parameter())
    if store is None:
        numel, rows = sum(o.numel for o in oracles), sum(len(o.p) for o in oracles)
        memory = by_rank[0][2]
        for kind in ("exp_avg_int8", "exp_avg_sq_root8"):
            assert memory[kind] == numel
        assert memory["exp_avg_scale"] == memory["exp_avg_sq_scale"] == 4 * rows
        assert "exp_avg" not in memory
        assert memory.get("master_low") == (2 * numel if codecs is SPLIT else None)
        assert memory.get("master_low8") == (numel if codecs is SPLIT8 else None)
        assert memory.get("master") == (0 if dtype == torch.float32 else None)


def _same_state(found: dict[int, Any], wanted: list[dict[str, Tensor]]) -> None:
    for index, entry in enumerate(wanted):
        for kind, value in entry.items():
            assert torch.equal(found[index][kind], value), (index, kind)


FORMS: dict[str, dict[str, Codec]] = {
    "fp32": {},
    "split": SPLIT,
    "split8": SPLIT8,
    "split8, bf16": {"exp_avg": Bf16(), "exp_avg_sq": Bf16(), "master": Split8()},
}


def test_any_form_loads_into_any_other(tmp_path: Path) -> None:
    """Masters and moments: as they are where the form is the same, else the values, rounded as the new form does."""
    import zero_optim
    from zero_optim import checkpoint

    params = {name: nn.ParameterList(_make(torch.bfloat16)) for name in FORMS}
    opts = {
        name: zero_optim.ShardedOptimizer(params[name], _rule(codecs), master="fp32") for name, codecs in FORMS.items()
    }
    saved = {}
    for name, opt in opts.items():
        _train([*params[name]], opt, range(3), 1)
        checkpoint.save(tmp_path / name, params[name], opt)
        saved[name] = (zero_optim.full_state_dict(opt), copy.deepcopy(opt.state_dict()), copy.deepcopy([*params[name]]))
    for source, (full, own, model) in saved.items():
        for name, opt in opts.items():
            for load in (
                lambda opt, name, full=full: zero_optim.load_full_state_dict(opt, full),
                lambda opt, name, own=own: opt.load_state_dict(copy.deepcopy(own)),
                lambda opt, name, source=source: checkpoint.load(tmp_path / source, params[name], opt),
            ):
                with torch.no_grad():
                    for p, of_model in zip(params[name], model, strict=True):
                        p.copy_(of_model)
                load(opt, name)
                found = zero_optim.full_state_dict(opt)["state"]
                for index, entry in full["state"].items():
                    for kind in ("master", "exp_avg", "exp_avg_sq"):
                        value, codec = entry[kind].reshape(-1), FORMS[name].get(kind)
                        if codec is not None:
                            read = [value.bfloat16()] if codec.reads_parameter else []
                            value = codec.decode_flat(StateTensor(kind), [*codec.encode_flat(value), *read])
                        assert torch.equal(found[index][kind].reshape(-1), value), (source, name, index, kind)
    for opt in opts.values():
        opt.close()


# ---- slices ----------------------------------------------------------------------------------------------------------


def _sliced(rank: int, world_size: int, tensor: int, folder: str, save: bool, codecs: dict[str, Codec]) -> Any:
    """A small model cut over ``tensor`` ranks, of which no slice has a whole number of rows."""
    import torch.distributed.checkpoint as dcp
    import zero_optim
    from tensor_cases import Gpt, batch, cut, losses, make_mesh
    from zero_optim import checkpoint

    torch.manual_seed(0)
    model = Gpt(1).bfloat16()
    mesh = None
    if tensor > 1:
        mesh = make_mesh(world_size // tensor, tensor)
        cut(model, mesh["tp"])
    opt = zero_optim.ShardedOptimizer(
        model.named_parameters(), _rule(codecs), stage=2, mesh=None if mesh is None else mesh["dp"], bucket_cap_mb=0.01
    )
    if not save:
        checkpoint.load(folder, model, opt)
        found = zero_optim.full_state_dict(opt, rank=None)["state"]
        opt.close()
        return found
    for number in range(2):
        with losses(sequence=tensor > 1):
            x, y = batch(rank // tensor, number)
            nn.functional.cross_entropy(model(x, (0,)).flatten(0, 1).float(), y.flatten()).backward()
        opt.step()
        opt.zero_grad()
    checkpoint.save(folder, model, opt)
    full = zero_optim.full_state_dict(opt, rank=None)["state"]
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    again = zero_optim.full_state_dict(opt, rank=None)["state"]
    for index, entry in full.items():
        assert all(torch.equal(entry[kind], again[index][kind]) for kind in entry)
    if tensor > 1:
        with pytest.raises(BaseException, match="values for rows of this tensor-parallel rank's slice"):
            dcp.save({"state": opt.state_dict()["state"]}, checkpoint_id=f"{folder}/dcp")
    opt.close()
    return full


@pytest.mark.parametrize(
    "meshes", slow_after(1, [[(2, 2, SPLIT), (1, 1, {})], [(2, 1, SPLIT), (4, 4, {})]]), ids=[2, 4]
)
def test_rows_of_slices_load_on_any_other_mesh(meshes: Any, tmp_path: Path) -> None:
    folder = str(tmp_path / "saved")
    saved = run_ranks(4, _sliced, 2, folder, True, SPLIT, timeout=120)
    for ranks, tensor, codecs in meshes:
        for found in run_ranks(ranks, _sliced, tensor, folder, False, codecs, timeout=120):
            for index, entry in saved[0].items():
                for kind, value in entry.items():
                    if codecs and kind in CODECS and tensor != 2:  # rows are others, and so are their scales
                        largest = value.abs().max()
                        assert (found[index][kind] - value).abs().max() <= largest / 32
                    else:
                        assert torch.equal(found[index][kind], value), (index, kind, ranks, tensor)
    (written,) = (tmp_path / "saved").rglob("index.json")
    index = json.loads(written.read_text())
    assert index["contents"]["optimizers"][0]["codecs"] == {name: codec.name for name, codec in CODECS.items()}, (
        "masters are fp32"
    )


# ---- what is refused -------------------------------------------------------------------------------------------------


class Other(Int8):
    name = "other"


@pytest.mark.parametrize(
    ("codecs", "error", "told"),
    [
        ({"momentum": Int8()}, ValueError, "a codec for 'momentum', and the state is master, exp_avg, exp_avg_sq"),
        ({"master": Int8()}, ValueError, "'master' cannot be stored by the codec 'int8'"),
        ({"exp_avg": Split()}, ValueError, "'exp_avg' cannot be stored by the codec 'split'"),
        ({"exp_avg": "int8"}, TypeError, "the codec of 'exp_avg' is a str: give one of "),
        ({"exp_avg": Other()}, TypeError, "the codec of 'exp_avg' is a Other: give one of "),
    ],
)
def test_a_codec_that_cannot_be_is_refused(codecs: Any, error: type[Exception], told: str) -> None:
    import zero_optim

    with pytest.raises(error, match=told):
        zero_optim.ShardedOptimizer(_make(torch.float32), AdamW().with_codecs(codecs))


@pytest.mark.parametrize("master", ["split", "split8"])
def test_a_model_in_fp32_is_made_of_split_masters(master: str, tmp_path: Path) -> None:
    """Loaded without an optimizer, exported, and walked through."""
    import zero_optim
    from safetensors.torch import load_file
    from zero_optim import checkpoint
    from zero_optim.checkpoint.hugging_face import export

    model = nn.ParameterList(_make(torch.bfloat16))
    opt = zero_optim.ShardedAdamW(model.named_parameters(), lr=0.01, master=master, state_dtype="int8")
    _train([*model], opt, range(3), 1)
    full = zero_optim.full_state_dict(opt)["state"]
    masters = {name: full[index]["master"] for index, (name, _) in enumerate(model.named_parameters())}
    assert not torch.equal(masters["0"], model[0].float())
    checkpoint.save(tmp_path / "saved", model, opt)
    export(tmp_path / "saved", tmp_path / "out", dtype=torch.float32)
    fine = nn.ParameterList(_make(torch.float32))
    checkpoint.load(tmp_path / "saved", fine)
    walked = dict(zero_optim.iter_full_parameters(model, opt, dtype=torch.float32))
    for found in (load_file(tmp_path / "out" / "model.safetensors"), dict(fine.named_parameters()), walked):
        assert found.keys() == masters.keys()
        assert all(torch.equal(found[name], masters[name]) for name in masters)
    opt.close()
