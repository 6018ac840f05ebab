"""The entry points, with modules of the engines' shape: a tap where it fits, ZeroMQ and one message where not."""

from __future__ import annotations

import importlib
import logging
import os
import re
import socket
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
from prefixroute_inproc import add_sink, remove_sink, sglang_plugin, vllm_plugin
from prefixroute_inproc.plugin import TAP, TAP_SINK, TAP_ZMQ
from prefixroute_inproc.registry import sinks
from publishing import Seen, run
from tapping import SglangBatch, VllmBatch, folder, following, removal

from prefixroute.errors import UsageError

__all__ = ["folder"]

try:
    import tomllib
except ModuleNotFoundError:  # before Python 3.11
    import tomli as tomllib

FROM_ENVIRONMENT = Seen()
"""What PREFIXROUTE_TAP_SINK names here."""


class Publisher(ABC):
    """As the engines' EventPublisher."""

    @abstractmethod
    def publish(self, events: Any) -> None: ...

    @abstractmethod
    def shutdown(self) -> None: ...

    def get_publisher_config(self) -> Any:
        return None


class Zmq(Publisher):
    """As the engines' ZmqEventPublisher, but for the sockets."""

    def __init__(self, **config: Any) -> None:
        self.config = config
        self.published: list[Any] = []
        self.ended = False

    def publish(self, events: Any) -> None:
        self.published.append(events)

    def shutdown(self) -> None:
        self.ended = True

    def get_publisher_config(self) -> Any:
        return "zmq's own"


class Config(NamedTuple):
    """As vLLM's KVEventsConfig."""

    enable_kv_cache_events: bool
    publisher: str
    endpoint: str
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""


def factory(rank_name: str) -> Any:
    class EventPublisherFactory:
        _registry: dict[str, Callable[..., Any]] = {"zmq": Zmq}  # noqa: RUF012

        @classmethod
        def register_publisher(cls, name: str, ctor: Callable[..., Any]) -> None:
            if name in cls._registry:
                raise KeyError(name)
            cls._registry[name] = ctor

    scope: dict[str, Any] = {}
    exec(f"def create(cls, config, {rank_name}=0): ...", scope)
    EventPublisherFactory.create = classmethod(scope["create"])  # type: ignore[attr-defined]
    return EventPublisherFactory


