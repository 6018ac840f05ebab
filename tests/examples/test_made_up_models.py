"""The made-up models beside the plain ones: a hybrid, a LoRA adapter, and the command lines that serve ranks."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from prefixroute_launch import build_model
from prefixroute_launch.launcher import EngineSpec
from prefixroute_launch.vllm_launcher import VllmLauncher, VllmSettings


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    return EngineSpec("n", 8000, "tcp://127.0.0.1:5557", "tcp://127.0.0.1:5567", "kv", 32, 100, 0, tmp_path)


@pytest.fixture
def settings(tmp_path: Path) -> VllmSettings:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.touch()
    return VllmSettings(tmp_path)


def test_a_hybrid_has_two_window_layers_to_each_full_one() -> None:
    shape = build_model.PRESETS["hyb"]
    config = build_model.hybrid_config(shape)
    kinds = config["layer_types"]
    assert kinds == ["sliding_attention", "sliding_attention", "full_attention"] * 2
    assert (config["num_hidden_layers"], config["sliding_window"], config["head_dim"]) == (6, 128, 64)
    assert "hidden_act" not in config
    assert set(build_model.HYBRIDS) <= set(build_model.PRESETS)


def test_the_command_line_says_which_kind_is_wanted() -> None:
    assert build_model.parse(["d", "--preset", "hyb"]).hybrid
    plain = build_model.parse(["d", "--preset", "tiny"])
    assert (plain.hybrid, plain.lora) == (False, False)
    assert build_model.parse(["d", "--preset", "tiny", "--lora"]).lora


def test_ranks_keep_their_tcp_addresses_and_have_a_core_each(
    spec: EngineSpec, settings: VllmSettings, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 5})
    pair = VllmLauncher(replace(spec, ranks=2), settings)
    argv = pair.argv()
    assert argv[argv.index("--data-parallel-size") + 1] == "2"
    assert '"endpoint": "tcp://127.0.0.1:5557"' in argv[argv.index("--kv-events-config") + 1]
    assert pair.environment(tmp_path)["VLLM_CPU_OMP_THREADS_BIND"] == "2|5"
    single = VllmLauncher(spec, settings)
    assert "--data-parallel-size" not in single.argv()
    assert '"endpoint": "ipc://' in single.argv()[single.argv().index("--kv-events-config") + 1]
    assert single.environment(tmp_path)["VLLM_CPU_OMP_THREADS_BIND"] == "2"
