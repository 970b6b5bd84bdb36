# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls to TensorRT 10 and 11, recorded by a stand-in: their libraries need a GPU to build."""

from __future__ import annotations

import enum
import types
from typing import Any

import pytest

from xpuruntime.engines.tensorrt.building import CacheFile, TimingCache, cache_file, configure
from xpuruntime.engines.tensorrt.options import RTX, TENSORRT, TensorRtSettings, has, probe_api
from xpuruntime.errors import EngineError
from xpuruntime.runtime.machine import EngineFacts

COMMON = "TF32 REFIT REFIT_IDENTICAL STRIP_PLAN SPARSE_WEIGHTS STRICT_NANS WEIGHT_STREAMING VERSION_COMPATIBLE "
PINNING = "EDITABLE_TIMING_CACHE ERROR_ON_TIMING_CACHE_MISS "


def module(major: int) -> Any:
    """Return the names of the bindings of TensorRT 10 or 11 that this adapter looks at."""
    weak = "FP16 BF16 INT8 " if major == 10 else ""
    return types.SimpleNamespace(
        BuilderFlag=enum.Enum("BuilderFlag", COMMON + PINNING + weak),
        NetworkDefinitionCreationFlag=enum.IntEnum("NetworkDefinitionCreationFlag", "STRONGLY_TYPED", start=1),
        ProfilingVerbosity=enum.Enum("ProfilingVerbosity", "LAYER_NAMES_ONLY DETAILED NONE"),
        HardwareCompatibilityLevel=enum.Enum("HardwareCompatibilityLevel", "NONE AMPERE_PLUS SAME_COMPUTE_CAPABILITY"),
        TilingOptimizationLevel=enum.Enum("TilingOptimizationLevel", "NONE FAST MODERATE FULL"),
        MemoryPoolType=enum.Enum("MemoryPoolType", "WORKSPACE TACTIC_SHARED_MEMORY"),
        IBuilderConfig=type("IBuilderConfig", (), {"create_timing_cache": None}),
        ICudaEngine=type("ICudaEngine", (), {"weight_streaming_budget_v2": None}),
        OnnxParserRefitter=type("OnnxParserRefitter", (), {"refit_from_bytes": None}),
        IGpuAsyncAllocator=type("IGpuAsyncAllocator", (), {"allocate_async": None}),
        Runtime=type("Runtime", (), {}),
    )


