"""Builds the compiled libraries of `zero_kernels`, with ninja; everything else is in pyproject.toml.

    cpu     from csrc/ops.cpp and csrc/cpu, wherever there is a C++ compiler
    cuda    from csrc/cuda, wherever there is nvcc (CUDA_HOME, PATH, /usr/local/cuda) and a torch with CUDA, with or
            without a GPU; for the architectures of TORCH_CUDA_ARCH_LIST, else 8.0, 9.0 and 10.0 with its PTX

An install never needs a compiler: when a library can't be built, the reason is kept in the package
(`zero_kernels/build_error_<name>.txt`, shown by `zero-optim doctor`) and another backend runs instead.
ZERO_KERNELS_NO_BUILD=1 builds nothing, ZERO_KERNELS_NO_CUDA=1 leaves out the CUDA library. ZERO_KERNELS_CUDA=1 builds
it beside a torch without CUDA too, for one that has CUDA.
"""

import importlib.util
import os
import platform
import re
import runpy
import shlex
import shutil
import site
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
DARWIN = sys.platform == "darwin"

# No contraction and no fast math: all backends give the same bits. No errno: it would turn a root into a call.
CXX_FLAGS = ["-std=c++20", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-fvisibility=hidden", "-w"]
CXX_FLAGS += [f"-ffile-prefix-map={ROOT}=."]  # no path of the building machine in the library
ISA_FLAGS = {
    "scalar": [],
    "avx2": ["-DZK_ISA_AVX2", "-mavx2", "-mf16c"],
    "avx512": ["-DZK_ISA_AVX512", "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl"],
}
NVCC_FLAGS = ["-std=c++20", "-O3", "-fmad=false", "-prec-div=true", "-prec-sqrt=true", "-ftz=false", "-w"]
# An error, not a warning: what follows a call of a host function is silently left out of a kernel.
NVCC_FLAGS += ["-Werror", "cross-execution-space-call"]
NVCC_FLAGS += ["-Xcompiler", "-fPIC,-fvisibility=hidden,-ffp-contract=off,-w"]
EXPORTS = f"--version-script={CSRC / 'exports.map'}"  # for the linker
USUAL_CUDA = "/usr/local/cuda/bin"
STAND_IN = "libtorch_cuda.so"
NO_BUILD = "ZERO_KERNELS_NO_BUILD was set: the library was not built\n"
NO_CUDA = "ZERO_KERNELS_NO_CUDA was set: the library was not built\n"
NO_NVCC = "nvcc was not found in CUDA_HOME, on the PATH or in /usr/local/cuda\n"
NO_USE = "this torch has no CUDA, so the library was left out: install a torch with CUDA, or set ZERO_KERNELS_CUDA=1, "
NO_USE += "then install this package again\n"
LEFT_OUT = (NO_BUILD, NO_CUDA, NO_NVCC, NO_USE)  # by choice, or for want of a use: no failures
DEFAULT_ARCHS = "8.0 9.0 10.0+PTX"


class BuildError(Exception):
    """A library can't be built: its text is the reason, or the command and the compiler's words."""


@dataclass(frozen=True)
class Library:
    """One shared library: the objects it is made of and how they are linked.

    Attributes:
        compile: for each object the rule (cxx or nvcc), the source and flags of its own.
        link: the command, to which ninja adds the objects and the output.
    """

    name: str
    compile: dict[str, tuple[str, Path, list[str]]]
    link: list[str]

    @property
    def file(self) -> str:
        return library_file(self.name)


def library_file(name: str) -> str:
    return f"libzero_kernels_{name}{'.dylib' if DARWIN else '.so'}"


def asked(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


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


def has_cuda(torch: Path) -> bool:
    """Whether that torch is built with CUDA: torch.version.cuda, read without importing torch."""
    version = torch / "version.py"
    return version.exists() and runpy.run_path(str(version)).get("cuda") is not None


def compiler() -> list[str]:
    """The C++ compiler's command: CXX, else the first of the usual names that is there."""
    if os.environ.get("CXX"):
        return shlex.split(os.environ["CXX"])
    return [next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), "c++")]


def nvcc() -> str | None:
    """CUDA's compiler: in CUDA_HOME, on the PATH, or where CUDA installs itself."""
    home = os.environ.get("CUDA_HOME")
    places = [str(Path(home, "bin"))] if home else []
    return next(filter(None, (shutil.which("nvcc", path=path) for path in [*places, None, USUAL_CUDA])), None)


def ninja() -> str:
    """The ninja of the installed package, which an isolated build has, else the one on the PATH."""
    spec = importlib.util.find_spec("ninja")
    if spec is not None:
        import ninja

        found = shutil.which("ninja", path=ninja.BIN_DIR)
        if found:
            return found
    found = shutil.which("ninja")
    if found is None:
        raise BuildError("ninja was not found: pip install ninja, then install this package again\n")
    return found


