"""``python -m prefixroute.emulator``: one line when ready, one line when wrong, a clean end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from prefixroute.emulator import EngineConfig, KvEventsConfig, command
from prefixroute.errors import UsageError

COMMAND = [sys.executable, "-W", "error", "-m", "prefixroute.emulator"]


@contextmanager
def emulator(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A running program: the process, its base URL and its ready line."""
    command = [*COMMAND, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line, process.stderr and process.stderr.read()
            yield process, line.split("ready: ")[1].split()[0], line
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_program_serves_says_where_and_ends_cleanly_on_a_signal(number: signal.Signals) -> None:
    config = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://127.0.0.1:0"}
    options = ["--model", "demo", "--block-size", "32", "--time-scale", "0", "--kv-events-config", json.dumps(config)]
    with emulator(*options) as (process, url, line):
        source = httpx.get(f"{url}/kv_event_sources").json()["0"]
        assert f"events {source['endpoint']} replay {source['replay_endpoint']}" in line
        assert "model demo, 400 blocks of 32" in line
        for expected in (0, 288):
            reply = httpx.post(f"{url}/v1/completions", json={"prompt": list(range(300))})
            assert reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
        assert (process.returncode, out, err) == (0, "", "")


def test_stream_that_is_still_running_is_cut_off_by_a_signal() -> None:
    with emulator("--overhead-s", "0", "--decode-s-per-token", "1000") as (process, url, _):
        body = {"prompt": [1], "max_tokens": 9, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" not in list(lines)
        _, err = process.communicate(timeout=20)
        assert (process.returncode, err) == (0, "")


def test_leaving_client_frees_the_engine_over_a_real_socket() -> None:
    with emulator("--overhead-s", "0", "--decode-s-per-token", "1000") as (_, url, _):
        with httpx.stream("POST", f"{url}/v1/completions", json={"prompt": [1], "stream": True}) as reply:
            lines = reply.iter_lines()
            assert next(lines).startswith("data: ")
            assert httpx.get(f"{url}/load").json() == {"server_load": 1}
        deadline = time.monotonic() + 60
        while httpx.get(f"{url}/load").json() != {"server_load": 0}:
            assert time.monotonic() < deadline
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "x"], "--port"),
        (["--port", "70000"], "cannot listen"),
        (["--block-size", "0"], "block_size"),
        (["--prefill-tokens-per-s", "0"], "prefill_tokens_per_s"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-model-len", "100000"], "max_model_len"),
        (["--kv-events-config", "{"], "kv events config"),
        (["--kv-events-config", '{"publisher":"kafka"}'], "kv events config"),
        (["--kv-events-config", '{"enable_kv_cache_events":true,"endpoint":"ipc:///no/such/x"}'], "cannot bind"),
        (["--bogus"], "--bogus"),
    ],
)
def test_wrong_arguments_cost_one_line_and_exit_code_2(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = arguments if "--port" in arguments else ["--port", "0", *arguments]
    try:
        code: object = command.main(arguments)
    except SystemExit as end:
        code = end.code
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("prefixroute.emulator: ") and words in err


def test_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run([*COMMAND, "--port", port], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1 and port in result.stderr


def test_options_reach_the_configuration() -> None:
    options = (
        "--model a --lora-modules x y --any-model --block-size 8 --capacity-blocks 9 --max-model-len 50 "
        "--prefill-tokens-per-s inf --overhead-s 1 --decode-s-per-token 2 --time-scale 3 --max-num-seqs 4 "
        "--max-num-batched-tokens 5 --max-num-queued-reqs 6 --max-num-queued-tokens 7 --default-max-tokens 10 "
        "--hash-seed s --byte-hashes"
    )
    config = command.config_of(command.build_parser().parse_args(options.split()))
    assert (config.model, config.lora_modules, config.any_model) == ("a", ("x", "y"), True)
    assert (config.block_size, config.capacity_blocks, config.max_model_len) == (8, 9, 50)
    assert (config.service.prefill_s(100), config.service.decode_s(1)) == (3.0, 6.0)
    limits = config.limits
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (4, 5)
    assert (limits.max_num_queued_reqs, limits.max_num_queued_tokens) == (6, 7)
    assert (config.default_max_tokens, config.hash_seed, config.byte_hashes) == (10, "s", True)


def test_defaults_of_the_command_line_are_those_of_the_configuration() -> None:
    assert command.config_of(command.build_parser().parse_args([])) == EngineConfig(kv_events=KvEventsConfig())


def test_listener_names_its_protocol_so_that_small_writes_are_not_delayed() -> None:
    with command._listen("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP
    with pytest.raises(UsageError, match="cannot listen"):
        command._listen("no.such.host.invalid", 0)


def test_state_machines_need_no_server_library() -> None:
    code = (
        "import sys, prefixroute.emulator as e; e.BlockCache(4); "
        "print([m for m in ('starlette', 'uvicorn', 'zmq', 'httpx') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert (result.stdout, result.stderr) == ("[]\n", "")


@pytest.mark.parametrize("missing", ["starlette", "zmq"])
def test_missing_extra_is_named(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from prefixroute.emulator import EmulatedEngine"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"EmulatedEngine needs {missing}" in result.stderr and "prefixroute[demo]" in result.stderr