class Cache:
    """A timing cache: lines of text; one that begins with ``other`` is of another device."""

    def __init__(self, content: bytes) -> None:
        self.lines = set(filter(None, content.split(b"\n")))

    def combine(self, other: Cache, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        self.lines |= other.lines
        return True

    def serialize(self) -> bytes:
        return b"\n".join(sorted(self.lines))


class Config:
    """Records settings; a builder measures ``tactic`` while it builds."""

    def __init__(self) -> None:
        self.flags: set[Any] = set()
        self.pools = {"WORKSPACE": 1 << 34, "TACTIC_SHARED_MEMORY": 1 << 30}
        self.cache: Cache | None = None
        self.profiles: list[Any] = []

    def set_flag(self, flag: Any) -> None:
        self.flags.add(flag)

    def clear_flag(self, flag: Any) -> None:
        self.flags.discard(flag)

    def get_flag(self, flag: Any) -> bool:
        return flag in self.flags

    def get_memory_pool_limit(self, pool: Any) -> int:
        return self.pools[pool.name]

    def set_memory_pool_limit(self, pool: Any, size: int) -> None:
        self.pools[pool.name] = size

    def create_timing_cache(self, content: bytes) -> Cache:
        return Cache(content)

    def set_timing_cache(self, cache: Cache, ignore_mismatch: bool) -> bool:
        assert ignore_mismatch is False
        if any(line.startswith(b"other") for line in cache.lines):
            return False
        self.cache = cache
        return True

    def get_timing_cache(self) -> Cache | None:
        return self.cache

    def add_optimization_profile(self, profile: Any) -> int:
        self.profiles.append(profile)
        return -1 if profile.shapes.get("x") == "bad" else len(self.profiles) - 1


class Builder:
    max_threads = 1

    def create_optimization_profile(self) -> Any:
        shapes: dict[str, Any] = {}
        return types.SimpleNamespace(
            shapes=shapes, set_shape=lambda name, low, best, high: shapes.update({name: (low, best, high)})
        )


@pytest.mark.parametrize("major", [10, 11])
def test_capabilities(major: int) -> None:
    facts = EngineFacts(name="tensorrt", detail=probe_api(module(major), TENSORRT))
    assert has(facts, "weak_typing") is (major == 10)
    for word in ("timing_cache", "tactic_pinning", "weight_streaming", "refit", "hardware_compatibility", "tiling"):
        assert has(facts, word), word
    for word in ("targets", "runtime_cache", "graph_strategy", "kernel_specialization", "validity"):
        assert not has(facts, word), word
    assert facts.detail["compute_capabilities"] == ""


def test_what_rtx_offers_and_does_not_do_is_not_taken_for_a_capability() -> None:
    facts = EngineFacts(name="tensorrt-rtx", detail=probe_api(module(11), RTX))
    assert not has(facts, "timing_cache")
    assert not has(facts, "tactic_pinning")
    assert not has(facts, "hardware_compatibility")


def test_a_configuration() -> None:
    trt, config = module(10), Config()
    settings = TensorRtSettings(
        tf32=False,
        workspace=1 << 30,
        profiles={"x": ((1, 4), (2, 4), (8, 4))},
        options={
            "builder_optimization_level": "5",
            "avg_timing_iterations": "8",
            "hardware_compatibility": "ampere_plus",
            "refit": "identical",
            "weight_streaming": "1",
            "sparse_weights": "0",
            "pin_tactics": "require",
            "timing_cache": "./x",
        },
    )
    held = configure(trt, Builder(), config, settings)
    assert {flag.name for flag in config.flags} == {
        "REFIT_IDENTICAL",
        "WEIGHT_STREAMING",
        "EDITABLE_TIMING_CACHE",
        "ERROR_ON_TIMING_CACHE_MISS",
    }
    assert config.builder_optimization_level == 5  # type: ignore[attr-defined]
    assert config.avg_timing_iterations == 8  # type: ignore[attr-defined]
    assert config.hardware_compatibility_level is trt.HardwareCompatibilityLevel.AMPERE_PLUS  # type: ignore[attr-defined]
    assert config.profiling_verbosity is trt.ProfilingVerbosity.DETAILED  # type: ignore[attr-defined]
    assert config.pools["WORKSPACE"] == 1 << 30
    assert config.profiles[0].shapes == {"x": ((1, 4), (2, 4), (8, 4))}
    assert held["tf32"] == "0"
    assert held["sparse_weights"] == "0"
    assert held["hardware_compatibility"] == "ampere_plus"


def test_a_setting_that_is_not_taken_is_an_error() -> None:
    class Stubborn(Config):
        builder_optimization_level = property(lambda self: 3, lambda self, value: None)

    with pytest.raises(EngineError, match="does not take builder_optimization_level=5: it holds 3"):
        configure(module(10), Builder(), Stubborn(), TensorRtSettings(options={"builder_optimization_level": "5"}))


def test_the_timing_cache(tmp_path: Any) -> None:
    file = CacheFile(tmp_path / "folder" / "tactics.timing")
    config = Config()
    timing = TimingCache.attach(config, file, required=False)
    assert timing is not None
    assert config.cache is not None
    config.cache.lines.add(b"conv1: 12")
    assert timing.keep() == (f"timing cache {file.path}", "written")
    # Another process has written meanwhile: what it measured stays.
    second = Config()
    again = TimingCache.attach(second, file, required=True)
    file.update(lambda content: (content or b"") + b"\nfc: 3")
    assert again is not None
    assert second.cache is not None
    second.cache.lines.add(b"conv2: 7")
    again.keep()
    assert file.read() == b"conv1: 12\nconv2: 7\nfc: 3"
    assert again.keep()[1] == "nothing new was measured"


def test_timing_caches_that_do_not_fit(tmp_path: Any) -> None:
    file = CacheFile(tmp_path / "tactics.timing")
    assert TimingCache.attach(Config(), None, required=False) is None
    with pytest.raises(EngineError, match=r"no timing cache .*build once with pin_tactics: record"):
        TimingCache.attach(Config(), file, required=True)
    file.update(lambda _: b"other device: 1")
    with pytest.raises(EngineError, match="on another GPU or by another version"):
        TimingCache.attach(Config(), file, required=False)


def test_where_caches_are(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    target = {"flavour": "tensorrt", "version": "10.9.0", "compute_capability": "9.0"}
    assert cache_file(None, "timing", target) is None
    assert cache_file("off", "timing", target) is None
    named = cache_file(str(tmp_path / "x"), "timing", target)
    assert named is not None
    assert named.path == tmp_path / "x"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    file = cache_file("default", "timing", target)
    assert file is not None
    assert file.path.name == "tensorrt-10.9.0-sm9.0.timing"
