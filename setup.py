"""Builds the compiled CPU library of `zero_kernels`; everything else is in pyproject.toml.

An install never needs a compiler: when the build fails, the first error is kept in the package
(`zero_kernels/build_error.txt`, shown by `zero-optim doctor`) and the reference backend runs instead.
"""

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

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
NO_BUILD = os.environ.get("ZERO_KERNELS_NO_BUILD", "0") not in ("", "0")
LIBRARY = "libzero_kernels_cpu" + (".dylib" if sys.platform == "darwin" else ".so")

# No contraction and no fast math: all backends give the same bits. No errno: it would turn a root into a call.
FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-w"]
FLAGS += [f"-ffile-prefix-map={ROOT}=."]  # no path of the building machine in the library
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


def compile_commands(torch: Path, objects: Path) -> dict[Path, list[str]]:
    """The command that makes each object: one a source, and for the kernels one an instruction set."""
    x86 = platform.machine().lower() in ("x86_64", "amd64")
    torch_flags = ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(torch / "include")]
    units = {"ops": (CSRC / "ops.cpp", torch_flags), "isa": (CSRC / "cpu/isa.cpp", [])}
    for isa, flags in ISA_FLAGS.items():
        if x86 or isa == "scalar":
            units[f"kernels_{isa}"] = (CSRC / "cpu/kernels.cpp", flags)
    return {
        objects / f"{name}.o": [*compiler(), *FLAGS, *flags, "-c", str(source), "-o", str(objects / f"{name}.o")]
        for name, (source, flags) in units.items()
    }


def build_library(objects: Path, library: Path) -> None:
    """Compile csrc, all objects at once, and link. Raises BuildError."""
    torch = torch_directory()
    if torch is None:
        raise BuildError("torch's headers were not found: install torch >= 2.10, then this package again\n")
    objects.mkdir(parents=True, exist_ok=True)
    commands = compile_commands(torch, objects)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(run, commands.values()))
    if sys.platform == "darwin":
        how, libraries = ["-dynamiclib", "-undefined", "dynamic_lookup"], []
    else:
        how, libraries = ["-shared"], [f"-L{torch / 'lib'}", "-ltorch_cpu"]
    run([*compiler(), *how, *map(str, commands), "-o", str(library), *libraries])


def install(package: Path, library: Path, error: str | None) -> None:
    """Put into the package either the library or the reason why there is none, and remove the other."""
    package.mkdir(parents=True, exist_ok=True)
    installed, report = package / LIBRARY, package / "build_error.txt"
    if error is not None:
        installed.unlink(missing_ok=True)
        report.write_text(error)
        return
    report.unlink(missing_ok=True)
    # Replaced, never written over: a running process may have it mapped.
    fresh = installed.with_suffix(".new")
    shutil.copy2(library, fresh)
    fresh.replace(installed)


class BuildLibrary(build_ext):
    """Builds the library into the package, or leaves the reason why not."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path("zero_kernels", LIBRARY))

    def build_extension(self, ext: Extension) -> None:
        # An editable install runs from the source tree, so that its files must agree with what was just built.
        packages = [Path(self.build_lib, "zero_kernels")]
        if self.inplace or self.editable_mode:
            packages.append(ROOT / "zero_kernels")
        library = Path(self.build_temp).absolute() / LIBRARY
        error = "ZERO_KERNELS_NO_BUILD was set: the library was not built\n" if NO_BUILD else None
        if error is None:
            try:
                build_library(library.parent, library)
            except BuildError as failure:
                error = str(failure)
        for package in packages:
            install(package, library, error)
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
