"""The dependency direction, read from the source: who imports whom, and where collectives are called."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OPTIM = ROOT / "python" / "zero_optim"
KERNELS = ROOT / "zero_kernels"

# Within zero_optim a room, or a file outside of all, imports from its own row and from earlier ones.
ORDER = (
    {"errors", "callers", "user_thread", "recovery", "mode", "figures"},
    {"comm"},
    {"params", "stores"},
    {"rules"},
    {"units"},
    {"grads", "settings", "validate", "admission"},
    {"step"},
    {"engine", "asleep", "shard_module", "stats", "param_groups"},
    {"memory"},
    {"checkpoint"},
    {"optimizer", "drop_ins", "sync_buffers", "full_parameters", "full_state", "grad_scaler"},
    {"integrations", "cli", "memory.command", "train", "bench", "doctor", "__main__", "__init__"},
)
COLLECTIVES = {
    "all_gather",
    "all_gather_coalesced",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_gather_single",
    "all_reduce",
    "all_reduce_coalesced",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "batch_isend_irecv",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "gather_object",
    "irecv",
    "isend",
    "monitored_barrier",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "scatter",
    "scatter_object_list",
    "send",
}


def _sources(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def _package(path: Path) -> list[str]:
    """Dotted parts of the package that holds the module."""
    base = OPTIM.parent if OPTIM in path.parents else ROOT
    return list(path.relative_to(base).parent.parts)


def _imports(path: Path) -> Iterator[str]:
    """Dotted names of every imported module, relative imports resolved; ``from a import b`` gives ``a.b``."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = _package(path)
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _offenders(paths: list[Path], forbidden: tuple[str, ...]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)} imports {name}"
        for path in paths
        for name in _imports(path)
        if any(name == word or name.startswith(word + ".") for word in forbidden)
    ]


def test_the_trees_are_there():
    assert len(_sources(OPTIM)) > 8
    assert len(_sources(KERNELS)) > 4


def test_kernels_know_no_ranks_and_no_parameters():
    assert not _offenders(_sources(KERNELS), ("torch.distributed", "zero_optim", "torch.optim"))


def test_packages_import_no_tests_examples_or_benchmarks():
    assert not _offenders(_sources(OPTIM) + _sources(KERNELS), ("tests", "examples", "benchmarks", "harness", "oracle"))


def test_the_optimizer_uses_public_ops_only():
    """The doctor, which reports on the backends, looks into the package of kernels; nobody touches the library."""
    modules = {path.stem for path in KERNELS.glob("*.py")} - {"__init__"} - _public_names()
    users = [path for path in _sources(OPTIM) if path.name != "doctor.py"]
    assert not _offenders(users, tuple(f"zero_kernels.{name}" for name in modules))
    assert not _offenders(_sources(OPTIM), ("zero_kernels_C",))


def _public_names() -> set[str]:
    """Names that ``zero_kernels`` itself gives away."""
    return {name.rsplit(".", 1)[-1] for name in _imports(KERNELS / "__init__.py")}


@pytest.mark.parametrize("folder", ["examples", "benchmarks"])
def test_users_stay_outside(folder):
    """Examples and benchmarks use what the packages export, never a compiled library by itself."""
    assert not _offenders(_sources(ROOT / folder), ("zero_kernels_C",))


def _row(module: str) -> int:
    """Of a dotted name below ``zero_optim``: its own, else that of its room."""
    while module:
        for number, names in enumerate(ORDER):
            if module in names:
                return number
        module = module.rpartition(".")[0]
    raise AssertionError("a file of zero_optim has no place in the order of modules")


def _module(dotted: str) -> str:
    """The file below ``zero_optim`` that holds a dotted name; empty for names that the package itself exports."""
    parts = dotted.split(".")[1:]
    while parts and not (OPTIM.joinpath(*parts).is_dir() or OPTIM.joinpath(*parts).with_suffix(".py").exists()):
        parts.pop()
    return ".".join(parts)


def _edges() -> Iterator[tuple[str, str]]:
    """Which file of ``zero_optim`` imports which, dotted."""
    for path in _sources(OPTIM):
        importer = ".".join(path.relative_to(OPTIM).with_suffix("").parts)
        for name in _imports(path):
            if name.split(".")[0] == "zero_optim" and (imported := _module(name)) and imported != importer:
                yield importer, imported


def test_modules_of_the_optimizer_import_in_one_direction():
    wrong = [f"{importer} imports {imported}" for importer, imported in _edges() if _row(imported) > _row(importer)]
    assert not wrong
    assert len(list(_edges())) > 100, "the reading of the source still finds imports"


def test_layout_knows_integers_only():
    layout = OPTIM / "params" / "layout.py"
    assert not _offenders([layout], ("torch",))
    kernels = {name for name in _imports(layout) if name.startswith("zero_kernels")}
    assert kernels <= {"zero_kernels.ROW"}


def test_no_module_of_the_optimizer_imports_itself_in_a_circle():
    edges: dict[str, set[str]] = {}
    for importer, imported in _edges():
        edges.setdefault(importer, set()).add(imported)
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, f"circle: {' -> '.join((*trail, module))}"
        if module not in done:
            for other in edges.get(module, ()):
                visit(other, (*trail, module))
            done.add(module)

    for module in edges:
        visit(module, ())


def _collective_calls(path: Path) -> list[str]:
    """``dist.all_reduce(...)`` by any alias of torch.distributed, and ``from torch.distributed import all_reduce``."""
    tree, aliases, found = _tree(path), {"torch.distributed"}, []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            aliases |= {
                alias.asname for alias in node.names if alias.name.startswith("torch.distributed") and alias.asname
            }
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch"):
            aliases |= {
                alias.asname or alias.name for alias in node.names if alias.name in ("distributed", "distributed_c10d")
            }
            if (node.module or "").startswith("torch.distributed"):
                found += [alias.name for alias in node.names if alias.name in COLLECTIVES]
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in COLLECTIVES and ast.unparse(node.value) in aliases:
            found.append(node.attr)
    return found


def test_collectives_are_called_where_transports_are():
    calls = {str(path.relative_to(ROOT)): _collective_calls(path) for path in _sources(OPTIM) + _sources(KERNELS)}
    transports = {"python/zero_optim/comm/transport.py"}
    assert {path for path, names in calls.items() if names} == transports, "and the reading of the source finds them"
