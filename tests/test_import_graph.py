"""Which modules of the package import which: rooms, layers, and no circles."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = "megatron_cp_plugin"

# Whatever the first begins with imports nothing that the second begins with.
FORBIDDEN = [
    (f"{PACKAGE}.kernels", f"{PACKAGE}.algorithms"),
    (f"{PACKAGE}.kernels", f"{PACKAGE}.registry"),
    (f"{PACKAGE}.kernels", f"{PACKAGE}.integration"),
    (f"{PACKAGE}.algorithms", f"{PACKAGE}.kernels"),
    (f"{PACKAGE}.algorithms", f"{PACKAGE}.integration"),
]
# The rooms of core, folders and modules, the lowest first: one imports from its own line and from
# those above it.
ROOMS = [
    ("layout", "ranges"),
    ("agree", "comm", "communication"),
    ("kernel", "partial"),
    ("masks", "tiles"),
    ("blocks",),
    ("balance", "document_layout"),
    ("call", "placement", "plans"),
    ("execution",),
    ("algorithm",),
    ("autograd",),
    ("linear",),
]
# What core imports of the rest of the package.
BELOW_CORE = {f"{PACKAGE}.errors"}
# The planner and the tools: they import what trains, never the reverse.
TOOLS = ("capabilities", "cli", "doctor", "harness")
OUTSIDE = ("planner", *TOOLS)
# Which modules that train import of them nevertheless, and which: for `auto`, and for recordings.
AUTO = {f"{PACKAGE}.context", f"{PACKAGE}.integration.auto"}
RECORDING = (f"{PACKAGE}.integration.launch", f"{PACKAGE}.harness.recorder")
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


def test_no_module_is_imported_by_what_it_imports() -> None:
    graph = import_graph()
    assert f"{PACKAGE}.core.placement" in graph[f"{PACKAGE}.core.algorithm"]
    assert circle(graph) == []


def upward(graph: Graph) -> set[tuple[str, str]]:
    """Imports from a room of core to one that is higher.

    Raises: KeyError for a module that is in none of `ROOMS`.
    """
    of_room = {name: level for level, names in enumerate(ROOMS) for name in names}
    levels = {
        name: of_room[name.split(".")[2]]
        for name in {*graph, *(other for others in graph.values() for other in others)}
        if name.startswith(f"{PACKAGE}.core.")
    }
    return {
        (name, other)
        for name, others in graph.items()
        for other in others
        if name in levels and other in levels and levels[name] < levels[other]
    }


def leaving(graph: Graph) -> set[tuple[str, str]]:
    """Imports from what trains to the planner and the tools."""
    outside = tuple(f"{PACKAGE}.{name}" for name in OUTSIDE)
    return {
        (name, other)
        for name, others in graph.items()
        for other in others
        if any(within(other, one) for one in outside)
        and not any(within(name, one) for one in outside)
    }


def test_no_room_of_core_imports_a_higher_one() -> None:
    graph = import_graph()
    found = {name.split(".")[2] for name in graph if name.startswith(f"{PACKAGE}.core.")}
    assert found == {name for names in ROOMS for name in names}
    assert upward(graph) == set()


def test_core_stands_alone() -> None:
    core = f"{PACKAGE}.core"
    found = {
        other
        for name, others in import_graph().items()
        for other in others
        if within(name, core) and within(other, PACKAGE) and not within(other, core)
    }
    assert found == BELOW_CORE


def test_what_trains_imports_the_planner_for_auto_alone_and_no_tool() -> None:
    found = leaving(import_graph()) - {RECORDING}
    assert {other for _, other in found if not within(other, f"{PACKAGE}.planner")} == set()
    assert {name for name, _ in found} == AUTO


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


def test_the_planner_imports_no_tool_and_the_tools_the_harness_for_its_commands_alone() -> None:
    tools = tuple(f"{PACKAGE}.{name}" for name in TOOLS)
    assert not any(
        within(other, tool)
        for name, others in import_graph().items()
        if within(name, f"{PACKAGE}.planner")
        for other in others
        for tool in tools
    )
    commands = {
        (name, other)
        for name, others in import_graph().items()
        for other in others
        if within(other, f"{PACKAGE}.harness") and not within(name, f"{PACKAGE}.harness")
    }
    # Those with parsers of their own are imported by name.
    assert commands == {RECORDING}


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
