"""Keeps the house plan true: who may import whom, what stays light, how long things get, and that all is typed."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "slime_rl"
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

# A room may import itself and what stands on a lower floor.
FLOORS: dict[str, int] = {
    "types": 0,
    "config": 1,
    "registry": 2,
    "protocols": 2,
    "algorithms": 3,
    "data": 4,
    "buffer": 5,
    "observability": 6,
    "rollout": 7,
    "engine": 8,
    "weight_sync": 9,
    "trainer": 10,
    "cluster": 11,
    "plan": 11,
    "train": 13,
    "doctor": 12,
    "dashboard": 12,
    "preflight": 12,
    "cli": 14,
}
# A backend and the rooms that may import it.
BACKENDS: dict[str, tuple[str, ...]] = {
    "sglang": ("engine",),
    "sglang_router": ("engine",),
    "megatron": ("trainer",),
    "mbridge": ("trainer",),
    "ray": ("cluster", "train"),
}
LIGHT_MODULES = ("slime_rl.types", "slime_rl.config", "slime_rl.registry", "slime_rl.protocols")
HEAVY_PACKAGES = ("torch", "numpy", "ray", "transformers", "sglang", "megatron", "matplotlib", "rich")
WORKERS_PACKAGES = ("torch", "transformers", "sglang", "megatron")  # seconds, and hundreds of MB


def source_files() -> list[Path]:
    files = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")
    assert len(files) > 30, f"only {len(files)} files found under {PACKAGE}: the checks would prove nothing"
    return files


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def where(path: Path, node: ast.stmt | ast.expr) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno}"


def imported_names(path: Path) -> Iterator[tuple[ast.stmt, str]]:
    """Every absolute module name that a file imports at run time, in functions too; `from a import b` gives `a.b`."""
    tree = parse(path)
    typing_only = {id(node) for block in ast.walk(tree) if is_type_checking(block) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where(path, node)}: relative import; write the full name"
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_every_file_belongs_to_a_known_room() -> None:
    unknown = [str(path.relative_to(ROOT)) for path in source_files() if room_of(path) not in FLOORS]
    assert unknown == []


def test_rooms_import_only_lower_floors() -> None:
    wrong = []
    for path in source_files():
        room = room_of(path)
        for node, name in imported_names(path):
            if not name.startswith("slime_rl."):
                continue
            other = name.split(".")[1]
            if other in FLOORS and other != room and FLOORS[other] >= FLOORS[room]:
                wrong.append(f"{where(path, node)}: {room} imports {name}")
    assert wrong == []


def test_backends_are_imported_only_by_the_room_that_wraps_them() -> None:
    wrong = []
    for path in source_files():
        for node, name in imported_names(path):
            allowed = BACKENDS.get(name.split(".")[0])
            if allowed is not None and room_of(path) not in allowed:
                wrong.append(f"{where(path, node)}: {room_of(path)} imports {name}; only {allowed} may")
    assert wrong == []


def test_every_folder_with_modules_is_a_package() -> None:
    missing = [path for path in PACKAGE.rglob("*") if path.is_dir() and has_python(path) and not is_package(path)]
    assert missing == []


def has_python(folder: Path) -> bool:
    return any(folder.glob("*.py"))


def is_package(folder: Path) -> bool:
    return (folder / "__init__.py").is_file()


def check_import(modules: tuple[str, ...], without: tuple[str, ...]) -> None:
    code = (
        f"import sys, {', '.join(modules)}\n"
        f"loaded = [name for name in {without!r} if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    outcome = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert outcome.returncode == 0, outcome.stderr


def test_config_registry_protocols_and_types_import_without_heavy_packages() -> None:
    check_import(LIGHT_MODULES, HEAVY_PACKAGES)


def test_the_driver_imports_without_the_packages_of_its_workers() -> None:
    check_import(("slime_rl.train",), WORKERS_PACKAGES)


def test_files_are_short() -> None:
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in source_files()
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_FILE_LINES} == {}


def test_functions_are_short() -> None:
    long = {}
    for path in source_files():
        for node in functions(path):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                long[f"{where(path, node)} {node.name}"] = lines
    assert long == {}


def test_every_function_is_fully_typed() -> None:
    untyped = []
    for path in source_files():
        for node in functions(path):
            arguments = [
                *node.args.posonlyargs,
                *node.args.args,
                *node.args.kwonlyargs,
                node.args.vararg,
                node.args.kwarg,
            ]
            bare = [a.arg for a in arguments if a and a.annotation is None and a.arg not in ("self", "cls")]
            if bare or (node.returns is None and node.name != "__init__"):
                untyped.append(f"{where(path, node)} {node.name}: {', '.join(bare) or 'return'}")
    assert untyped == []


def test_no_machine_path_is_in_the_package() -> None:
    """Absolute paths of one machine work on that machine only; /proc, /dev, /sys and /tmp itself are the system's."""
    wrong = []
    starts = [f"{quote}/{folder}" for folder in ("home/", "root/", "work/", "tmp/") for quote in ("'", '"')]
    for path in source_files():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if any(start in line for start in starts):
                wrong.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert wrong == []


def test_state_that_changes_does_not_live_in_modules() -> None:
    """No `global` statement: state belongs to objects that someone owns."""
    wrong = []
    for path in source_files():
        tree = parse(path)
        wrong += [where(path, node) for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert wrong == []


def test_names_of_test_files_are_unique() -> None:
    """pytest imports them by their base name: of two that share one, the second cannot be collected."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_scripts_that_import_from_the_repository_find_it() -> None:
    """`python benchmarks/soak.py` has its own folder on the path; the root, where `tools` is, it must put there."""
    lost = []
    for path in [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("tools/*.py")]:
        text = path.read_text(encoding="utf-8")
        names = [name.partition(".")[0] for _, name in imported_names(path)]
        is_program = '__name__ == "__main__"' in text
        if is_program and {"benchmarks", "tools", "plugins"} & set(names) and "sys.path" not in text:
            lost.append(str(path.relative_to(ROOT)))
    assert lost == []
