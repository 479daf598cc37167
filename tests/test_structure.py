"""The cut of the package, read from its source: imports point one way, operators have one name, graphs stay pure."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

import kimi_fx
from kimi_fx.ops import Ops

ROOT = Path(kimi_fx.__file__).parent
SOURCES = {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}
# A file or folder may import those before it.
ORDER = (
    "signals", "rules", "config", "compose", "ops", "graphs", "checkpoint", "tokenizer", "strict_json", "chat", "text",
    "results", "inputs", "turns", "request", "runtime", "admit", "prompts", "engine", "follow", "validate", "warmup",
    "doctor", "api", "bench", "cli", "__init__", "__main__",
)  # fmt: skip


def unit(file: str) -> str:
    return file.split("/")[0].removesuffix(".py")


def imports(file: str) -> Iterator[str]:
    """Every import of a file, also those inside functions: `.graphs.params` for our own, else the top name."""
    package = file.split("/")[:-1]
    for node in ast.walk(SOURCES[file]):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield str(node.module).split(".")[0]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level]
            modules = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ("." + ".".join([*base, module]) for module in modules)


def own(file: str) -> set[str]:
    """Our modules that a file imports; `from .. import __version__` is none."""
    return {name[1:] for name in imports(file) if name.startswith(".") and name != ".__version__"}


def foreign(file: str) -> set[str]:
    """What it imports that is neither ours nor Python's."""
    return {name for name in imports(file) if not name.startswith(".") and name not in sys.stdlib_module_names}


def inside(folder: str) -> list[str]:
    return [file for file in SOURCES if file.startswith(folder + "/")]


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Name called, without what it belongs to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            yield node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id, node


@pytest.mark.parametrize("file", SOURCES)
def test_imports_point_one_way(file: str) -> None:
    place = ORDER.index(unit(file))
    behind = {name for name in own(file) if ORDER.index(name.split(".")[0]) > place}
    assert not behind, f"{file} imports {behind}"
    assert "kimi_fx" not in foreign(file), f"{file} imports kimi_fx by its name"


def test_files_of_one_folder_import_each_other_one_way() -> None:
    for folder in ("ops", "graphs", "checkpoint", "runtime", "bench"):
        names = {f"{folder}.{Path(file).stem}": own(file) for file in inside(folder)}
        waiting = {name: imported & names.keys() for name, imported in names.items()}
        while free := [name for name, imported in waiting.items() if not imported & waiting.keys()]:
            for name in free:
                del waiting[name]
        assert not waiting, f"a circle among {sorted(waiting)}"


def test_operators_import_torch_alone() -> None:
    for file in inside("ops"):
        assert foreign(file) <= {"torch"}, file
        assert {name.split(".")[0] for name in own(file)} <= {"ops", "config"}, file


def test_graphs_import_operators_alone() -> None:
    for file in inside("graphs"):
        assert foreign(file) <= {"torch", "einops"}, file
        assert {name.split(".")[0] for name in own(file)} <= {"graphs", "ops", "config"}, file


def test_checkpoints_know_the_plan_and_the_packing() -> None:
    reached = {name for file in inside("checkpoint") for name in own(file)}
    allowed = {"graphs.params", "graphs.pytree", "ops.marlin", "config"}
    assert {name for name in reached if not name.startswith("checkpoint.")} <= allowed


def test_graphs_stay_on_the_device() -> None:
    """Nothing that waits for numbers, talks to the outside or keeps something between calls."""
    forbidden = {"item", "cpu", "tolist", "numpy", "cuda", "synchronize", "nonzero", "print", "open"}
    for file in inside("graphs"):
        assert not forbidden & {name for name, _ in calls(SOURCES[file])}, file
        assert not any(isinstance(node, ast.Global | ast.Nonlocal) for node in ast.walk(SOURCES[file])), file


def test_every_operator_is_defined_once() -> None:
    names = [
        call.args[0].value
        for tree in SOURCES.values()
        for name, call in calls(tree)
        if name == "custom_op" and isinstance(call.args[0], ast.Constant)
    ]
    handed = [field.name for field in fields(Ops)]
    assert sorted(names) == sorted(f"kimi_fx::{name}" for name in [*handed, "peer_sum"])  # that one is of an axis


def test_only_config_reads_the_environment() -> None:
    reading = {
        file
        for file, tree in SOURCES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv")
    }
    assert reading <= {"config.py"}


def test_docstrings() -> None:
    """Every module says what it does, and so does every public function and method of the graphs and the engine."""
    assert not [file for file, tree in SOURCES.items() if not ast.get_docstring(tree)]
    for file in (*inside("graphs"), "engine.py", "api.py"):
        for scope in [SOURCES[file], *(node for node in SOURCES[file].body if isinstance(node, ast.ClassDef))]:
            bare = [
                node.name
                for node in scope.body
                if isinstance(node, ast.FunctionDef) and node.name[0] != "_" and not ast.get_docstring(node)
            ]
            assert not bare, f"{file}: {bare}"
