"""What nvcc made of the kernels: no spill, wide accesses, no contraction, no flush to zero."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
from executed import executed, kernels_in
from toolchain import ARCHS, PTX_ARCHS, SOURCES, run, to_ptx

# By the name of its struct: a rule.
STRUCTS = {
    "AdamW": "adamw",
    "AmsGrad": "amsgrad",
    "Lion": "lion",
    "Sgd": "sgd",
    "SgdPlain": "sgd_plain",
    "MuonLookAhead": "muon_look_ahead",
    "MuonSubtract": "muon_subtract",
}

# (state tensors, pieces of a row of the table that are loaded whole)
RULES = {
    "adamw": (2, 3),
    "amsgrad": (3, 3),
    "lion": (1, 1),
    "sgd": (1, 1),
    "sgd_plain": (0, 0),
    "muon_look_ahead": (1, 0),
    "muon_subtract": (1, 0),
}

pytestmark = pytest.mark.kernels

KERNELS = {
    "step of adamw": 12,
    **{f"foreach_step of {rule}": 12 for rule in RULES},
    **{f"encoded_step of {rule}": 1 for rule in RULES},
    "quick_step": 8,
    "ema": 1,
    "stats": 3,
    "stats_large": 3,
    "stats_combine": 3,
    "hyper_table": 1,
    "pack": 12,
}

# Accesses of 16 bytes on the main path of a kernel, as (loads, stores).
# step: master and states of two quads (16-bit tensors go in 8 bytes), and of their rows of the hyper table the pieces
# that the rule needs all of. Where states are encoded, of one quad, and gradients and parameters may be fp32.
# ema: a master in fp32, and an average: the first of them is asked for beside the master.
# stats: eight rows of a block, in each dtype.
# pack: four chunks for each dtype of the gradients. Where the bucket is fp32, a 16-bit gradient goes in 8 bytes; where
# it is 16-bit, an fp32 gradient goes in twice 16.
WIDE = {
    **{
        f"{kernel} of {rule}": (2 * (1 + states) + 2 * pieces, 2 * (1 + states))
        for kernel in ("step", "foreach_step")
        for rule, (states, pieces) in RULES.items()
    },
    **{f"encoded_step of {rule}": (2 + states + pieces, 2 + states) for rule, (states, pieces) in RULES.items()},
    "foreach_step of muon_look_ahead": (2, 2 * 2),  # the master is written alone
    "encoded_step of muon_look_ahead": (2, 3),
    "ema": (1 + 2, 1),
    "stats": (8 + 8 + 16, 0),
    "pack, fp32 bucket": (4, 12),
    "pack, 16-bit bucket": (16, 12),
    "unpack, fp32 bucket": (12, 4),
    "unpack, 16-bit bucket": (12, 16),
}

BYTES = {"8": 1, "16": 2, "32": 4, "64": 8}


@dataclass(frozen=True)
class Accesses:
    """Of a kernel, in PTX: how many loads from the device's memory, and stores to it, are of so many bytes."""

    loads: Counter[int]
    stores: Counter[int]


def accesses_of(body: str) -> Accesses:
    found: dict[str, Counter[int]] = {"ld": Counter(), "st": Counter()}
    for access, count, bits in re.findall(r"\b(ld|st)\.global(?:\.\w+)*?(?:\.v(\d))?\.[a-z](\d+)\b", body):
        found[access][int(count or 1) * BYTES[bits]] += 1
    return Accesses(found["ld"], found["st"])


@pytest.fixture(scope="module")
def accesses(ptx: Mapping[tuple[str, str], Path]) -> Mapping[tuple[str, str], Accesses]:
    """By architecture and mangled name: nvcc widens accesses on the way to PTX, and ptxas narrows none."""
    found = {}
    for (arch, _), path in ptx.items():
        for entry in path.read_text().split(".entry ")[1:]:
            name, _, body = entry.partition("(")
            found[arch, name.strip()] = accesses_of(body)
    return found


OPCODE = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?\w+ +)?([A-Z]\S*)", re.M)  # without predicate and operands


@pytest.fixture(scope="module")
def sass(cuobjdump: Path, library: Path) -> Mapping[tuple[str, str], str]:
    """The opcodes of the kernels of grad_stats, by architecture and mangled name. All kernels take 16 seconds."""
    code = {}
    for of_arch in run(cuobjdump, "-sass", library.parent / "grad_stats.o").split("code for sm_")[1:]:
        arch, _, text = of_arch.partition("\n")
        for of_kernel in text.split("Function : ")[1:]:
            name, _, body = of_kernel.partition("\n")
            code[arch, name.strip()] = " ".join(OPCODE.findall(body))
    return code


