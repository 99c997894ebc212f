"""`foreach_step` on encoded state and split masters: the written arithmetic, and the same bits on every backend."""

import itertools
import math
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from kernel_cases import ISAS, EncodedShards, awkward, backend, joined, rule_table, same_bits, threads
from torch import Tensor

import zero_kernels
from zero_kernels import ROW, RULES, codecs

NAMES = ["reference", *ISAS]
every_backend = pytest.mark.parametrize("name", NAMES)
every_low = pytest.mark.parametrize("low", codecs.LOWS, ids=["int16", "int8"])


@pytest.mark.parametrize("forms", [(torch.int8, torch.uint8), (torch.bfloat16, torch.bfloat16)], ids=["8", "bf16"])
@every_low
def test_threads_share_rows_without_changing_a_bit(low: torch.dtype, forms: tuple[torch.dtype, ...]) -> None:
    of = ("adamw", (0, 3 * ROW, 100_003, 77_777), torch.bfloat16, torch.bfloat16)
    shards = EncodedShards(*of, forms=forms, low=low)
    want = shards.run("reference")
    for isa in ISAS:
        with threads(3):
            assert all(map(same_bits, want, shards.run(isa))), isa


# ---- the arithmetic, written anew, an element at a time --------------------------------------------------------------

F = np.float32
LARGEST = F(2.0**64 - 2.0**40)


def int8_row(values: Sequence[np.float32]) -> tuple[list[int], np.float32]:
    values = [np.clip(v, -LARGEST, LARGEST) if np.isfinite(v) else v for v in values]
    scale = max((abs(v) for v in values), key=lambda v: int(v.view(np.uint32)))
    if scale < F(2.0**-100):
        return [0] * len(values), F(0)
    if not np.isfinite(scale):
        return [0] * len(values), scale
    xs = [v / scale for v in values]
    return [int(np.rint(F(127) * ((x + x) / (F(1) + abs(x))))) for x in xs], scale


def root8_row(values: Sequence[np.float32]) -> tuple[list[int], np.float32]:
    roots = [LARGEST if v == np.inf else np.sqrt(v) for v in values]
    scale = max((abs(r) for r in roots), key=lambda r: int(r.view(np.uint32)))
    if scale < F(2.0**-63):
        return [0] * len(values), F(0)
    if not np.isfinite(scale):
        return [0] * len(values), scale
    return [max(int(np.rint(F(255) * (r / scale))), int(r > 0)) for r in roots], scale


def from_int8(stored: int, scale: np.float32) -> np.float32:
    y = F(stored) / F(127)
    return y / (F(2) - abs(y)) * scale


def from_root8(stored: int, scale: np.float32) -> np.float32:
    root = F(stored) / F(255) * scale
    return root * root


