"""Who may import whom, read from the sources: the core has no clock, no socket and no thread, and arrows point down."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import prefixroute
from prefixroute import plan

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "prefixroute"
EDGES = {"__init__", "aio", "cli", "metrics", "replay", "subjects", "testing"}
"""Modules of the package that are no part of the core, beside the folders. A module that is new is core until said."""

FOLDERS = {"analyze", "emulator", "plan", "sim"}
"""Folders of the package: edges, all of them."""

CORE = {path.stem: path for path in PACKAGE.glob("*.py") if path.stem not in EDGES}
DESIGNED = "errors events burst domain chain changes edge tree forest anchors reblock residency digest replica"
DESIGNED += " transfer gossip index load fleet policy decision router history endpoint node"
DESIGNED += " spans groups promises accuracy overview report standing settings"
DESIGNED += " tenants fairness tallies"

FORBIDDEN = {
    "clocks": {"time", "datetime", "sched"},
    "networks": {"socket", "selectors", "ssl", "http", "urllib", "zmq", "httpx", "starlette", "uvicorn"},
    "threads and loops": {"threading", "_thread", "asyncio", "multiprocessing", "concurrent", "subprocess", "signal"},
    "chance": {"secrets", "uuid"},
    "engines": {
        "vllm",
        "sglang",
        "torch",
        "transformers",
        *(f"prefixroute_{name}" for name in ("zmq", "vllm", "sglang", "inproc")),
    },
    "edges": {f"prefixroute.{name}" for name in EDGES | FOLDERS} | {"prefixroute_lan4"},
}
PUBLIC_MODULES = {
    "aio",
    "emulator",
    "errors",
    "events",
    "load",
    "metrics",
    "plan",
    "policy",
    "residency",
    "sim",
    "testing",
}
OUTSIDE = sorted(path for folder in ("adapters", "examples") for path in (ROOT / folder).rglob("*.py"))


class Import(NamedTuple):
    """One imported name: ``from module import name``, or ``import module`` with no name."""

    module: str
    name: str


def imports(path: Path) -> Iterator[Import]:
    """Everything that a file imports, at its top or inside functions, with relative names made absolute."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            package = list(path.relative_to(ROOT).parent.parts)
            base = package[: len(package) + 1 - node.level] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from . import chain` names a module, `from .chain import key` what is in it.
                is_module = (ROOT / module.replace(".", "/") / f"{alias.name}.py").exists()
                yield Import(f"{module}.{alias.name}", "") if is_module else Import(module, alias.name)


def defined(path: Path) -> set[str]:
    """Names that a module or package makes public: defined at its top, or listed in ``__all__``."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            if "__all__" in names and isinstance(node.value, (ast.List, ast.Tuple)):
                names |= {element.value for element in node.value.elts if isinstance(element, ast.Constant)}
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def test_core_has_the_files_of_the_design() -> None:
    assert set(DESIGNED.split()) <= CORE.keys()
    assert not {path.stem for path in PACKAGE.glob("*.py")} & PUBLIC_MODULES - EDGES - CORE.keys()


@pytest.mark.parametrize("module", sorted(CORE))
def test_core_imports_nothing_that_waits_or_tells_the_time(module: str) -> None:
    found = {
        f"{kind}: {imported.module}"
        for imported in imports(CORE[module])
        for kind, names in FORBIDDEN.items()
        for name in names
        if imported.module == name or imported.module.startswith(f"{name}.")
    }
    assert not found


@pytest.mark.parametrize("module", sorted(CORE))
def test_core_draws_no_global_random_number(module: str) -> None:
    """`random.Random` is a type there; the generator itself is the caller's."""
    assert not [imported for imported in imports(CORE[module]) if imported.module == "random" and imported.name]
    attributes = [node for node in ast.walk(ast.parse(CORE[module].read_text())) if isinstance(node, ast.Attribute)]
    used = {f"{node.value.id}.{node.attr}" for node in attributes if isinstance(node.value, ast.Name)}
    assert {name for name in used if name.startswith("random.")} <= {"random.Random"}
    assert not used & {"np.random", "numpy.random"}


@pytest.mark.parametrize("module", sorted(CORE))
def test_core_makes_no_generator_of_its_own(module: str) -> None:
    calls = [node.func for node in ast.walk(ast.parse(CORE[module].read_text())) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Attribute) and call.attr == "Random"]


def test_arrows_of_the_core_point_down() -> None:
    graph = {
        name: {
            imported.module.removeprefix("prefixroute.")
            for imported in imports(path)
            if imported.module.startswith("prefixroute")
        }
        for name, path in CORE.items()
    }
    order = list(TopologicalSorter(graph).static_order())
    assert set(order) == CORE.keys(), "the core imports the core alone"
    assert (graph["errors"], graph["events"]) == (set(), {"errors"})
    for ground, above in (("events", "domain"), ("chain", "tree"), ("tree", "residency"), ("residency", "node")):
        assert order.index(ground) < order.index(above)
    assert not {name for name in CORE if name != "node" and "node" in graph[name]}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_package_imports_no_engine_and_nothing_built_on_it(path: Path) -> None:
    above = FORBIDDEN["engines"] | {"prefixroute_lan4"}
    assert not [imported for imported in imports(path) if imported.module.split(".")[0] in above]


@pytest.mark.parametrize("path", OUTSIDE, ids=lambda path: str(path.relative_to(ROOT)))
def test_adapters_and_examples_use_public_names(path: Path) -> None:
    for imported in imports(path):
        package, _, module = imported.module.partition(".")
        if package != "prefixroute":
            continue
        if not module:
            assert imported.name in prefixroute.__all__ or imported.name in PUBLIC_MODULES, imported
            continue
        assert module in PUBLIC_MODULES, imported
        if not imported.name:
            continue
        source = PACKAGE / f"{module}.py"
        assert imported.name in defined(source if source.exists() else PACKAGE / module / "__init__.py"), imported


SIMULATOR = sorted((PACKAGE / "sim").glob("*.py"))


@pytest.mark.parametrize("path", SIMULATOR, ids=lambda path: path.stem)
def test_the_simulator_uses_public_names_and_reads_no_clock_but_in_its_runner(path: Path) -> None:
    for imported in imports(path):
        package, _, module = imported.module.partition(".")
        # What `prefixroute simulate` offers is a table of the command line's, and simulates nothing.
        is_table = (path.stem, module) == ("commands", "subjects")
        if package == "prefixroute" and module.split(".")[0] != "sim" and not is_table:
            assert module in ("", "plan"), imported
            assert imported.name in (plan if module else prefixroute).__all__, imported
        if path.stem not in ("replication", "parallel"):
            assert package not in {"asyncio", "socket", "time", "threading", "multiprocessing"}, imported


@pytest.mark.parametrize("path", sorted((PACKAGE / "plan").glob("*.py")), ids=lambda path: path.stem)
def test_planners_read_no_clock_and_draw_no_number_of_their_own(path: Path) -> None:
    waits = FORBIDDEN["clocks"] | FORBIDDEN["networks"] | FORBIDDEN["threads and loops"] | FORBIDDEN["chance"]
    assert not [imported for imported in imports(path) if imported.module.split(".")[0] in waits]
    calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    drawn = [call for call in calls if isinstance(call, ast.Attribute) and call.attr in ("Random", "default_rng")]
    assert not drawn


def test_public_names_exist_and_are_sorted() -> None:
    assert len(set(prefixroute.__all__)) == len(prefixroute.__all__)
    assert all(hasattr(prefixroute, name) for name in prefixroute.__all__)
    from_modules = {imported.name for imported in imports(PACKAGE / "__init__.py") if imported.name != "annotations"}
    assert set(prefixroute.__all__) == from_modules | {"__version__"}


def test_import_of_the_package_loads_no_edge_no_extra_and_no_engine() -> None:
    script = "import sys, json, prefixroute; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(json.loads(done.stdout))
    ours = {name.removeprefix("prefixroute.") for name in loaded if name.startswith("prefixroute.")}
    assert ours == CORE.keys()
    extras = {"zmq", "httpx", "starlette", "uvicorn", "uvloop", "matplotlib", "rich", "prometheus_client"}
    assert not loaded & (extras | FORBIDDEN["engines"] | {"prefixroute_lan4"})


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", ("time", "")),
        ("def f():\n    from asyncio import run", ("asyncio", "run")),
        ("from . import chain", ("prefixroute.keys.chain", "")),
        ("from .chain import STRIDE", ("prefixroute.keys.chain", "STRIDE")),
        ("if TYPE_CHECKING:\n    import zmq.asyncio as z", ("zmq.asyncio", "")),
        ("from .emulator import wire", ("prefixroute.emulator.vllm_wire", "")),
    ],
)
def test_reader_of_imports_finds_them_all(source: str, found: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: source)
    assert list(imports(PACKAGE / "x.py")) == [found]
