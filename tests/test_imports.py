"""Imports go one way, and the core needs neither a GPU library nor SymPy."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import shaderdsl

ROOT = Path(shaderdsl.__file__).parent

#: Lower layers first. A module may import from its own layer and from those before it.
LAYERS = (
    ("errors",),
    ("ir", "tree"),
    ("codegen",),
    ("runtime",),
    (
        "dtypes",
        "engine",
        "finite",
        "ids",
        "lowered",
        "array",
        "namespace",
        "tracing",
        "op",
        "function",
        "handed",
        "uploads",
        "reference",
        "random",
        "tuner",
        "tuner_check",
    ),
    ("ops", "interop"),
    ("nn", "optim", "schedules"),
    (
        "bench",
        "checkpoint",
        "data",
        "finetune",
        "parallel",
        "pytest_plugin",
        "trainer",
    ),
    ("web",),
    ("cli", "__main__"),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py"))


def _part(module: Path) -> str:
    return module.parts[0].removesuffix(".py")


def _imports(module: Path):
    """The parts of shaderdsl that a module imports when it is itself imported."""
    package = ["shaderdsl", *module.parts[:-1]]
    nodes = list(ast.iter_child_nodes(ast.parse((ROOT / module).read_text())))
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split("."), node.lineno
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = above + (node.module.split(".") if node.module else [])
            for alias in node.names:
                yield [*base, alias.name], node.lineno
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            nodes += ast.iter_child_nodes(node)


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_imports_go_one_way(module):
    part = _part(module)
    if part in ("__init__", "testing"):
        return
    assert part in RANK, f"{part} has no place in LAYERS"
    for name, line in _imports(module):
        if name[0] != "shaderdsl" or len(name) < 2 or name[1] not in RANK:
            continue
        assert RANK[name[1]] <= RANK[part], (
            f"{module}:{line}: {part} must not import {name[1]}"
        )


@pytest.mark.parametrize("module", MODULES, ids=str)
def test_nothing_imports_testing(module):
    if _part(module) in ("testing", "cli"):  # `shaderdsl check` does, when it runs
        return
    assert not any(name[:2] == ["shaderdsl", "testing"] for name, _ in _imports(module))


def _loaded(statement: str) -> set[str]:
    code = f"import sys; {statement}; import json; print(json.dumps([*sys.modules]))"
    # -I would lose the checkout; the path is enough to keep user modules out
    out = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT.parent,
    )
    return {name.partition(".")[0] for name in json.loads(out.stdout)}


def test_wgpu_is_loaded_on_first_use_and_sympy_when_asked_for():
    loaded = _loaded("import shaderdsl")
    assert not loaded & {"wgpu", "sympy", "torch", "matplotlib", "hypothesis"}


@pytest.mark.parametrize("package", ["ir", "codegen"])
def test_the_core_needs_neither_wgpu_nor_sympy(package):
    names = ("wgpu", "sympy")
    block = f"[sys.modules.__setitem__(name, None) for name in {names}]"
    code = f"import importlib; {block}; importlib.import_module('shaderdsl.{package}')"
    _loaded(code)
    for module in MODULES:
        if _part(module) == package:
            used = {name[0] for name, _ in _imports(module)}
            assert not used & set(names), module


def test_import_takes_less_than_a_third_of_a_second():
    code = (
        "import numpy, time; start = time.process_time(); import shaderdsl; "
        "print(time.process_time() - start)"
    )
    times = [
        float(
            subprocess.run(
                [sys.executable, "-c", code],
                capture_output=True,
                text=True,
                check=True,
                cwd=ROOT.parent,
            ).stdout
        )
        for _ in range(5)
    ]
    assert min(times) < 0.3, times