def cuda_archs() -> list[str]:
    """The names in TORCH_CUDA_ARCH_LIST, written as torch's own builds take it, else the default ones."""
    return re.split(r"[\s;,]+", os.environ.get("TORCH_CUDA_ARCH_LIST", "").strip(" ;,") or DEFAULT_ARCHS)


def arch_flags() -> list[str]:
    """One PTX for all architectures of 8.x and 9.x, that of the oldest: to make it takes as long as machine code. From
    8.0's PTX all kernels for 9.0 are to the bit those from its own. For 10.0 they are longer (CUDA 13.0)."""
    asked = []
    for name in cuda_archs():
        match = re.fullmatch(r"(\d+)\.(\d+)([af]?)(\+PTX)?", name)
        if match is None:
            raise BuildError(f"TORCH_CUDA_ARCH_LIST: {name!r} is no architecture; write it like '8.0 9.0+PTX'\n")
        asked.append(("".join(match.group(1, 2, 3)), match.group(4)))
    alike = [arch for arch, _ in asked if arch[0] in "89" and len(arch) == 2]
    made: dict[str, list[str]] = {}  # by architecture of the PTX
    for arch, with_ptx in asked:
        made.setdefault(min(alike) if arch in alike else arch, []).append(f"sm_{arch}")
        if with_ptx:
            made.setdefault(arch, []).append(f"compute_{arch}")
    flags = [f"arch=compute_{arch},code=[{','.join(code)}]" for arch, code in made.items()]
    return [word for flag in flags for word in ("-gencode", flag)]


def of_torch(torch: Path) -> list[str]:
    return ["-DTORCH_TARGET_VERSION=0x020a000000000000", "-isystem", str(torch / "include")]


def cpu_library(torch: Path) -> Library:
    isas = ISA_FLAGS if platform.machine().lower() in ("x86_64", "amd64") else {"scalar": []}
    objects = {"ops": ("cxx", CSRC / "ops.cpp", of_torch(torch)), "isa": ("cxx", CSRC / "cpu/isa.cpp", [])}
    objects |= {f"kernels_{isa}": ("cxx", CSRC / "cpu/kernels.cpp", flags) for isa, flags in isas.items()}
    if DARWIN:
        return Library("cpu", objects, [*compiler(), "-dynamiclib", "-undefined", "dynamic_lookup"])
    objects["portable"] = ("cxx", CSRC / "portable.cpp", [])
    return Library("cpu", objects, [*compiler(), "-shared", f"-Wl,{EXPORTS}", f"-L{torch / 'lib'}", "-ltorch_cpu"])


def cuda_library(torch: Path) -> Library:
    """The same for every torch. Needs nvcc."""
    sources = sorted(path for path in (CSRC / "cuda").iterdir() if path.suffix in (".cu", ".cpp"))
    flags = ["-DUSE_CUDA", f'-DZK_CUDA_ARCHS="{" ".join(cuda_archs())}"', *of_torch(torch)]
    objects = {source.stem: ("nvcc", source, flags) for source in sources}
    objects["portable"] = ("cxx", CSRC / "portable.cpp", [])
    # Linked against a stand-in: a torch without CUDA has no libtorch_cuda, and any torch's will do at load.
    link = [str(nvcc()), "-shared", "-cudart", "static", "-L.", f"-L{torch / 'lib'}", "-ltorch_cpu"]
    return Library("cuda", objects, [*link, "-Xlinker", f"{EXPORTS},--no-as-needed,-ltorch_cuda"])


def why_no_cuda(torch: Path) -> str | None:
    """The reason to leave out the CUDA library, or None where it is to be built."""
    if asked("ZERO_KERNELS_NO_CUDA"):
        return NO_CUDA
    if nvcc() is None:
        return NO_NVCC
    return None if asked("ZERO_KERNELS_CUDA") or has_cuda(torch) else NO_USE


