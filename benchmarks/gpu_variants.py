"""adam_step on CUDA by compile-time variants of its kernel, each in turns with Triton's and a copy.

The checkout's library, built where it is missing or stale, is `plain`. The others are built in folders of their own.
`--device cpu` shows that it works: nothing is built, and each variant is the CPU's library.
Exit codes: 0; 1 where a variant was not built or not timed, which does not stop the others; 2 without a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gpu_build
import lab
import torch
from zero_optim.bench.record import Result
from zero_optim.bench.run import find_device
from zero_optim_cli.choices import parse_numel

VARIANTS: Mapping[str, Sequence[str]] = {  # macros of csrc/cuda/chunk.h and step.h
    "plain": (),
    "strong": ("-DZK_STRONG_STORES",),
    "one_quad_6": ("-DZK_QUADS=1", "-DZK_BARRIER", "-DZK_BLOCKS=6"),  # Triton's shape: 40 registers, and one spilled
    "one_quad_5": ("-DZK_QUADS=1", "-DZK_BARRIER", "-DZK_BLOCKS=5"),
}
NUMELS = {"cuda": (2**26, 2**28, 250_000_000), "cpu": (4096,)}  # the third makes strides that are no powers of two


def build(name: str) -> str:
    """Build a CUDA library with the macros of a variant. Returns its path."""
    setup = gpu_build.load_setup()
    library = setup.cuda_library(setup.torch_directory())
    for of, (rule, source, flags) in library.compile.items():
        library.compile[of] = (rule, source, [*flags, *(VARIANTS[name] if rule == "nvcc" else ())])
    return str(setup.build(library, gpu_build.ROOT / "build" / "gpu-variants" / name))


def run_with(library: str, arguments: Sequence[str]) -> int:
    """Run zero-optim in this process with another CUDA library; empty: the checkout's."""
    from zero_optim.cli import main

    from zero_kernels import compiled

    own = compiled.library
    compiled.library = lambda name: Path(library) if library and name == "cuda" else own(name)
    return main(arguments)


def measure(library: str, device: str, options: Any) -> list[dict[str, Any]]:
    """Time one variant. Returns the rows of its bench."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "with", library, "bench", "adam_step", "--device", device, "--out", folder]
        command += ["--dtypes", "bf16", "--numel", *map(str, options.numel or NUMELS[device])]
        command += ["--backends", "cuda", "triton"] if device == "cuda" else []
        command += ["--rounds", str(options.rounds)] if options.rounds else []
        subprocess.run(command, stdout=subprocess.DEVNULL, timeout=90, check=True)
        return list(json.loads(next(Path(folder).glob("*.json")).read_text())["rows"])


def main(options: Any) -> int:
    device, libraries, failed = find_device(options.device), {}, 0
    if device.type == "cuda":
        os.environ["TORCH_CUDA_ARCH_LIST"] = "{}.{}".format(*torch.cuda.get_device_capability())
        if gpu_build.main("cuda"):
            return 1
        with ThreadPoolExecutor() as pool:
            libraries = {name: pool.submit(build, name) for name in options.variants if VARIANTS[name]}
    result = Result(device, options.out, options.write, "variants")
    for name in options.variants:
        try:
            rows = measure(libraries[name].result() if name in libraries else "", device.type, options)
        except Exception as failure:
            failed = 1
            print(f"{name}: {failure}", flush=True)
            continue
        result.add([{**row, "variant": name} for row in rows])
        print(*(f"{name}, {of['numel']:,}: {of['backend']} {of['ms']:.4f} ms" for of in rows), sep="\n", flush=True)
    return failed


if __name__ == "__main__":
    if sys.argv[1:2] == ["with"]:
        sys.exit(run_with(sys.argv[2], sys.argv[3:]))
    parser = lab.parser_of(__file__, "Times variants of adam_step on CUDA.", device=None, rounds=None)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), help="which (all)")
    parser.add_argument("--numel", nargs="+", type=parse_numel, metavar="N", help="elements (2^26 2^28 250000000)")
    sys.exit(lab.run_script(parser, main))