@pytest.fixture(scope="module")
def resources(cuobjdump: Path, library: Path) -> Mapping[tuple[str, str], tuple[int, int]]:
    """The registers of every kernel's thread and its bytes of local memory, by architecture and mangled name."""
    said = run(cuobjdump, "--dump-resource-usage", library)
    sizes = {}
    for arch, text in re.findall(r"arch = sm_(\d+)\n(.*?)(?=arch = sm_|\Z)", said, re.S):
        of_kernel = r"Function (\S+):\n\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)"
        for name, registers, frame, local in re.findall(of_kernel, text):
            sizes[arch, name] = (int(registers), int(frame) + int(local))
    return sizes


UPDATES = "foreach_step|encoded_step|step"


def kind(name: str) -> str:
    """The key in KERNELS of a kernel's mangled name."""
    update = re.search(rf"\d({UPDATES})_kernelI\w*?NS_\d+(\w+?)E", name)
    if update:
        return f"{update[1]} of {STRUCTS[update[2]]}"
    return next(kind for kind in KERNELS if f"{kind}_kernel" in name)


def path(name: str) -> str:
    """The key in WIDE of a kernel's mangled name."""
    if kind(name) != "pack":
        return kind(name)
    direction = "unpack" if "DirectionE1E" in name else "pack"
    return f"{direction}, {'fp32' if re.search('DirectionE[01]Ef', name) else '16-bit'} bucket"


def archs_of(kernels: Mapping[tuple[str, str], object]) -> set[str]:
    return {arch for arch, _ in kernels}


def skip_unless_made_for(arch: str, kernels: Mapping[tuple[str, str], object]) -> None:
    if arch not in archs_of(kernels):
        pytest.skip(f"this library was built for {sorted(archs_of(kernels))}")


def test_every_kernel_is_there_for_every_architecture(resources: Mapping[tuple[str, str], tuple[int, int]]) -> None:
    built = Counter((arch, kind(name)) for arch, name in resources)
    assert built == {(arch, name): count for arch in archs_of(resources) for name, count in KERNELS.items()}


def test_the_default_build_is_for_three_architectures_and_newer(
    cuobjdump: Path, library: Path, resources: Mapping[tuple[str, str], tuple[int, int]]
) -> None:
    if archs_of(resources) != set(ARCHS):
        pytest.skip(f"this library was built for {sorted(archs_of(resources))}")
    assert set(re.findall(r"\.sm_(\d+)\.ptx", run(cuobjdump, "-lptx", library))) == {"100"}


@pytest.mark.parametrize("arch", PTX_ARCHS)
def test_main_paths_move_16_bytes_at_a_time(accesses: Mapping[tuple[str, str], Accesses], arch: str) -> None:
    skip_unless_made_for(arch, accesses)
    short = {}
    for (of, name), found in accesses.items():
        if of == arch and path(name) in WIDE:
            loads, stores = WIDE[path(name)]
            if found.loads[16] < loads or found.stores[16] < stores:
                short[name] = (found, WIDE[path(name)])
    assert short == {}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("name", "loads"), [("stats_large", 32), ("stats_combine", 64)])
def test_partials_are_all_asked_for_before_the_first_is_added(
    sass: Mapping[tuple[str, str], str], name: str, loads: int, arch: str
) -> None:
    """The order that ptxas gives them."""
    skip_unless_made_for(arch, sass)
    bodies = {kernel: body for (of, kernel), body in sass.items() if of == arch and kind(kernel) == name}
    assert len(bodies) == KERNELS[name]
    for kernel, body in bodies.items():
        order = re.findall(r"\b(LDG\.E|FADD|V?IMNMX3?)\b", body)
        assert order[:loads] == ["LDG.E"] * loads, kernel


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", KERNELS)
def test_ptxas_spills_nothing(resources: Mapping[tuple[str, str], tuple[int, int]], name: str, arch: str) -> None:
    """A register that is spilled lies in the kernel's stack frame, in local memory. An update has blocks of 256
    threads, four of which share the 64 Ki registers of a multiprocessor, or three. ema has eight."""
    skip_unless_made_for(arch, resources)
    found = [size for (of, kernel), size in resources.items() if of == arch and kind(kernel) == name]
    assert [local for _, local in found] == [0] * KERNELS[name]
    if "step" in name:
        three = re.fullmatch("(foreach|encoded)_step of a(damw|msgrad)|quick_step", name)
        assert max(registers for registers, _ in found) <= (80 if three else 64)
    if name == "ema":
        assert max(registers for registers, _ in found) <= 32


ESTIMATES = {"rcp.approx.ftz.f32", "rsqrt.approx.ftz.f32", "fma.rn.f32"}