def rows_that_hurt() -> Tensor:
    """[rows, 128] of every magnitude, ties of the rounding, subnormals, the largest, zeros, rows not finite."""
    generator = torch.Generator().manual_seed(4)
    random = torch.randn(60, ROW, generator=generator) * torch.logspace(-42, 38, 60, dtype=torch.float64).unsqueeze(1)
    spread = torch.randn(30, ROW, generator=generator) * torch.logspace(-30, 0, ROW)
    spread[20:] *= torch.logspace(-36, 38, 10).unsqueeze(1) / spread[20:].abs().amax(1, keepdim=True)
    spread[:20, ::9] = -0.0
    alone = torch.zeros(11, ROW)
    alone[range(11), range(11)] = torch.tensor(
        [3.4028235e38, -3.4028235e38, 2.0**-149, 2.0**-126, 2.0**-100, -(2.0**-101), math.inf, -math.inf, math.nan]
        + [-0.0, 1.0]
    )
    halves = torch.arange(ROW) / 2 + torch.tensor([[0.0], [63.5], [127.25]])  # of a largest of 127, or 255
    halves[:, -1] = torch.tensor([127.0, 127.0, 255.0])
    both = torch.stack([torch.full((ROW,), math.inf), torch.full((ROW,), 5.0), torch.zeros(ROW)])
    both[0, 3] = math.nan
    around = torch.tensor([-(2.0**64), 2.0**64 - 2.0**40, 2.0**65, -3e38, 1e-40, 0.0, 1.0, -7e18]).repeat(2, ROW // 8)
    around[1, 9] = math.inf
    return torch.cat((random.float(), spread, alone, halves, halves**2, both, around))


@every_backend
def test_rows_are_encoded_as_the_docs_write_it(name: str) -> None:
    """By an SGD whose buffer was 0: keep -1 and take 1, so that the new buffer is the gradient, -0 as well."""
    values = rows_that_hurt()
    positive = values.abs()
    positive[positive == 0] = -0.0
    values = torch.cat((values, values.abs(), positive))
    table = torch.zeros(1, 12)
    columns = RULES["sgd"].columns
    for column in ("take", "active", "grad_factor"):
        table[0, columns.index(column)] = 1.0
    table[0, columns.index("keep")] = -1.0
    rows, slots = len(values), torch.zeros(len(values), dtype=torch.int32)
    with np.errstate(all="ignore"):
        for dtype, encode, decode in ((torch.int8, int8_row, from_int8), (torch.uint8, root8_row, from_root8)):
            stored, scale = torch.zeros(rows * ROW, dtype=dtype), torch.zeros(rows)
            with backend(name):
                lists = ([values.view(-1)], [torch.zeros(rows * ROW)], [stored], [], [slots], table)
                zero_kernels.foreach_step("sgd", *lists, scales=[scale])
            for row, (numbers, got) in enumerate(zip(values.numpy(), stored.view(rows, ROW).tolist(), strict=True)):
                wanted, wanted_scale = encode(numbers)
                assert got == wanted, (name, dtype, row)
                assert same_bits(scale[row], torch.tensor(wanted_scale)), (name, dtype, row)
            # Of what is stored: keep 1, so that the step by lr 1 shows the decoded buffer.
            reads = table.clone()
            for column, x in (("keep", 1.0), ("take", 0.0), ("lr", 1.0)):
                reads[0, columns.index(column)] = x
            every = torch.arange(2 * ROW).to(torch.uint8).view(dtype)
            scales, twice = torch.tensor([0.7, 3e18]), torch.zeros(2, dtype=torch.int32)
            master = torch.zeros(2 * ROW)
            with backend(name):
                lists = ([torch.zeros(2 * ROW)], [master], [every.clone()], [], [twice], reads)
                zero_kernels.foreach_step("sgd", *lists, scales=[scales.clone()])
            of_rows = scales.numpy().repeat(ROW)
            want = [F(0) - decode(x, s) for x, s in zip(every.tolist(), of_rows, strict=True)]
            assert same_bits(master, torch.tensor(np.array(want))), (name, dtype)


@every_backend
@every_low
def test_a_split_master_is_its_two_halves(low: torch.dtype, name: str) -> None:
    """From -0 a step of lr 1 writes any value. One of no gradient reads it, and writes it again."""
    exact = torch.arange(-(2**31), 2**31, 65537 * 5, dtype=torch.int64).to(torch.int32).view(torch.float32)
    aways = (-32768, -32767, -32641, -32640, -384, -128, -1, 0, 1, 128, 384, 32639, 32640, 32641, 32767)
    ends = [[(high << 16) + away for high in range(-(2**15), 2**15, 3)] for away in aways]
    ends = torch.tensor(ends, dtype=torch.int64).flatten().to(torch.int32).view(torch.float32)
    wanted = torch.cat((exact, ends, awkward(3000, torch.float32, 1)))
    numel = len(wanted)
    table = rule_table(RULES["sgd_plain"])[:1].clone()
    columns = RULES["sgd_plain"].columns
    table[0, columns.index("lr")] = 1.0
    high, lows = torch.full((numel,), -0.0, dtype=torch.bfloat16), torch.zeros(numel, dtype=low)
    slots = torch.zeros(-(-numel // ROW), dtype=torch.int32)
    with backend(name):
        zero_kernels.foreach_step("sgd_plain", [-wanted], [lows], [], [high], [slots], table)
        assert same_bits(high, wanted.bfloat16())
        away = wanted.view(torch.int32) - (wanted.bfloat16().view(torch.int16).int() << 16)
        away = away.masked_fill(~wanted.bfloat16().isfinite(), 0)
        if low == torch.int16:
            assert torch.equal(lows.int(), away - away.sign() * (away.abs() == 32768).int()), "of a tie 32767"
        else:
            assert torch.equal(lows.int(), (away / 256).round().clamp(-127, 127).int()), "256ths, to nearest even"
        assert ((away.abs() == 32768).sum() > 10_000) and high.isinf().sum() > 100
        stored = joined(high, lows)
        assert torch.equal(stored.isinf(), high.isinf()), "an inf is its own master"
        finite = high.isfinite()
        moved = (stored.view(torch.int32) - wanted.view(torch.int32)).abs()[finite]
        clamped = (away.abs() > (32767 if low == torch.int16 else 32640))[finite]
        assert (moved[clamped].max(), moved[~clamped].max()) == ((1, 0) if low == torch.int16 else (256, 128))
        again = (high.clone(), lows.clone())
        zero_kernels.foreach_step("sgd_plain", [torch.zeros(numel)], [lows], [], [high], [slots], table)
    assert same_bits(codecs.join_master(*again), stored)
    assert same_bits(high, again[0]) and torch.equal(lows, again[1])


VECTORS = {
    "avx2": ["-mavx2", "-mf16c"],
    "avx512": ["-DZK_ISA_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="compiled by g++")
@pytest.mark.parametrize("isa", [isa for isa in VECTORS if isa in ISAS])
def test_every_fp32_is_split_and_joined(isa: str, tmp_path: Path) -> None:
    command = ["g++", "-std=c++20", "-O3", "-w", "-ffp-contract=off", *VECTORS[isa]]
    subprocess.run([*command, str(Path(__file__).with_name("split_masters.cpp")), "-o", tmp_path / "run"], check=True)
    done = subprocess.run([tmp_path / "run"], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"] * 6, "how many are wrong: pairs, vectors, by function; then of 8 bits"


# ---- what stays, and what is refused ---------------------------------------------------------------------------------


@every_backend
def test_skipped_steps_and_rows_that_are_not_live_stay(name: str) -> None:
    for low, found in itertools.product((None, *codecs.LOWS), (1.0, math.nan, 0.0)):
        of = ("adamw", (5 * ROW + 3, 200), torch.bfloat16, torch.bfloat16)
        shards = EncodedShards(*of, forms=(torch.int8, torch.bfloat16), low=low)
        shards.grads[0][ROW] = math.inf
        shards.row_slots = [torch.tensor([-1, 1, 3, -1, 3, 3], dtype=torch.int32), torch.tensor([3, -1]).int()]
        marks = torch.zeros(4, dtype=torch.int32)
        after = shards.run(name, found_inf=torch.tensor([found]), nonfinite_slots=marks)
        stay = list(map(same_bits, shards.written, after))
        assert all(stay) == (found != 0)
        assert marks.any() == (found != 0)
        if found == 0:  # slot 1's row alone has changed, in the tensors of the first shard
            for before, now in zip(shards.written, after, strict=True):
                numel = 1 if len(before) in (2, 6) else ROW
                keeps = torch.ones(len(before), dtype=torch.bool)
                keeps[numel : 2 * numel] = len(before) not in (5 * ROW + 3, 6)
                assert same_bits(before[keeps], now[keeps])


@every_backend
def test_what_is_behind_the_last_element_does_not_count(name: str) -> None:
    """There 0 / 0 is computed, as eps is 0; or 0 * inf, where the elements themselves are inf, as is their scale."""
    for scale, param in ((0.37, torch.bfloat16), (math.inf, None)):
        shards = EncodedShards("adamw", (5, 200), torch.float32, param, calm=True, forms=(torch.int8, torch.uint8))
        shards.row_slots = [torch.full((n,), 2, dtype=torch.int32) for n in (1, 2)]
        want, got = (shards.run(of, grad_scale=torch.tensor(scale)) for of in ("reference", name))
        assert all(map(same_bits, want, got))
        assert bool(got[-4].isinf()) == (scale == math.inf)


@every_backend
def test_a_row_that_is_not_finite_spoils_no_other(name: str) -> None:
    shards = EncodedShards(*("adamw", (3 * ROW,), torch.float32, None), calm=True, forms=(torch.int8, torch.uint8))
    shards.row_slots = [torch.zeros(3, dtype=torch.int32)]
    want = shards.run(name)
    shards.grads[0][ROW + 5] = math.nan
    got = shards.run(name)
    for before, after in zip(want, got, strict=True):
        each = len(before) // 3
        assert same_bits(before[:each], after[:each]) and same_bits(before[2 * each :], after[2 * each :])
        middle = after[each : 2 * each]
        if each == 1:
            assert middle.isnan().all()
        elif not middle.is_floating_point():
            assert not middle.any()


@every_backend
@pytest.mark.parametrize("rule", ["adamw", "amsgrad"])
def test_a_finite_gradient_that_overflows_a_second_moment_is_kept_as_the_largest(rule: str, name: str) -> None:
    """In two steps of four, in every second row; the others' gradients are usual, or tiny."""
    forms = (torch.int8, torch.uint8, torch.uint8)[: len(RULES[rule].states)]
    for low in (None, *codecs.LOWS):
        shards = EncodedShards(rule, (6 * ROW,), torch.float32, low and torch.bfloat16, calm=True, forms=forms, low=low)
        shards.row_slots = [torch.ones(6, dtype=torch.int32)]
        shards.grads[0][3 * ROW : 4 * ROW] *= 1e-30
        usual, twin = shards.lists()
        lists, written = shards.lists()
        lists[0] = [shards.grads[0].clone()]
        *_, v = scales = written[-len(forms) :]
        with backend(name):
            for huge in (None, 1e22, torch.finfo(torch.float32).max, None):
                lists[0][0][5 :: 2 * ROW] = shards.grads[0][5 :: 2 * ROW] if huge is None else huge
                for of in (usual, lists):
                    torch.ops.zero_kernels.foreach_step(rule, *of)
                if huge:
                    assert v[::2].tolist() == [2.0**64 - 2.0**40] * 3
        decoded = codecs.decode_root8(written[len(forms)].view(6, ROW), v.view(6, 1))
        assert (decoded[::2, 5] > 3e38).all() and (decoded[::2, 6:] < 1e34).all() and decoded.isfinite().all()
        assert all(tensor.float().isfinite().all() for tensor in (*written, *scales))
        for changed, same in zip(written, twin, strict=True):
            assert same_bits(changed.view(6, -1)[1::2], same.view(6, -1)[1::2])


def arguments() -> dict[str, object]:
    """Of one shard of AdamW, by name; int8 and uint8 moments, and a split master."""
    return {
        "grads": [torch.zeros(200)],
        "masters": [torch.zeros(200, dtype=torch.int16)],
        "states": [torch.zeros(200, dtype=torch.int8), torch.zeros(200, dtype=torch.uint8)],
        "params_out": [torch.zeros(200, dtype=torch.bfloat16)],
        "row_slots": [torch.zeros(2, dtype=torch.int32)],
        "hyper": rule_table(RULES["adamw"]),
        "scales": [torch.zeros(2), torch.zeros(2)],
    }


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"scales": None}, ValueError, "scales must be one for each int8 or uint8 state: 2 of them, 0 scales"),
        ({"scales": [torch.zeros(2)]}, ValueError, "2 of them, 1 scales"),
        ({"scales": [torch.zeros(2), torch.zeros(3)]}, ValueError, "a scale must have 2 elements, got 3"),
        ({"scales": [torch.zeros(2), torch.zeros(2).half()]}, TypeError, "a scale must be float32, got float16"),
        ({"params_out": []}, TypeError, "the low part of a split master: param_out must be its high half, in bfloat16"),
        ({"params_out": [torch.zeros(200)]}, TypeError, "master is int16, the low part of a split master"),
        (
            {"masters": [torch.zeros(200, dtype=torch.int8)], "params_out": [torch.zeros(200).half()]},
            TypeError,
            "master is int8, the low part of a split master: param_out must be its high half, in bfloat16",
        ),
        (
            {"states": [torch.zeros(200, dtype=torch.int16), torch.zeros(200)], "scales": None},
            TypeError,
            "exp_avg must be float32 or bfloat16 or int8 or uint8, got int16",
        ),
        ({"masters": [torch.zeros(200).half()]}, TypeError, "master must be float32 or int16 or int8, got float16"),
    ],
)
def test_what_does_not_fit_is_named(changed: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        zero_kernels.foreach_step("adamw", **arguments() | changed)  # type: ignore[arg-type]


def test_a_form_is_that_of_all_shards() -> None:
    given = arguments()
    two = {name: of * 2 if isinstance(of, list) else of for name, of in given.items()}
    mixed = [*two["states"][:2], two["states"][1], two["states"][0]]  # type: ignore[index]
    with pytest.raises(TypeError, match="states 'exp_avg' must have one dtype: make a call for each dtype"):
        zero_kernels.foreach_step("adamw", **two | {"states": mixed})  # type: ignore[arg-type]
    mixed = [torch.zeros(200, dtype=low) for low in codecs.LOWS]
    with pytest.raises(TypeError, match="masters must have one dtype: make a call for each dtype"):
        zero_kernels.foreach_step("adamw", **two | {"masters": mixed})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("forms", "low"),
    [((torch.int8, torch.uint8), torch.int16), ((torch.int8, torch.uint8), torch.int8), ((torch.bfloat16,) * 2, None)],
    ids=str,
)
def test_a_later_prepared_call_has_the_bits_of_the_op(forms: tuple[torch.dtype, ...], low: torch.dtype | None) -> None:
    shards = EncodedShards("adamw", (300, 5), torch.bfloat16, torch.bfloat16, forms=forms, low=low)
    want = shards.run("reference")
    prepared = zero_kernels.Prepared("foreach_step")
    for _ in range(2):
        lists, written = shards.lists()
        versions = [tensor._version for tensor in written]
        prepared("adamw", *lists)
        assert all(map(same_bits, want, written))
        assert all(tensor._version > before for tensor, before in zip(written, versions, strict=True))
    *lists, scales, keys = shards.lists()[0]
    if scales:
        for bad in ([*scales[:3], torch.zeros(1).double()], scales[:3], [*scales, torch.zeros(1)], None):
            with pytest.raises(RuntimeError, match="zero_kernels: "):
                prepared("adamw", *lists, bad, keys)
    else:
        for bad in ([torch.zeros(3, dtype=torch.int32)] * 2, keys[:1], [of_shard.float() for of_shard in keys], None):
            with pytest.raises(RuntimeError, match="zero_kernels: "):
                prepared("adamw", *lists, scales, bad)
