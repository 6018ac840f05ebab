"""Who may import whom, read from the sources: six parts, the few names that cross between them, and no circle anywhere.

The core has no clock, no socket and no thread. Each rule is a function from sources to what is wrong, so that the last
tests can plant a fault for each and see it found.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

import prefixroute
from prefixroute import plan

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "prefixroute"

GROUND = ("errors", "events", "load", "fairness")
"""Plain data that every part may import."""

PARTS: dict[str, set[str]] = {
    "keys": set(),
    "residency": {"keys"},
    "replication": {"keys"},
    "policy": {"keys"},
    "routing": {"keys", "policy", "replication"},
    "endpoint": {"keys", "residency", "replication", "routing"},
}
"""Part -> the parts it may import, beside the ground. Residency, replication and policy know nothing of each other."""

CROSSING: dict[tuple[str, str], set[str]] = {
    ("routing", "policy"): {"Candidate", "Entry", "Policy", "Request", "Withheld"},
    ("routing", "replication"): {"Copy", "Peer"},
    ("endpoint", "residency"): {"Published", "Residency"},
    ("endpoint", "replication"): {"Copy", "OwnedSet", "Peer"},
    ("endpoint", "routing"): {"Fleet", "IndexFeed", "LocalStanding", "MergedIndex", "PeerStanding", "Standing"},
}
"""(importing part, imported part) -> all the names that it takes, to the letter. Of the keys, any."""

FACADE = ("settings", "stats", "node_clock", "node")
"""What puts the parts together: the rest of the core."""

EDGES = {"aio", "metrics", "resolver", "testing", "threads"}
"""Modules of the package that are no part of the core."""

FOLDERS = {"analyze", "cli", "emulator", "plan", "sim"}
"""Folders of the package that are no part of the core."""

MOST_AT_THE_TOP = 14
"""Files that a newcomer meets first."""

FORBIDDEN = {
    "clocks": {"time", "datetime", "sched"},
    "networks": {"socket", "selectors", "ssl", "http", "urllib", "zmq", "httpx", "starlette", "uvicorn"},
    "threads and loops": {"threading", "_thread", "asyncio", "multiprocessing", "concurrent", "subprocess", "signal"},
    "chance": {"secrets", "uuid"},
    "engines": {"vllm", "sglang", "torch", "transformers"},
}
ABOVE = {f"prefixroute_{name}" for name in ("streams", "zmq", "vllm", "sglang", "inproc", "serving", "launch", "lan4")}
"""Packages that are built on this one."""

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
    "threads",
}
FOR_COMMANDS = "cli"
"""A package that brings a command of its own takes the command line's `Command` too."""

Sources = Mapping[str, str]
"""Dotted module -> its source; a package is named as the folder, its source that of ``__init__``."""


class Import(NamedTuple):
    """One imported name: ``from module import name``, or ``import module`` with no name."""

    module: str
    name: str


# --- reading -------------------------------------------------------------------------------------------------