def module(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    made.__dict__.update(names)
    monkeypatch.setitem(sys.modules, name, made)
    return made


class Engine(NamedTuple):
    """A stand-in engine: its registry, its module of events, and how it makes a publisher."""

    events: Any
    register: Callable[[], None]
    name: str
    config: dict[str, Any]

    @property
    def registry(self) -> dict[str, Any]:
        found: dict[str, Any] = self.events.EventPublisherFactory._registry
        return found

    def make(self, rank: int = 0, **config: Any) -> Any:
        rank_name = "data_parallel_rank" if self.name == "zmq" else "attn_dp_rank"
        return self.registry[self.name](**{rank_name: rank, **self.config, **config})


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(vllm_plugin, "_told", set())
    module(monkeypatch, "vllm", __version__="0.32.0+cpu")
    module(monkeypatch, "vllm.distributed")
    events = module(
        monkeypatch,
        "vllm.distributed.kv_events",
        EventPublisher=Publisher,
        EventBatch=VllmBatch,
        EventPublisherFactory=factory("data_parallel_rank"),
        KVEventsConfig=Config,
    )
    config = {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5558", "buffer_steps": 5, "hwm": 1, "topic": "t"}
    return Engine(events, vllm_plugin.register, "zmq", {**config, "max_queue_size": 7})


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> Engine:
    monkeypatch.setattr(sglang_plugin, "_told", set())
    for name in ("sglang", "sglang.srt", "sglang.srt.disaggregation"):
        module(monkeypatch, name)
    module(monkeypatch, "sglang.version", __version__="0.5.23")
    events = module(
        monkeypatch,
        "sglang.srt.disaggregation.kv_events",
        EventPublisher=Publisher,
        EventBatch=SglangBatch,
        EventPublisherFactory=factory("attn_dp_rank"),
    )
    config = {"endpoint": "tcp://*:5557", "bind": None, "replay_endpoint": None, "buffer_steps": 5, "hwm": 1}
    return Engine(events, sglang_plugin.register, "prefixroute", {**config, "max_queue_size": 7, "topic": ""})


@pytest.fixture(params=["vllm", "sglang"])
def engine(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.getfixturevalue(request.param)
    return found


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (TAP, TAP_SINK, TAP_ZMQ):
        monkeypatch.delenv(name, raising=False)
    FROM_ENVIRONMENT.clear()
    yield
    for sink in sinks():
        remove_sink(sink)


def batch_of(engine: Engine, number: int) -> Any:
    return engine.events.EventBatch(float(number), removal(number).events)


# --- it fits -----------------------------------------------------------------------------------------------


def test_an_engine_with_the_variable_set_publishes_to_a_tap(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    engine.register()
    publisher = engine.make(rank=2)
    assert isinstance(publisher, Publisher) and not isinstance(publisher, Zmq)
    assert (publisher.tap.rank, publisher.tap.engine) == (2, {"zmq": "vllm"}.get(engine.name, "sglang"))
    publisher.publish(batch_of(engine, 1))
    assert os.path.exists(folder / "t.2")
    publisher.shutdown()
    assert not os.path.exists(folder / "t.2")


def test_what_is_published_arrives(vllm: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    vllm.register()

    async def test() -> None:
        publisher = vllm.make()
        async with following(folder / "t") as (_, seen):
            for number in range(3):
                publisher.publish(batch_of(vllm, number))
            await seen.until(0, 1, 2)
            publisher.shutdown()
            await seen.until(0, 1, 2, "X")

    run(test)


def test_queue_and_ring_have_the_sizes_that_zeromqs_would_have(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    engine.register()
    publisher = engine.make(max_queue_size=0, buffer_steps="many")
    assert publisher.tap._limit == 100_000, "what makes no sense is the default"
    publisher.shutdown()
    publisher = engine.make()
    assert publisher.tap._limit == 7
    publisher.shutdown()


def test_registering_again_changes_nothing(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    engine.register()
    before = dict(engine.registry)
    for _ in range(7):
        engine.register()
    assert engine.registry == before
    assert not os.path.exists(folder / "t"), "no socket before there is a publisher"


def test_zeromq_goes_on_beside_it_when_asked(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    monkeypatch.setenv(TAP_ZMQ, "1")
    engine.register()
    publisher = engine.make(rank=1)
    batch = batch_of(engine, 1)
    publisher.publish(batch)
    assert publisher.beside.published == [batch]
    assert publisher.beside.config.items() >= engine.config.items()
    if engine.name == "zmq":
        assert publisher.get_publisher_config() == "zmq's own"
    publisher.shutdown()
    assert publisher.beside.ended


def test_vllm_tells_where_the_tap_is(vllm: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    vllm.register()
    publisher = vllm.make(rank=1)
    told = publisher.get_publisher_config()
    assert (told.endpoint, told.replay_endpoint, told.buffer_steps) == (f"tap://{folder}/t.1", None, 5)
    publisher.shutdown()


def test_a_sink_needs_no_socket(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAP_SINK, f"{__name__}:FROM_ENVIRONMENT")
    engine.register()
    for _ in range(2):  # two publishers of a process share the sink
        publisher = engine.make()
        publisher.publish(batch_of(engine, 1))
        publisher.shutdown()
        if engine.name == "zmq":
            assert publisher.get_publisher_config() is None
    assert FROM_ENVIRONMENT == ["1", "1"]
    assert sinks() == (FROM_ENVIRONMENT,)


def test_a_sink_of_the_process_itself_makes_vllm_have_a_tap(vllm: Engine) -> None:
    seen = Seen()
    vllm.register()
    assert vllm.registry == {"zmq": Zmq}
    add_sink(seen)
    vllm.register()
    publisher = vllm.make()
    publisher.publish(batch_of(vllm, 5))
    publisher.shutdown()
    assert seen == ["5"]


# --- nothing is asked for ----------------------------------------------------------------------------------


def test_vllm_is_left_alone_and_not_even_imported(vllm: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm")
    vllm.register()
    assert vllm.registry == {"zmq": Zmq}


def test_sglangs_zmq_is_left_alone(sglang: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    sglang.register()
    assert sglang.registry["zmq"] is Zmq


def test_sglangs_publisher_without_a_tap_is_zeromq_and_says_so(
    sglang: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    sglang.register()
    publisher = sglang.make()
    assert isinstance(publisher, Zmq)
    assert publisher.config == {"attn_dp_rank": 0, **sglang.config}
    (message,) = [record.message for record in caplog.records]
    assert re.search("PREFIXROUTE_TAP is not set.*ZeroMQ", message)


# --- it does not fit ---------------------------------------------------------------------------------------


def test_a_tap_that_cannot_be_had_leaves_zeromq(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "file").write_text("mine")
    engine.register()
    monkeypatch.setenv(TAP, str(folder / "file"))
    engine.register()
    publisher = engine.make()
    assert isinstance(publisher, Zmq)
    (message,) = [record.message for record in caplog.records]
    assert re.search("no in-process tap: .*file exists and is no socket.*ZeroMQ as before", message)


def test_a_socket_that_is_in_use_leaves_zeromq(engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    engine.register()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.bind(str(folder / "t"))
        other.listen()
        assert isinstance(engine.make(), Zmq)


@pytest.mark.parametrize("name", ["no_such_module:f", "os:no_such_name", "os:sep", "os", ""])
def test_a_sink_that_is_none_leaves_zeromq(
    engine: Engine, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TAP_SINK, "x:y")
    engine.register()
    monkeypatch.setenv(TAP_SINK, name)
    assert isinstance(engine.make(), Zmq)
    assert len(caplog.records) == 1


AMISS: dict[str, tuple[Callable[[Engine], None], str]] = {
    "no registry": (lambda e: delattr(e.events.EventPublisherFactory, "_registry"), "_registry has no 'zmq'"),
    "no factory": (lambda e: delattr(e.events, "EventPublisherFactory"), "_registry has no 'zmq'"),
    "no zmq": (lambda e: e.registry.clear(), "_registry has no 'zmq'"),
    "no publisher": (lambda e: delattr(e.events, "EventPublisher"), "EventPublisher.publish is not there"),
    "another rank": (
        lambda e: setattr(e.events.EventPublisherFactory, "create", lambda config, rank: None),
        "create takes no (data_parallel_rank|attn_dp_rank)",
    ),
    "no batch": (lambda e: delattr(e.events, "EventBatch"), "EventBatch has no ts and events"),
    "more to do": (
        lambda e: setattr(
            e.events, "EventPublisher", type("P", (Publisher,), {"flush": abstractmethod(lambda s: None)})
        ),
        "EventPublisher wants flush too",
    ),
}


@pytest.mark.parametrize("what", AMISS)
def test_another_shape_is_told_once_and_nothing_is_changed(
    engine: Engine, what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change, why = AMISS[what]
    monkeypatch.setenv(TAP, str(folder / "t"))
    registry = engine.registry
    change(engine)
    before = dict(registry)
    for _ in range(3):
        engine.register()
    if engine.name in registry:
        assert not caplog.records or engine.name == "zmq"
        assert isinstance(registry[engine.name](**engine.config), Zmq)
    assert {**registry, **before} == registry
    (message,) = [record.message for record in caplog.records]
    assert re.search(why if engine.name in registry or engine.name == "zmq" else "registry", message)
    assert re.search(r"0\.32\.0\+cpu.*Tested is vllm 0\.32\.0|0\.5\.23.*Tested is sglang 0\.5\.23", message)
    assert "Events are published over ZeroMQ as before" in message


def test_sglang_without_a_registry_is_told_to_those_who_asked_for_a_tap(
    sglang: Engine, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    del sglang.events.EventPublisherFactory
    sglang.register()
    assert not caplog.records
    monkeypatch.setenv(TAP, "/run/x")
    sglang.register()
    assert len(caplog.records) == 1


def test_an_engine_that_cannot_be_imported_is_told(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    monkeypatch.setitem(sys.modules, engine.events.__name__, None)  # type: ignore[arg-type]
    engine.register()
    assert "no in-process tap" in caplog.text


def test_another_version_of_the_same_shape_is_taken_and_told(
    engine: Engine, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(TAP, str(folder / "t"))
    for name in ("vllm", "sglang.version"):
        if name in sys.modules:
            monkeypatch.setattr(sys.modules[name], "__version__", "9.9")
    with caplog.at_level(logging.WARNING):
        engine.register()
        publisher = engine.make()
    assert publisher.tap
    publisher.shutdown()
    (message,) = [record.message for record in caplog.records]
    assert re.search("was tested with .*9.9", message)


# --- the package -------------------------------------------------------------------------------------------


def test_the_entry_points_name_functions_that_are_there() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    points = project["project"]["entry-points"]
    assert points["vllm.general_plugins"] == {"prefixroute": "prefixroute_inproc.vllm_plugin:register"}
    assert points["sglang.srt.plugins"] == {"prefixroute": "prefixroute_inproc.sglang_plugin:register"}
    assert callable(vllm_plugin.register) and callable(sglang_plugin.register)


def test_every_public_name_is_there() -> None:
    import prefixroute_inproc

    assert all(getattr(prefixroute_inproc, name) for name in prefixroute_inproc.__all__)
    assert set(prefixroute_inproc._ON_FIRST_USE) == set(prefixroute_inproc.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        prefixroute_inproc.nothing  # noqa: B018


def test_a_sink_by_name_says_what_is_wrong() -> None:
    from prefixroute_inproc.sinks import find_sink

    with pytest.raises(UsageError, match=r"module:function, and 'os' cannot be had"):
        find_sink("os")
    with pytest.raises(UsageError, match="'os:sep' is no function"):
        find_sink("os:sep")


# --- the check with real engines, as far as it goes without one --------------------------------------------

LIVE = Path(__file__).parents[2] / "live_tests"


def test_the_check_gives_engines_the_entry_points_of_the_package(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(LIVE))
    check = importlib.import_module("check_inprocess")
    plugins = check.plugin_folder(folder / "plugins")
    assert (plugins / "prefixroute_inproc" / "vllm_plugin.py").exists()
    (found,) = [d for d in distributions(path=[str(plugins)]) if d.name == "prefixroute-tap"]
    points = tomllib.loads((LIVE.parent / "pyproject.toml").read_text())["project"]["entry-points"]
    for group in ("vllm.general_plugins", "sglang.srt.plugins"):
        assert {point.name: point.value for point in found.entry_points if point.group == group} == points[group]


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_the_check_names_what_is_missing(kind: str) -> None:
    argv = [sys.executable, str(LIVE / "check_inprocess.py"), kind]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PREFIXROUTE_")}
    done = subprocess.run(
        argv, env={**environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert f"set PREFIXROUTE_{kind.upper()}_ENV=DIR" in done.stderr


def test_neither_half_needs_zeromq() -> None:
    code = "import sys; from prefixroute_inproc import Tap, TapFollower; sys.exit('zmq' in sys.modules)"
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    assert subprocess.run([sys.executable, "-c", code], env=environ).returncode == 0
