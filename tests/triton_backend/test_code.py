"""What the ops launch, compiled for three architectures without a GPU: questions put to PTX and to machine code."""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from kernel_cases import FLOATS

pytest.importorskip("triton.language", reason="triton is not installed")

import aot
import triton.language as tl
from triton import jit

from zero_kernels import ROW, RULES, triton

pytestmark = pytest.mark.kernels

if triton.OPS and triton.common.INTERPRETED:
    pytest.skip("TRITON_INTERPRET=1: nothing is compiled in this process", allow_module_level=True)

BF16, FP32 = torch.bfloat16, torch.float32
NAMES = {torch.float16: "fp16", BF16: "bf16", FP32: "fp32", None: "none"}


def adam_step(
    grad: torch.dtype, param: torch.dtype | None, numel: int = 16 * ROW, offset: int = 0, bare: bool = False
) -> None:
    """`offset` misaligns all tensors by as many elements; `bare` leaves out what is optional."""
    master, *states = [torch.empty(numel + offset)[offset:] for _ in range(3)]
    optional = (None,) * 3 if bare else (torch.ones(1), torch.ones(1), torch.zeros(2, dtype=torch.int32))
    triton.OPS["foreach_step"](
        "adamw",
        [torch.empty(numel + offset, dtype=grad)[offset:]],
        [master],
        states,
        [] if param is None else [torch.empty(numel + offset, dtype=param)[offset:]],
        [torch.zeros(-(-numel // ROW), dtype=torch.int32)],
        torch.zeros(2, 12),
        *optional,
    )


def foreach_step(rule: str, grad: torch.dtype, param: torch.dtype | None) -> None:
    numel = 16 * ROW
    triton.OPS["foreach_step"](
        rule,
        [torch.empty(numel, dtype=grad)],
        [torch.empty(numel)],
        [torch.empty(numel) for _ in RULES[rule].states],
        [] if param is None else [torch.empty(numel, dtype=param)],
        [torch.zeros(16, dtype=torch.int32)],
        torch.zeros(2, 12),
        *(torch.ones(1), torch.ones(1), torch.zeros(2, dtype=torch.int32)),
    )


def encoded_step(
    *forms: torch.dtype,
    rule: str = "adamw",
    master: torch.dtype = FP32,
    grad: torch.dtype = BF16,
    numel: int = 16 * ROW,
) -> None:
    """States of these forms; `master`: of an integer dtype the low part of a split one."""
    rows = -(-numel // ROW)
    triton.OPS["foreach_step"](
        rule,
        [torch.empty(numel, dtype=grad)],
        [torch.empty(numel, dtype=master)],
        [torch.empty(numel, dtype=form) for form in forms],
        [torch.empty(numel, dtype=BF16)],
        [torch.zeros(rows, dtype=torch.int32)],
        torch.zeros(2, 12),
        *(torch.ones(1), torch.ones(1), torch.zeros(2, dtype=torch.int32)),
        [torch.zeros(rows) for form in forms if form.itemsize == 1],
        [torch.zeros(rows, dtype=torch.int32)] if BF16 in forms else None,
    )


def ema(master: torch.dtype, each: int = 2, numel: int = 16 * ROW, offset: int = 0) -> None:
    triton.OPS["ema"](
        [torch.empty(numel + offset)[offset:] for _ in range(each)],
        [torch.empty(numel + offset, dtype=master)[offset:]],
        [] if master.is_floating_point else [torch.empty(numel + offset, dtype=BF16)[offset:]],
        [torch.zeros(-(-numel // ROW), dtype=torch.int32)],
        torch.zeros(2, each),
    )


def pack(bucket: torch.dtype, flags: bool) -> None:
    nonfinite = torch.zeros(1, dtype=torch.int32) if flags else None
    triton.OPS["pack"]([torch.empty(5000)], [0], torch.empty(5000, dtype=bucket), 0.5, nonfinite)


def unpack(bucket: torch.dtype) -> None:
    triton.OPS["unpack"](torch.empty(5000, dtype=bucket), [0], [torch.empty(5000)], 0.5)


def grad_stats(norm: float, numel: int = 10_000) -> None:
    triton.OPS["grad_stats"]([torch.empty(numel, device="meta")], norm)


def hyper_table(full: bool) -> None:
    group, active = torch.zeros(3, dtype=torch.int32), torch.ones(3, dtype=torch.bool)
    coefficients, step = torch.zeros(7, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    triton.OPS["hyper_table"](coefficients, group if full else None, step, active if full else None, torch.empty(3, 12))


def symmetric_product(rows: int, columns: int, added: bool = True, transposed: bool = False) -> None:
    x = torch.empty(2, columns, rows, dtype=BF16).mT if transposed else torch.empty(2, rows, columns, dtype=BF16)
    triton.symmetric.symmetric_product(x, x.mT, torch.empty(2, rows, rows, dtype=BF16) if added else None, 2.0, -3.0)


partial = functools.partial
CALLS: dict[str, Callable[[], None]] = {
    **{
        f"adam_step-{NAMES[grad]}-{NAMES[param]}": partial(adam_step, grad, param)
        for grad, param in itertools.product(FLOATS, (*FLOATS, None))
    },
    "adam_step-ragged": partial(adam_step, BF16, BF16, 16 * ROW + 1),
    "adam_step-misaligned": partial(adam_step, BF16, BF16, offset=1),
    "adam_step-bare": partial(adam_step, BF16, BF16, bare=True),
    **{f"foreach_step-{rule}": partial(foreach_step, rule, BF16, BF16) for rule in RULES if rule != "adamw"},
    "encoded_step-8": partial(encoded_step, torch.int8, torch.uint8),
    "encoded_step-8-split": partial(encoded_step, torch.int8, torch.uint8, master=torch.int16),
    "encoded_step-8-split8": partial(encoded_step, torch.int8, torch.uint8, master=torch.int8),
    "encoded_step-8-fp32": partial(encoded_step, torch.int8, torch.uint8, grad=FP32),
    "encoded_step-8-ragged": partial(encoded_step, torch.int8, torch.uint8, numel=16 * ROW + 1),
    "encoded_step-bf16": partial(encoded_step, BF16, BF16, master=torch.int16),
    "encoded_step-lion": partial(encoded_step, torch.int8, rule="lion", master=torch.int16),
    **{f"ema-{NAMES[dtype]}": partial(ema, dtype) for dtype in FLOATS},
    "ema-split": partial(ema, torch.int16),
    "ema-split8": partial(ema, torch.int8),
    "ema-8": partial(ema, FP32, 8),
    "ema-ragged": partial(ema, FP32, 2, 16 * ROW + 1),
    "ema-misaligned": partial(ema, FP32, offset=1),
    **{f"pack-{NAMES[dtype]}": partial(pack, dtype, True) for dtype in FLOATS},
    "pack-without-flags": partial(pack, BF16, False),
    **{f"unpack-{NAMES[dtype]}": partial(unpack, dtype) for dtype in FLOATS},
    **{f"grad_stats-{norm}": partial(grad_stats, norm) for norm in (1.0, 2.0, float("inf"))},
    **{f"grad_stats-{norm}-large": partial(grad_stats, norm, 2**28) for norm in (2.0, float("inf"))},
    "hyper_table": partial(hyper_table, True),
    "hyper_table-bare": partial(hyper_table, False),
    "symmetric_product-256": partial(symmetric_product, 256, 512),
    "symmetric_product-1024": partial(symmetric_product, 1024, 1024),
    "symmetric_product-4096": partial(symmetric_product, 4096, 4096),
    "symmetric_product-4096-bare": partial(symmetric_product, 4096, 11008, False),
    "symmetric_product-4096-transposed": partial(symmetric_product, 4096, 11008, True, True),
    "symmetric_product-odd": partial(symmetric_product, 1999, 4001, True, True),
    "symmetric_product-odd-small": partial(symmetric_product, 33, 45),
}

every_call = pytest.mark.parametrize("name", CALLS)
every_arch = pytest.mark.parametrize("arch", aot.ARCHS)


def launches(arch: int, name: str) -> tuple[aot.Launch, ...]:
    return aot.compiled(arch, CALLS[name])


def instructions(code: str, *names: str) -> Counter[str]:
    """How often each instruction occurs whose name starts like one of `names`."""
    return Counter(re.findall(rf"\b(?:{'|'.join(map(re.escape, names))})[\w.:]*", code))


INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+ +)?([A-Z]\S*)(.*?);", re.M)


def paths_through(sass: str, name: str) -> list[int]:
    """Of each instruction with this name: how many are executed on the shortest way from the kernel's first to its end
    that passes there and calls no function."""
    code = [(int(address, 16), bool(guard), op, rest) for address, guard, op, rest in INSTRUCTION.findall(sass)]
    at = {address: i for i, (address, *_) in enumerate(code)}
    after: dict[int, list[int]] = {i: [] for i in range(len(code))}
    before: dict[int, list[int]] = {i: [] for i in range(len(code))}
    for i, (_, guarded, op, rest) in enumerate(code):
        ends, calls, jumps = op.startswith(("EXIT", "RET")), op.startswith("CALL"), op.startswith("BRA")
        always = not guarded and (not jumps or re.match(r"\s*`?\(?0x", rest))
        to = [at[int(rest.rpartition("0x")[2].strip(" )`"), 16)]] if jumps else []
        if not calls and not ((ends or jumps) and always) and i + 1 < len(code):
            to.append(i + 1)
        for j in to:
            after[i].append(j)
            before[j].append(i)

    def steps(starts: list[int], edges: dict[int, list[int]]) -> dict[int, int]:
        found, queue = dict.fromkeys(starts, 0), list(starts)
        for i in queue:
            for j in edges[i]:
                if j not in found:
                    found[j] = found[i] + 1
                    queue.append(j)
        return found

    begun, left = steps([0], after), steps([i for i, of in enumerate(code) if of[2] == "EXIT"], before)
    return [begun[i] + 1 + left[i] for i, of in enumerate(code) if of[2] == name and i in begun and i in left]


def inexact(ptx: str) -> Counter[str]:
    """Instructions that do not round as the contract wants, that flush subnormals, or that ptxas would contract."""
    found = instructions(ptx, "fma.", "mad.f", "mad.rn", "div.full", "div.approx", "sqrt.approx", "rcp.", "rsqrt.")
    found += Counter(re.findall(r"\b[\w.]+\.ftz\b[\w.]*", ptx))
    sums = instructions(ptx, "add.rn.f32x2", "sub.rn.f32x2")
    return found + (instructions(ptx, "mul.rn.f32x2") if sums else Counter())


@every_arch
@every_call
def test_nothing_is_spilled(arch: int, name: str) -> None:
    for launch in launches(arch, name):
        assert launch.resources["STACK"] == 0 and launch.resources["LOCAL"] == 0, launch.kernel
        assert ".local" not in launch.ptx, launch.kernel


@every_arch
@every_call
def test_each_operation_rounds_on_its_own(arch: int, name: str) -> None:
    """But for the quotients by which 8 bits are read, and of the quick path roots, too: estimates, corrected by their
    rests."""
    quotients = {"rcp.approx.ftz.f32", "fma.rn.f32", "fma.rn.f32x2"} if name.startswith("encoded_step") else set()
    quotients |= {"rsqrt.approx.ftz.f32"} if name.startswith("encoded_step-8") else set()
    for launch in launches(arch, name):
        assert set(inexact(launch.ptx)) <= quotients, launch.kernel


@jit
def _sum_of_squares(x, out):
    at = tl.arange(0, 1024)
    total = tl.zeros([1024], tl.float32)
    for k in tl.static_range(8):
        value = tl.load(x + k * 1024 + at)
        total = total + value * value
    tl.store(out, tl.sum(total, axis=0))


@pytest.mark.parametrize(("arch", "fused", "machine"), [(90, True, "FFMA"), (100, False, "FFMA2")])
def test_a_fused_operation_would_be_seen(arch: int, fused: bool, machine: str) -> None:
    """Where Triton's default is kept; and where lanes are paired, then contracted in spite of --fmad=false."""
    with aot.compiling_for(arch) as made:
        _sum_of_squares[(1,)](torch.empty(8192), torch.empty(1), enable_fp_fusion=fused)
    (launch,) = made
    if not fused and "mul.rn.f32x2" not in launch.ptx:
        pytest.skip("this compiler pairs no lanes")
    assert inexact(launch.ptx)
    if not fused and not instructions(launch.sass, machine):
        pytest.skip("this ptxas leaves pairs alone")
    assert instructions(launch.sass, machine)


@every_arch
@pytest.mark.parametrize(
    "name",
    [
        "adam_step-fp32-fp32",
        *(f"foreach_step-{rule}" for rule in RULES if rule != "adamw"),
        "ema-fp32",
        "ema-split",
        "pack-bf16",
        "unpack-bf16",
        "grad_stats-2.0-large",
    ],
)
def test_the_machine_code_keeps_to_it(arch: int, name: str) -> None:
    """ptxas contracts what is paired (FFMA2). Plain FFMA is what divisions and roots are made of."""
    for launch in launches(arch, name):
        assert not instructions(launch.sass, "LDL", "STL", "FFMA2", "DFMA"), launch.kernel
        if not name.startswith(("adam_step", "foreach_step-amsgrad")):
            assert not instructions(launch.sass, "FFMA", "MUFU"), launch.kernel


@every_arch
def test_adam_step_does_what_is_written(arch: int) -> None:
    """docs/ops.md, counted: so many operations for each of a thread's four elements, and one for the scale of all."""
    (launch,) = launches(arch, "adam_step-bf16-bf16")
    found = instructions(launch.ptx, "mul.rn", "add.rn", "sub.rn", "div.rn", "sqrt.rn", "cvt.rn")
    per_element = {"mul.rn.f32": 9, "add.rn.f32": 4, "sub.rn.f32": 1, "div.rn.f32": 2, "sqrt.rn.f32": 1}
    want = Counter({name: 4 * count for name, count in per_element.items()})
    assert found == want + Counter({"mul.rn.f32": 1, "cvt.rn.bf16x2.f32": 2})


@every_arch
@pytest.mark.parametrize("param", (*FLOATS, None), ids=str)
@pytest.mark.parametrize("grad", FLOATS, ids=str)
def test_adam_step_moves_16_bytes_at_a_time(arch: int, grad: torch.dtype, param: torch.dtype | None) -> None:
    """Four elements a thread: 16 bytes of each fp32 tensor, 8 of a 16-bit one, and of data nothing narrower."""
    (launch,) = launches(arch, f"adam_step-{NAMES[grad]}-{NAMES[param]}")
    loads, stores = instructions(launch.ptx, "ld.global"), instructions(launch.ptx, "st.global")
    assert loads["ld.global.v4.b32"] == 3 + (grad == FP32), loads
    assert loads["ld.global.v2.b32"] == (grad != FP32), loads
    assert set(loads) <= {"ld.global.v4.b32", "ld.global.v2.b32", "ld.global.b32"}, loads
    assert stores["st.global.v4.b32"] == 3 + (param == FP32), stores
    assert stores["st.global.v2.b32"] == (param in FLOATS[:2]), stores
    assert stores["st.global.b32"] == 1, "the mark of a slot that is not finite, and no data"


@every_arch
@pytest.mark.parametrize(
    ("rule", "muls", "adds", "subs"),
    [
        ("amsgrad", 9, 4, 1),
        ("lion", 7, 2, 1),
        ("sgd", 6, 3, 1),
        ("sgd_plain", 3, 1, 1),
        ("muon_look_ahead", 5, 2, 4),
        ("muon_subtract", 2, 0, 1),
    ],
)
def test_other_rules_do_what_is_written(arch: int, rule: str, muls: int, adds: int, subs: int) -> None:
    """Counted as for adam_step. Every tensor of fp32 in 16 bytes, which no rule but its loads and stores says."""
    (launch,) = launches(arch, f"foreach_step-{rule}")
    found = instructions(launch.ptx, "mul.rn", "add.rn", "sub.rn", "div.rn", "sqrt.rn")
    found["sub.rn.f32"] += 2 * found.pop("sub.rn.f32x2", 0)  # pairs, for compute capability 10.0
    want = Counter({"mul.rn.f32": 4 * muls + 1, "add.rn.f32": 4 * adds, "sub.rn.f32": 4 * subs})
    assert found == want + Counter({"div.rn.f32": 8, "sqrt.rn.f32": 4} if rule == "amsgrad" else {})
    wide = 1 + len(RULES[rule].states)
    loads, stores = instructions(launch.ptx, "ld.global"), instructions(launch.ptx, "st.global")
    read = wide - (rule == "muon_look_ahead")  # which writes the master alone
    assert (loads["ld.global.v4.b32"], loads["ld.global.v2.b32"]) == (read, 1), loads
    assert (stores["st.global.v4.b32"], stores["st.global.v2.b32"], stores["st.global.b32"]) == (wide, 1, 1), stores


@every_arch
@pytest.mark.parametrize(("name", "of_8_bytes"), [("encoded_step-8-split", 3), ("encoded_step-8-split8", 2)])
def test_encoded_states_are_read_and_written_once_by_either_way(arch: int, name: str, of_8_bytes: int) -> None:
    """Four elements a thread: 4 bytes of what has 8 bits; 8 of the gradient, and of a half of the master that has 16.
    Divisions, roots as written, but in the quick path."""
    (launch,) = launches(arch, name)
    found = instructions(launch.ptx, "div.rn", "sqrt.rn")
    # Divisions: two of adamw, two and one of encoding, whose root is that of the update.
    assert found == {"div.rn.f32": 4 * 5, "sqrt.rn.f32": 4}
    loads, stores = instructions(launch.ptx, "ld.global"), instructions(launch.ptx, "st.global")
    assert loads["ld.global.v2.b32"] == 2 * of_8_bytes and "ld.global.v4.b32" not in loads, loads
    assert stores["st.global.v2.b32"] == 2 * (of_8_bytes - 1), stores
    assert not set(stores) - {"st.global.v2.b32", "st.global.b32"}, stores
    narrow = [n for n in (*loads, *stores) if re.search(r"\.(b8|b16|u8|u16)\b", n)]
    assert not narrow, narrow


@every_arch
@pytest.mark.parametrize(("master", "most"), [("", 115), ("-split", 125), ("-split8", 130)])
def test_the_quick_way_is_short(arch: int, master: str, most: float) -> None:
    """Instructions of a thread for each of its four elements, on the way through a tile without an unusual value; by
    Triton 3.6 five more than by 3.7. Four blocks of 256 threads share a multiprocessor with its 64 Ki registers. ptxas
    contracts nothing."""
    (launch,) = launches(arch, f"encoded_step-8{master}")
    assert min(paths_through(launch.sass, "STG.E")) <= most * 4, min(paths_through(launch.sass, "STG.E")) / 4
    assert launch.resources["REG"] <= 64
    assert instructions(launch.sass, "FFMA2").total() == instructions(launch.ptx, "fma.rn.f32x2").total()


@every_arch
def test_adam_step_asks_for_all_data_before_it_waits(arch: int) -> None:
    """In machine code: the wide loads, the barrier, and only then the first narrow load, of a slot or a coefficient.

    What is loaded before the barrier may be used, and so waited for, between the wide loads.
    """
    (launch,) = launches(arch, "adam_step-fp32-fp32")
    order = re.findall(r"LDG\.E\.128|LDG\.E(?= )|BAR\.SYNC", launch.sass)
    assert order[:6] == ["LDG.E.128"] * 4 + ["BAR.SYNC", "LDG.E"], order


@every_arch
@pytest.mark.parametrize(
    ("name", "of_16_bytes", "of_8"),
    [("ema-fp32", 3, 0), ("ema-bf16", 2, 1), ("ema-split", 2, 2), ("ema-split8", 2, 1), ("ema-8", 9, 0)],
)
def test_ema_reads_masters_once_and_does_what_is_written(arch: int, name: str, of_16_bytes: int, of_8: int) -> None:
    """Four elements a thread: 16 bytes of each average, and of a master in fp32. Of an element and an average a
    difference, a product and a sum; for compute capability 10.0 a difference also widens."""
    (launch,) = launches(arch, name)
    each = 8 if name == "ema-8" else 2
    loads, stores = instructions(launch.ptx, "ld.global"), instructions(launch.ptx, "st.global")
    assert (loads["ld.global.v4.b32"], loads["ld.global.v2.b32"]) == (of_16_bytes, of_8), loads
    assert set(loads) <= {"ld.global.v4.b32", "ld.global.v2.b32", "ld.global.b32"}, loads
    assert stores == {"st.global.v4.b32": each}, stores
    for operation in ("mul", "add", "sub"):
        assert instructions(launch.ptx, f"{operation}.rn.f32").total() == 4 * each


@every_arch
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_pack_and_unpack_move_16_bytes_at_a_time(arch: int, dtype: torch.dtype) -> None:
    """16 elements a thread: two accesses of a 16-bit type, four of fp32. A gradient has any of the three dtypes."""
    grads, bucket = 2 + 2 + 4, 3 * 16 * dtype.itemsize // 16
    for name, loads, stores in (("pack", grads, bucket), ("unpack", bucket, grads)):
        (launch,) = launches(arch, f"{name}-{NAMES[dtype]}")
        assert instructions(launch.ptx, "ld.global")["ld.global.v4.b32"] >= loads
        assert instructions(launch.ptx, "st.global")["st.global.v4.b32"] >= stores


@every_arch
def test_grad_stats_loads_16_bytes_at_a_time(arch: int) -> None:
    """64 elements a thread, in a block that is full, of each of three dtypes."""
    blocks, _ = launches(arch, "grad_stats-2.0")
    assert instructions(blocks.ptx, "ld.global")["ld.global.v4.b32"] == sum(64 * x.itemsize // 16 for x in FLOATS)


@every_arch
@pytest.mark.parametrize("norm", [2.0, float("inf")])
def test_a_large_shard_has_many_rows_of_partials_on_their_way(arch: int, norm: float) -> None:
    """In machine code: 32 rows of partials are asked for before the first sum, by each of 32 programs; and by the
    program of a shard all eight rows, by each thread of 128."""
    blocks, large, shards = launches(arch, f"grad_stats-{norm}-large")
    assert [blocks.grid, large.grid, shards.grid] == [(2**28 // 8192,), (1, 32), (1,)]
    for launch, loads in ((large, 32), (shards, 8 * 8)):
        order = re.findall(r"LDG\.E(?= )|FADD|V?IMNMX", launch.sass)
        assert order[:loads] == ["LDG.E"] * loads, order


@every_arch
@pytest.mark.parametrize(("norm", "most"), [(1.0, 5.4), (2.0, 5.9), (float("inf"), 5.5)])
def test_grad_stats_counts_only_where_a_partial_is_not_finite(arch: int, norm: float, most: float) -> None:
    """Instructions of a thread for each of its 64 elements, on the way through a block that is whole and finite; of
    whichever dtype takes most. Counting takes 3 to 5 more, and stands in a function, called where all is done."""
    blocks, _ = launches(arch, f"grad_stats-{norm}")
    paths = paths_through(blocks.sass, "LDG.E.128")
    assert len(paths) == sum(64 * x.itemsize // 16 for x in FLOATS) and max(paths) <= most * 64, max(paths) / 64
    assert instructions(blocks.ptx, "call.uni") and instructions(blocks.sass, "CALL.REL.NOINC").total() == 3


@every_arch
@pytest.mark.parametrize("norm", [1.0, 2.0, float("inf")])
def test_grad_stats_leaves_room_for_five_blocks(arch: int, norm: float) -> None:
    """Of 128 threads each, on a multiprocessor with its 64 Ki registers: 20 warps of 64."""
    blocks, shards = launches(arch, f"grad_stats-{norm}")
    assert blocks.resources["REG"] <= 96
    assert shards.resources["REG"] <= 168  # of a thread with 64 loads under way; the shards are few


@every_arch
def test_hyper_table_divides_and_takes_roots_as_ieee_wants(arch: int) -> None:
    (launch,) = launches(arch, "hyper_table")
    found = instructions(launch.ptx, "div.", "sqrt.")
    assert found == {"div.rn.f64": 1, "sqrt.rn.f64": 1}
    assert sum(instructions(launch.ptx, "cvt.rn.f32.f64").values()) == 10


MMA = {80: "mma.sync.aligned.m16n8k16", 90: "wgmma.mma_async.sync.aligned.m64n", 100: "tcgen05.mma"}
"""The widest product of tensor cores."""
SASS = {80: "HMMA.16816.F32.BF16", 90: "HGMMA.64x128x16.F32.BF16", 100: "UTCHMMA"}


@every_arch
@pytest.mark.parametrize("name", ["4096", "4096-bare", "4096-transposed", "1024", "odd"])
def test_symmetric_product_is_made_by_tensor_cores(arch: int, name: str) -> None:
    """By nothing else; and where rows are whole 32 bytes, what they multiply is on its way meanwhile, 16 bytes at a
    time, and so is each of the two places of a tile written."""
    (launch,) = launches(arch, f"symmetric_product-{name}")
    assert instructions(launch.ptx, MMA[arch]) and not instructions(launch.sass, "FFMA")
    machine = SASS[arch].replace("128", {"1024": "64", "odd": "32"}.get(name, "128"))
    assert machine in launch.sass, instructions(launch.sass, "HMMA", "HGMMA", "UTCHMMA")
    if name != "odd":
        loads, stores = instructions(launch.ptx, "ld.global", "cp.async.cg"), instructions(launch.ptx, "st.global")
        assert set(loads) <= {"cp.async.cg.shared.global", "ld.global.v4.b32"} and loads["cp.async.cg.shared.global"]
        assert ("ld.global.v4.b32" in loads) == (name != "4096-bare"), "what is added"
        assert set(stores) == {"st.global.v4.b32"}, stores


@pytest.mark.parametrize("arch", [90, 100])
def test_two_tiles_of_a_product_share_a_multiprocessor(arch: int) -> None:
    """Which has 64 Ki registers, and 228 KiB of shared memory, of which each tile takes one more than it asks for. So
    one multiplies while the other is written. With something added, registers have room for one."""
    (launch,) = launches(arch, "symmetric_product-4096-bare")
    assert 2 * (launch.shared + 1024) <= 228 * 1024 and 2 * 256 * launch.resources["REG"] <= 2**16


def test_symmetric_product_launches_half_of_the_tiles() -> None:
    with aot.compiling_for(90) as made:
        for rows in (1040, 2048, 4096):
            symmetric_product(rows, 64)
    assert [launch.grid for launch in made] == [(2 * n * (n + 1) // 2,) for n in (17, 32, 32)]


@every_arch
@every_call
def test_registers_leave_room_for_many_warps(arch: int, name: str) -> None:
    """A bound on the latency that the kernels can hide: an SM has 64 Ki registers."""
    bounds = {
        "adam_step": 64,
        "foreach_step": 64,
        "encoded_step": 80,
        "ema": 64,
        "pack": 64,
        "unpack": 64,
        "grad_stats": 128,
        "hyper_table": 128,
        "symmetric_product": 192,  # of which 64 are sums; the odd ones have an address for each element
    }
    slow = {
        "adam_step-ragged": 128,
        "encoded_step-8-ragged": 128,
        "adam_step-misaligned": 128,
        "symmetric_product-odd": 255,
    }
    most = slow.get(name) or bounds[name.partition("-")[0]]
    for launch in launches(arch, name):
        if launch.kernel not in ("_large_kernel", "_shard_kernel"):  # few programs: an SM has one, if any
            assert launch.resources["REG"] <= most, launch.kernel


@every_call
def test_offsets_are_64_bit(name: str) -> None:
    """The number of a program, which is 32 bits, is widened before anything is multiplied."""
    for launch in launches(90, name):
        for program in re.findall(r"(%\w+) = tt\.get_program_id", launch.ttir):
            uses = re.findall(rf"= (\S+) {program}(?!\w)", launch.ttir)
            assert uses and set(uses) == {"arith.extsi"}, launch.kernel


def test_grids_reach_beyond_2_to_the_31_elements() -> None:
    numel = 2**31 + 2**20 + 5
    grad, master, *states = (torch.empty(numel, device="meta") for _ in range(4))
    row_slot = torch.empty(-(-numel // ROW), dtype=torch.int32, device="meta")
    with aot.compiling_for(90) as made:
        triton.OPS["foreach_step"]("adamw", [grad], [master], states, [], [row_slot], torch.zeros(1, 12))
        triton.OPS["grad_stats"]([grad], 2.0)
    grids = [launch.grid for launch in made]
    assert grids == [(-(-numel // 1024),), (-(-numel // 8192),), (1, 32), (1,)]
    assert made[0].kernel == "_step_kernel" and made[1].kernel == "_block_kernel"


def test_a_learning_rate_or_a_size_compiles_nothing_anew() -> None:
    """One compilation serves every size of whole rows, scale, and number of slots, 1 included."""
    with aot.compiling_for(90) as made:
        for numel in (ROW, 3 * ROW, 16 * ROW):
            adam_step(BF16, BF16, numel)
        for scale in (1.0, 0.0, 1 / 3):
            triton.OPS["unpack"](torch.empty(4096), [0], [torch.empty(4096)], scale)
        for slots in (1, 16, 17):
            coefficients, step = torch.zeros(7, slots, dtype=torch.float64), torch.zeros(slots, dtype=torch.float64)
            triton.OPS["hyper_table"](coefficients, None, step, None, torch.empty(slots, 12))
    assert len(made) == 9
    assert len({id(launch.ptx) for launch in made}) <= 9
    assert len({launch.ptx for launch in made}) == 3
