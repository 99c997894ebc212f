"""Builds the compiled CPU library of `zero_kernels`; everything else is in pyproject.toml.

An install never needs a compiler: when the build fails, the first error is kept in the package
(`zero_kernels/build_error.txt`, shown by `zero-optim doctor`) and the reference backend runs instead.
"""

import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
CSRC = ROOT / "csrc"
NO_BUILD = os.environ.get("ZERO_KERNELS_NO_BUILD", "0") not in ("", "0")
LIBRARY = "libzero_kernels_cpu" + (".dylib" if sys.platform == "darwin" else ".so")

# No contraction and no fast math: all backends give the same bits. No errno: it would turn a root into a call.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-w"]
ISA_FLAGS = {
    "scalar": [],
    "avx2": ["-DZK_ISA_AVX2", "-mavx2", "-mf16c"],
    "avx512": ["-DZK_ISA_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}


class BuildError(Exception):
    """A command of the build failed: its text is the command and the compiler's words."""


def torch_directory() -> Path | None:
    """The torch that this interpreter will import, found without importing it.

    Build isolation hides the environment's packages from sys.path, but not from the interpreter's own paths.
    """
    spec = importlib.util.find_spec("torch")
    found = list(spec.submodule_search_locations or []) if spec else []
    sites = [sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *site.getsitepackages()]
    if sys.prefix == sys.base_prefix:
        sites.append(site.getusersitepackages())
    candidates = [Path(path) for path in found] + [Path(path) / "torch" for path in sites]
    return next((path for path in candidates if (path / "include").is_dir()), None)


def compiler() -> list[str]:
    """The C++ compiler's command: CXX, else the first of the usual names that is there."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return [next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), "c++")]


def run(command: list[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise BuildError(f"$ {shlex.join(command)}\n{error}\n") from None
    if done.returncode:
        said = (done.stdout + done.stderr).strip() or "it said nothing"
        raise BuildError(f"$ {shlex.join(command)}\nexit status {done.returncode}: {said}\n")


def compile_library(objects: Path, library: Path) -> None:
    """Compile csrc, one object a source and instruction set, all at once, and link. Raises BuildError."""
    torch = torch_directory()
    if torch is None:
        raise BuildError("torch's headers were not found: install torch >= 2.10 and install this package again\n")
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    torch_flags = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(torch / "include")]
    units = [("ops", CSRC / "ops.cpp", torch_flags), ("isa", CSRC / "cpu/isa.cpp", [])]
    units += [
        (f"kernels_{isa}", CSRC / "cpu/kernels.cpp", flags)
        for isa, flags in ISA_FLAGS.items()
        if x86 or isa == "scalar"
    ]
    cxx = compiler()
    commands = [
        [*cxx, *FLAGS, *flags, "-c", str(source), "-o", str(objects / f"{name}.o")] for name, source, flags in units
    ]
    linked = [str(objects / f"{name}.o") for name, _, _ in units]
    shared = ["-dynamiclib", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    link = [*cxx, *shared, *linked, "-o", str(library)]
    if sys.platform != "darwin":
        link += [f"-L{torch / 'lib'}", "-ltorch_cpu"]
    # What was built from these very commands and sources is not built again.
    key = hashlib.sha256(repr((commands, link, (torch / "version.py").read_text())).encode())
    for source in sorted(CSRC.rglob("*")):
        key.update(source.read_bytes() if source.is_file() else b"")
    stamp = objects / "key"
    if library.exists() and stamp.exists() and stamp.read_text() == key.hexdigest():
        return
    stamp.unlink(missing_ok=True)
    objects.mkdir(parents=True, exist_ok=True)
    library.parent.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands))
    run(link)
    stamp.write_text(key.hexdigest())


class BuildLibrary(build_ext):
    """Builds the library into the package, or leaves the reason why not."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path("zero_kernels", LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        # An editable install runs from the source tree, so that its files must agree with what was just built.
        packages = [Path(self.build_lib, "zero_kernels")]
        if self.inplace or self.editable_mode:
            packages.append(ROOT / "zero_kernels")
        error = "ZERO_KERNELS_NO_BUILD was set: the library was not built\n" if NO_BUILD else None
        if error is None:
            try:
                compile_library(Path(self.build_temp).absolute(), packages[0].absolute() / LIBRARY)
            except BuildError as failure:
                error = str(failure)
        for package in packages:
            package.mkdir(parents=True, exist_ok=True)
            report = package / "build_error.txt"
            report.unlink(missing_ok=True)
            if error is not None:
                (package / LIBRARY).unlink(missing_ok=True)
                report.write_text(error)
            elif package != packages[0]:
                shutil.copy2(packages[0] / LIBRARY, package / LIBRARY)
        if error is not None:
            self.warn(f"the CPU library was not built; the reference backend will run instead:\n{error}")

    def copy_extensions_to_source(self) -> None:
        """Done above, the report included."""


class LibraryWheel(bdist_wheel):
    """The library needs no particular Python: it speaks torch's stable ABI only."""

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(
    ext_modules=[Extension("zero_kernels.library", sources=[], optional=True)],
    cmdclass={"build_ext": BuildLibrary, "bdist_wheel": LibraryWheel},
    setup_requires=[] if NO_BUILD or torch_directory() else ["torch>=2.10"],
)