@pytest.mark.parametrize("arch", PTX_ARCHS)
@pytest.mark.parametrize("name", SOURCES)
def test_every_operation_is_rounded_on_its_own(ptx: Mapping[tuple[str, str], Path], name: str, arch: str) -> None:
    """But for the estimates of quick_step.h."""
    skip_unless_made_for(arch, ptx)
    for entry in re.split(r"(?=\.entry )", ptx[arch, name].read_text()):
        # ptxas contracts pairs (f32x2) on sm_100 whatever it is told.
        found = {*re.findall(r"\bfma\S+|\S+\.ftz\S*|\S+\.approx\S*|\S+\.f32x2", entry)}
        assert found <= (ESTIMATES if "quick_step" in entry.partition("(")[0] else set())


@pytest.mark.parametrize("arch", PTX_ARCHS)
@pytest.mark.parametrize("name", [name for name in KERNELS if "encoded_step" in name])
def test_encoded_states_move_4_bytes_at_a_time_and_halves_8(
    accesses: Mapping[tuple[str, str], Accesses], name: str, arch: str
) -> None:
    """Of a quad each state, the gradient, and both halves of a master; a state may be of 16 bits, too, and the low
    half of a master of 8. Byte by byte go the elements of a quad that is not whole, alone."""
    skip_unless_made_for(arch, accesses)
    states = RULES[name.partition(" of ")[2]][0]
    bodies = {kernel: found for (of, kernel), found in accesses.items() if of == arch and path(kernel) == name}
    assert len(bodies) == 1
    for kernel, found in bodies.items():
        unread = name == "encoded_step of muon_look_ahead"  # the master, which is written alone
        assert found.loads[8] >= 3 + states - 2 * unread and found.stores[8] >= 3 + states, kernel
        assert found.loads[4] >= 1 + states - unread and found.stores[4] >= 1 + states, kernel
        assert found.loads[1] == 4 * (1 + states - unread), kernel
        assert found.stores[1] == 4 * (1 + states), kernel


QUOTIENTS = {"step_adamw": 24, "step_amsgrad": 12, "step_lion": 0, "step_sgd": 0, "step_muon": 0}
"""Kernels of each file that divide, beside those of encoded states."""


@pytest.mark.parametrize("arch", PTX_ARCHS)
def test_updates_divide_and_take_roots_as_ieee_does(ptx: Mapping[tuple[str, str], Path], arch: str) -> None:
    skip_unless_made_for(arch, ptx)
    for source, kernels in QUOTIENTS.items():
        entries = re.split(r"(?=\.entry )", ptx[arch, source].read_text())
        text = "".join(entry for entry in entries if not re.search("encoded_step|quick_step", entry.partition("(")[0]))
        if kernels:
            # Two divisions and a root for each of at least two quads of four elements.
            assert text.count("div.rn.f32") == 2 * text.count("sqrt.rn.f32") >= 2 * 2 * 4 * kernels
        else:
            assert "div." not in text and "sqrt." not in text
        assert "cvt.rn.bf16.f32" in text and "cvt.rn.f16.f32" in text
    of_table = ptx[arch, "hyper_table"].read_text()
    assert of_table.count("div.rn.f64") == of_table.count("sqrt.rn.f64") == 1


def test_a_contraction_would_be_seen(setup_py: SimpleNamespace, nvcc: str, tmp_path: Path) -> None:
    text = to_ptx(setup_py, nvcc, "step_sgd", "80", tmp_path / "fused.ptx", "-fmad=true").read_text()
    assert "fma.rn.f32" in text


MOST = {
    "FormE0EEEEEvNS_11ForeachArgs": 80.0,
    "FormE1EEEEEvNS_11ForeachArgs": 85.0,
    "FormE2EEEEEvNS_11ForeachArgs": 105.0,
    "step_kernelINS_5AdamWENS_8BFloat16ES3_E": 77.0,
}
"""By a part of the mangled name: instructions that a thread may execute for an element."""


def test_updates_execute_few_instructions(cuobjdump: Path, library: Path) -> None:
    """Of bf16 gradients and parameters: with moments in fp32, bf16 and 8 bits, for each form of the master; and in fp32
    alone. No store is strong in the memory model."""
    counted = []
    for arch, name, sass in kernels_in(run(cuobjdump, "-sass", library.parent / "step_adamw.o")):
        for part, most in MOST.items():
            if part in name:
                counted.append((arch, part))
                assert executed(sass) / 8 <= most, (arch, name)
                assert "STG.E.64" in sass and ".STRONG" not in sass, (arch, name)
    archs = {arch for arch, _ in counted}
    assert archs and Counter(part for _, part in counted) == {
        part: n * len(archs) for part, n in zip(MOST, (2, 3, 3, 2), strict=True)
    }