def write_ninja(library: Library, folder: Path) -> None:
    """Write folder/build.ninja. Headers are tracked, so that a second build compiles what has changed."""

    def quoted(command: list[str]) -> str:
        return shlex.join(command).replace("$", "$$")

    lines = [f"cxx = {quoted([*compiler(), *CXX_FLAGS])}"]
    if library.name == "cuda":
        host = ["-ccbin", compiler()[0]] if os.environ.get("CXX") else []
        lines.append(f"nvcc = {quoted([str(nvcc()), *host, *NVCC_FLAGS, *arch_flags()])}")
    for rule in sorted({rule for rule, _, _ in library.compile.values()}):
        lines += [f"rule {rule}", f"  command = ${rule} $flags -MD -MF $out.d -c $in -o $out", "  depfile = $out.d"]
        lines += ["  deps = gcc"]
    lines += ["rule link", f"  command = {quoted(library.link[:1])} $in -o $out {quoted(library.link[1:])}"]
    for name, (rule, source, flags) in library.compile.items():
        path = str(source).replace("$", "$$").replace(" ", "$ ").replace(":", "$:")
        lines += [f"build {name}.o: {rule} {path}", f"  flags = {quoted(flags)}"]
    needs = ""
    if library.name == "cuda":
        command = [*compiler(), "-shared", "-nostdlib", "-x", "c++", os.devnull, f"-Wl,-soname,{STAND_IN}"]
        lines += ["rule stand_in", f"  command = {quoted(command)} -o $out", f"build {STAND_IN}: stand_in"]
        needs = f" | {STAND_IN}"
    lines += [f"build {library.file}: link {' '.join(f'{name}.o' for name in library.compile)}{needs}", ""]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "build.ninja").write_text("\n".join(lines))


def build(library: Library, folder: Path) -> Path:
    """Compile and link in `folder`. Raises BuildError with the first command that failed and what it said."""
    write_ninja(library, folder)
    command = [ninja(), "-C", str(folder), "-v"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    if done.returncode:
        failure = re.search(r"^FAILED: .*?\n(.*?)(?=^\[\d+/\d+\] |^ninja: |\Z)", done.stdout, re.DOTALL | re.MULTILINE)
        raise BuildError(f"$ {failure[1]}" if failure else done.stdout)
    return folder / library.file


def install(package: Path, name: str, built: Path | str) -> None:
    """Put into the package either a library (a path) or the reason why there is none (words), and remove the other."""
    package.mkdir(parents=True, exist_ok=True)
    library, report = package / library_file(name), package / f"build_error_{name}.txt"
    if isinstance(built, str):
        library.unlink(missing_ok=True)
        report.write_text(built)
        return
    report.unlink(missing_ok=True)
    # Replaced, never written over: a running process may have it mapped.
    fresh = library.with_suffix(".new")
    shutil.copy2(built, fresh)
    fresh.replace(library)


def build_all(folder: Path) -> dict[str, Path | str]:
    """For each library its file, or the reason why there is none."""
    if asked("ZERO_KERNELS_NO_BUILD"):
        return dict.fromkeys(("cpu", "cuda"), NO_BUILD)
    torch = torch_directory()
    if torch is None:
        reason = "torch's headers were not found: install torch >= 2.10, then this package again\n"
        return dict.fromkeys(("cpu", "cuda"), reason)
    built: dict[str, Path | str] = {}
    wanted = [cpu_library(torch)]
    if reason := why_no_cuda(torch):
        built["cuda"] = reason
    else:
        wanted.append(cuda_library(torch))
    for library in wanted:
        try:
            built[library.name] = build(library, folder / library.name)
        except BuildError as failure:
            built[library.name] = str(failure)
    return built


class BuildLibraries(build_ext):
    """Builds the libraries into the package, or leaves the reasons why not."""

    def get_ext_filename(self, fullname: str) -> str:
        return str(Path("zero_kernels", library_file("cpu")))

    def build_extension(self, ext: Extension) -> None:
        # Where a developer builds again and again, only what has changed is compiled.
        folder = ROOT / "build/kernels" if self.editable_mode else Path(self.build_temp)
        self.built = build_all(folder.absolute())
        self.install_in(Path(self.build_lib))
        for name, built in self.built.items():
            if isinstance(built, str) and (name == "cpu" or asked("ZERO_KERNELS_CUDA") or built not in LEFT_OUT):
                self.warn(f"the {name} library was not built; another backend will run instead:\n{built}")

    def copy_extensions_to_source(self) -> None:
        """For --inplace and editable installs, which run from the source tree."""
        self.install_in(ROOT)

    def install_in(self, root: Path) -> None:
        for name, built in self.built.items():
            install(root / "zero_kernels", name, built)


def main() -> None:
    from setuptools.command.bdist_wheel import bdist_wheel  # older ones lack it, and can still build the libraries

    class LibraryWheel(bdist_wheel):
        """The libraries need no particular Python: they speak torch's stable ABI only."""

        def get_tag(self) -> tuple[str, str, str]:
            return ("py3", "none", super().get_tag()[2])

    needs_torch = not asked("ZERO_KERNELS_NO_BUILD") and torch_directory() is None
    setup(
        ext_modules=[Extension("zero_kernels.library", sources=[], optional=True)],
        cmdclass={"build_ext": BuildLibraries, "bdist_wheel": LibraryWheel},
        setup_requires=["torch>=2.10"] if needs_torch else [],
    )


if __name__ == "__main__":
    main()