def module_of(path: Path, root: Path = ROOT) -> str:
    """The dotted name of a file below `root`."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES: dict[str, str] = {module_of(path): path.read_text() for path in sorted(PACKAGE.rglob("*.py"))}
PACKAGES = {module_of(path) for path in PACKAGE.rglob("__init__.py")}


def imports(module: str, sources: Sources, packages: set[str] = PACKAGES) -> Iterator[Import]:
    """Everything that a module imports, at its top or inside functions, with relative names made absolute."""
    package = module if module in packages else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(sources[module])):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, "")
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")
            base = above[: len(above) + 1 - node.level] if node.level else []
            found = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                # `from . import chain` names a module, `from .chain import key` what is in it.
                is_module = f"{found}.{alias.name}" in sources
                yield Import(f"{found}.{alias.name}", "") if is_module else Import(found, alias.name)


def part_of(module: str) -> str:
    """The part of the package that a module belongs to: a folder, or a file at the top; "" for the package itself."""
    _, _, rest = module.partition(".")
    return rest.partition(".")[0]


CORE = {
    module: ROOT.joinpath(*module.split("."), "__init__.py")
    if module in PACKAGES
    else ROOT / f"{module.replace('.', '/')}.py"
    for module in SOURCES
    if part_of(module) in {*GROUND, *PARTS, *FACADE}
}
"""Every module of the core, and its file."""


# --- rules: what is wrong, a line each -----------------------------------------------------------------------


def crossings(sources: Sources) -> dict[tuple[str, str], set[str]]:
    """The names that each part takes from another one, or from what lies above the parts."""
    found: dict[tuple[str, str], set[str]] = {}
    for module in sources:
        part = part_of(module)
        if part not in PARTS:
            continue
        for imported in imports(module, sources):
            package, _, _ = imported.module.partition(".")
            other = part_of(imported.module)
            if package == "prefixroute" and other != part and other not in GROUND:
                found.setdefault((part, other), set()).add(imported.name or imported.module)
    return found


def wrong_arrows(sources: Sources) -> list[str]:
    """Imports upward or across that `PARTS` does not have, and names that `CROSSING` does not."""
    wrong = []
    for (part, other), names in sorted(crossings(sources).items()):
        if other not in PARTS[part]:
            wrong.append(f"{part} imports {other or 'the package'}: {', '.join(sorted(names))}")
        elif other != "keys" and names - CROSSING[part, other]:
            wrong.append(f"{part} takes from {other}: {', '.join(sorted(names - CROSSING[part, other]))}")
    for module in sources:
        part = part_of(module)
        for imported in imports(module, sources) if part in GROUND else ():
            other = part_of(imported.module)
            if imported.module.startswith("prefixroute") and other != "errors":
                wrong.append(f"the ground, {module}, imports {imported.module}")
        for imported in imports(module, sources) if part in FACADE else ():
            other = part_of(imported.module)
            if imported.module.startswith("prefixroute") and other not in {*GROUND, *PARTS, *FACADE}:
                wrong.append(f"{module} imports {imported.module}")
    return wrong


def circle(sources: Sources) -> list[str]:
    """Modules that import each other in a ring, whenever they do it; empty where there is none.

    A package's ``__init__`` gathers names of its modules, which therefore do not count it when they import each other.
    """
    graph: dict[str, set[str]] = {}
    for module in sources:
        wanted = {imported.module for imported in imports(module, sources) if imported.module in sources}
        graph[module] = {other for other in wanted if not module.startswith(f"{other}.")}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def waiting(sources: Sources, parts: set[str]) -> list[str]:
    """Imports of clocks, networks, threads, chance and engines in these parts."""
    return [
        f"{module} imports {imported.module} ({kind})"
        for module in sources
        if part_of(module) in parts
        for imported in imports(module, sources)
        for kind, names in FORBIDDEN.items()
        if imported.module.split(".")[0] in names
    ]


CORE_PARTS = {*GROUND, *PARTS, *FACADE}


def test_arrows_between_the_parts_are_those_of_the_plan() -> None:
    assert wrong_arrows(SOURCES) == []


def test_every_name_of_the_plan_is_taken() -> None:
    found = crossings(SOURCES)
    assert {pair: names for pair, names in found.items() if pair[1] != "keys"} == CROSSING
    assert {part: {other for other in PARTS if (part, other) in found} for part in PARTS} == PARTS


def test_there_is_no_circle_in_the_package() -> None:
    assert circle(SOURCES) == []


def test_the_facade_is_imported_by_no_part() -> None:
    above = {f"prefixroute.{name}" for name in FACADE}
    for module in SOURCES:
        if part_of(module) in {*GROUND, *PARTS}:
            assert not [imported for imported in imports(module, SOURCES) if imported.module in above], module


def test_core_imports_nothing_that_waits_or_tells_the_time() -> None:
    assert waiting(SOURCES, CORE_PARTS) == []


def test_top_of_the_package_is_what_a_newcomer_can_take_in() -> None:
    files = {path.stem for path in PACKAGE.glob("*.py")}
    assert files == {"__init__", *GROUND, *FACADE, *EDGES}
    assert len(files) <= MOST_AT_THE_TOP
    assert {path.parent.name for path in PACKAGE.glob("*/__init__.py")} == {*PARTS, *FOLDERS}


@pytest.mark.parametrize("module", sorted(CORE))
def test_core_draws_no_global_random_number(module: str) -> None:
    """`random.Random` is a type there; the generator itself is the caller's."""
    assert not [i for i in imports(module, SOURCES) if i.module == "random" and i.name]
    tree = ast.parse(SOURCES[module])
    attributes = [node for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    used = {f"{node.value.id}.{node.attr}" for node in attributes if isinstance(node.value, ast.Name)}
    assert {name for name in used if name.startswith("random.")} <= {"random.Random"}
    assert not used & {"np.random", "numpy.random"}
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    assert not [call for call in calls if isinstance(call, ast.Attribute) and call.attr == "Random"]


# --- what is built on the core -------------------------------------------------------------------------------


def defined(source: str) -> set[str]:
    """Names that a module or package makes public: defined at its top, or listed in ``__all__``."""
    names: set[str] = set()
    for node in ast.parse(source).body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
            if "__all__" in names and isinstance(node.value, (ast.List, ast.Tuple)):
                names |= {element.value for element in node.value.elts if isinstance(element, ast.Constant)}
    return {name for name in names if not name.startswith("_") or name == "__version__"}


def test_package_imports_no_engine_and_nothing_built_on_it() -> None:
    above = FORBIDDEN["engines"] | ABOVE
    for module in SOURCES:
        assert not [i for i in imports(module, SOURCES) if i.module.split(".")[0] in above], module


def outside() -> Iterator[tuple[str, dict[str, str], set[str]]]:
    """Each package, or lone script, of the adapters and examples: its name, sources and packages."""
    for folder in ("adapters", "examples/launch", "examples/lan4", "examples/custom_engine"):
        root = ROOT / folder
        sources = {module_of(path, root): path.read_text() for path in root.rglob("*.py")}
        packages = {module_of(path, root) for path in root.rglob("__init__.py")}
        for name in sorted({module.partition(".")[0] for module in sources}):
            yield name, {m: s for m, s in sources.items() if m.partition(".")[0] == name}, packages


OUTSIDE = {name: (sources, packages) for name, sources, packages in outside()}


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_adapters_and_examples_use_public_names(name: str) -> None:
    sources, packages = OUTSIDE[name]
    for module in sources:
        for imported in imports(module, sources, packages):
            package, _, rest = imported.module.partition(".")
            if package != "prefixroute":
                continue
            if not rest:
                assert imported.name in prefixroute.__all__ or imported.name in PUBLIC_MODULES, imported
                continue
            assert rest in PUBLIC_MODULES | {FOR_COMMANDS}, imported
            if imported.name:
                assert imported.name in defined(SOURCES[imported.module]), imported


@pytest.mark.parametrize("name", sorted(OUTSIDE))
def test_adapters_and_examples_have_no_circle(name: str) -> None:
    sources, packages = OUTSIDE[name]
    graph = {
        module: {i.module for i in imports(module, sources, packages) if i.module in sources and i.module != module}
        for module in sources
    }
    graph = {module: {o for o in others if not module.startswith(f"{o}.")} for module, others in graph.items()}
    assert len(list(TopologicalSorter(graph).static_order())) == len(sources)


def test_packages_outside_stand_on_each_other_in_one_order() -> None:
    graph = {
        name: {
            other
            for module in sources
            for other in {i.module.partition(".")[0] for i in imports(module, sources, packages)}
            if other in OUTSIDE and other != name
        }
        for name, (sources, packages) in OUTSIDE.items()
    }
    order = list(TopologicalSorter(graph).static_order())
    assert graph["prefixroute_streams"] == set()
    assert order.index("prefixroute_serving") < order.index("prefixroute_lan4")
    assert not graph["prefixroute_serving"] & {"prefixroute_launch", "prefixroute_lan4"}


def test_what_needs_no_zeromq_imports_none() -> None:
    sources, packages = OUTSIDE["prefixroute_streams"]
    for module in sources:
        assert "zmq" not in {i.module.partition(".")[0] for i in imports(module, sources, packages)}, module


SIMULATOR = sorted(module for module in SOURCES if part_of(module) == "sim")
RUNNERS = {"prefixroute.sim.parallel", "prefixroute.sim.replication.command"}
"""What runs simulations in processes, and tells how long they took."""


@pytest.mark.parametrize("module", SIMULATOR)
def test_the_simulator_uses_public_names_and_reads_no_clock_but_in_its_runners(module: str) -> None:
    for imported in imports(module, SOURCES):
        package, _, rest = imported.module.partition(".")
        if package == "prefixroute" and part_of(imported.module) != "sim":
            assert rest in ("", "plan"), imported
            assert imported.name in (plan if rest else prefixroute).__all__, imported
        if module not in RUNNERS:
            assert package not in {"asyncio", "socket", "time", "threading", "multiprocessing"}, imported


def test_planners_read_no_clock_and_draw_no_number_of_their_own() -> None:
    assert waiting(SOURCES, {"plan"}) == []
    for module, source in SOURCES.items():
        if part_of(module) == "plan":
            calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
            drawn = [c for c in calls if isinstance(c, ast.Attribute) and c.attr in ("Random", "default_rng")]
            assert not drawn, module


# --- public names --------------------------------------------------------------------------------------------


def test_public_names_exist_and_are_sorted() -> None:
    assert len(set(prefixroute.__all__)) == len(prefixroute.__all__)
    assert all(hasattr(prefixroute, name) for name in prefixroute.__all__)
    from_modules = {i.name for i in imports("prefixroute", SOURCES) if i.module.startswith("prefixroute.")}
    assert set(prefixroute.__all__) == from_modules | {"__version__"}


def test_public_modules_are_where_they_were() -> None:
    assert {f"prefixroute.{name}" for name in PUBLIC_MODULES} <= SOURCES.keys()


def test_import_of_the_package_loads_the_core_and_no_edge_no_extra_and_no_engine() -> None:
    script = "import sys, json, prefixroute; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(json.loads(done.stdout))
    assert {name for name in loaded if name.startswith("prefixroute.")} == CORE.keys()
    extras = {"zmq", "httpx", "starlette", "uvicorn", "uvloop", "matplotlib", "rich", "prometheus_client"}
    assert not loaded & (extras | FORBIDDEN["engines"] | ABOVE)


# --- the rules find what is planted --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "line", "told"),
    [
        ("keys.chain", "from ..routing.index import Stratum", "keys imports routing: Stratum"),
        ("residency.tree", "from ..replication.copies import Copy", "residency imports replication: Copy"),
        (
            "replication.gossip",
            "def f():\n    from ..residency import Residency",
            "replication imports residency: Residency",
        ),
        ("policy.baselines", "from ..routing.standing import Standing", "policy imports routing: Standing"),
        ("routing.router", "from ..replication.members import Members", "routing takes from replication: Members"),
        ("endpoint.local", "from ..residency import tree", "endpoint takes from residency: prefixroute.residency.tree"),
        ("routing.fleet", "from ..node import Node", "routing imports node: Node"),
        ("keys.names", "from .. import Domain", "keys imports the package: Domain"),
        ("events", "from .keys.chain import STRIDE", "the ground, prefixroute.events, imports prefixroute.keys.chain"),
        ("node", "from .aio import Driver", "prefixroute.node imports prefixroute.aio"),
    ],
)
def test_a_planted_arrow_is_found(module: str, line: str, told: str) -> None:
    name = f"prefixroute.{module}"
    assert told in wrong_arrows({**SOURCES, name: f"{SOURCES[name]}\n{line}\n"})


def test_a_planted_circle_is_found() -> None:
    planted = {
        "prefixroute.keys.names": "from .tenants import Tenants",
        "prefixroute.keys.tenants": "from . import names",
    }
    assert {"prefixroute.keys.names", "prefixroute.keys.tenants"} <= set(circle({**SOURCES, **planted}))


def test_a_planted_clock_is_found() -> None:
    planted = {**SOURCES, "prefixroute.routing.ledger": "def f():\n    import time"}
    assert waiting(planted, CORE_PARTS) == ["prefixroute.routing.ledger imports time (clocks)"]


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import time", ("time", "")),
        ("def f():\n    from asyncio import run", ("asyncio", "run")),
        ("from . import chain", ("prefixroute.keys.chain", "")),
        ("from .chain import STRIDE", ("prefixroute.keys.chain", "STRIDE")),
        ("if TYPE_CHECKING:\n    import zmq.asyncio as z", ("zmq.asyncio", "")),
        ("from ..emulator import answer", ("prefixroute.emulator.answer", "")),
    ],
)
def test_reader_of_imports_finds_them_all(source: str, found: tuple[str, str]) -> None:
    assert list(imports("prefixroute.keys.x", {**SOURCES, "prefixroute.keys.x": source})) == [found]
