"""Which modules of the package import which: layers, and no circles."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_cp_plugin"

# Whatever the first begins with imports nothing that the second begins with.
FORBIDDEN = [
    (f"{PACKAGE}.core", f"{PACKAGE}.kernels"),
    (f"{PACKAGE}.core", f"{PACKAGE}.algorithms"),
    (f"{PACKAGE}.core", f"{PACKAGE}.registry"),
    (f"{PACKAGE}.core", f"{PACKAGE}.integration"),
    (f"{PACKAGE}.core", f"{PACKAGE}.harness"),
    (f"{PACKAGE}.kernels", f"{PACKAGE}.algorithms"),
    (f"{PACKAGE}.kernels", f"{PACKAGE}.registry"),
    (f"{PACKAGE}.kernels", f"{PACKAGE}.integration"),
    (f"{PACKAGE}.kernels", f"{PACKAGE}.harness"),
    (f"{PACKAGE}.algorithms", f"{PACKAGE}.kernels"),
    (f"{PACKAGE}.algorithms", f"{PACKAGE}.integration"),
    (f"{PACKAGE}.algorithms", f"{PACKAGE}.harness"),
]
# Packages that not everybody has, and who may import them.
FOREIGN = {
    "megatron": ("integration", "harness"),
    "flash_attn": ("kernels",),
    "fla": ("kernels",),
    "triton": ("kernels",),
}

Graph = Mapping[str, Iterable[str]]


def imported(tree: ast.AST, modules: Iterable[str]) -> Iterator[str]:
    """Full names, wherever in a file the imports are: in functions and for type checking too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in modules else str(node.module)


@cache
def import_graph() -> dict[str, set[str]]:
    files = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for path in (ROOT / PACKAGE).rglob("*.py")
    }
    return {name: set(imported(ast.parse(path.read_text()), files)) for name, path in files.items()}


def circle(graph: Graph) -> list[str]:
    """Some modules, each of which imports the next and the last the first; [] if there are none."""
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return path[path.index(name) :]
        if name in done or name not in graph:
            return []
        for other in sorted(graph[name]):
            if found := visit(other, [*path, name]):
                return found
        done.add(name)
        return []

    return next((found for name in sorted(graph) if (found := visit(name, []))), [])


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def test_a_circle_is_found() -> None:
    assert circle({"a": ["b", "torch"], "b": ["c"], "c": ["b"], "d": []}) == ["b", "c"]
    assert circle({"a": ["b", "c"], "b": ["c"], "c": []}) == []
    found = imported(ast.parse("def f():\n  from p.q import r, s"), {"p.q.r"})
    assert list(found) == ["p.q.r", "p.q"]


def test_no_module_is_imported_by_what_it_imports() -> None:
    graph = import_graph()
    assert f"{PACKAGE}.core.placement" in graph[f"{PACKAGE}.core.algorithm"]
    assert circle(graph) == []


@pytest.mark.parametrize(("lower", "upper"), FORBIDDEN)
def test_layers(lower: str, upper: str) -> None:
    graph = import_graph()
    assert any(within(name, lower) for name in graph)
    assert any(within(name, upper) for name in graph)
    wrong = [
        (name, other)
        for name, others in graph.items()
        for other in others
        if within(name, lower) and within(other, upper)
    ]
    assert wrong == []


def test_what_trains_needs_the_harness_for_recordings_alone() -> None:
    found = {
        (name, other)
        for name, others in import_graph().items()
        for other in others
        if within(other, f"{PACKAGE}.harness") and not within(name, f"{PACKAGE}.harness")
    }
    # The commands `megatron-cp train` and `prepare-data` are the harness.
    commands = {(name, other) for name, other in found if name == f"{PACKAGE}.cli"}
    assert commands == {
        (f"{PACKAGE}.cli", f"{PACKAGE}.harness.{n}") for n in ("train", "prepare_data")
    }
    assert found - commands == {(f"{PACKAGE}.integration.launch", f"{PACKAGE}.harness.recorder")}


@pytest.mark.parametrize("foreign", FOREIGN)
def test_foreign_packages(foreign: str) -> None:
    importers = {
        name
        for name, others in import_graph().items()
        if any(within(other, foreign) for other in others)
    }
    assert importers
    allowed = tuple(f"{PACKAGE}.{folder}" for folder in FOREIGN[foreign])
    assert {n for n in importers if not any(within(n, folder) for folder in allowed)} == set()
