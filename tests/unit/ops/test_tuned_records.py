# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records of kernel tuning: kept with the builds they hold for, and replayed while those are the same."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.measuring.rounds import KernelTiming, replacing
from xpuruntime.ops import tuned_records, tuning_cache
from xpuruntime.ops.call_context import CallContext, compile_rules
from xpuruntime.policies import TuningPolicy

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.usefixtures("own_tuning_cache")

RULE = TuningPolicy()


def replacement(verdict: str = "faster", seconds: float = 3.0) -> Any:
    ours = KernelTiming("cpu.blas", "threads=2", 5.0, 0.5, 0.48, 0.52, verdict)
    return replacing([KernelTiming("torch.mm", "", 10.0), ours], rounds=11, seconds=seconds)


def test_what_is_kept_is_recalled_as_it_was(own_tuning_cache: Path) -> None:
    found = replacement()
    assert tuned_records.keep("k", {"torch": "1"}, found) == ""
    assert tuned_records.recall("k", {"torch": "1"}, RULE) == found
    entry = json.loads(own_tuning_cache.read_text())["entries"]["k"]
    assert entry["times"][0] == {
        "kernel": "cpu.blas", "config": "threads=2", "microseconds": 5.0, "ratio": 0.5, "low": 0.48, "high": 0.52,
        "verdict": "faster",
    }  # fmt: skip
    assert entry["rounds"] == 11


def test_it_holds_for_the_same_validators_and_rule_alone() -> None:
    tuned_records.keep("k", {"torch": "1"}, replacement())
    assert tuned_records.rule_suffix(RULE) == tuned_records.rule_suffix(RULE.replace(budget=60.0)) == ""
    assert tuned_records.rule_suffix(RULE.replace(min_effect=0.05)) == ";min_effect=0.05;confidence=0.99"
    assert tuned_records.recall("k", {"torch": "1"}, RULE.replace(budget=60.0)) is not None, "it is decided"
    assert tuned_records.recall("k", {"torch": "2"}, RULE) is None


def test_what_is_undecided_holds_for_no_larger_budget() -> None:
    tuned_records.keep("k", {}, replacement("inconclusive", seconds=3.0))
    found = tuned_records.recall("k", {}, RULE)
    assert found is not None
    assert (found.undecided, found.chosen.kernel) == (True, "torch.mm")
    assert tuned_records.recall("k", {}, RULE.replace(budget=4.0)) is None


def test_what_is_cancelled_is_not_kept(own_tuning_cache: Path) -> None:
    tuned_records.keep("k", {}, replacement()._replace(cancelled=True))
    assert not own_tuning_cache.exists()


def test_the_validators_name_the_build_of_the_kernels() -> None:
    found = tuned_records.validators("matmul", "cpu", {"torch": "1"}, ["libc.so*"])
    assert found["core"] == tuning_cache.core_build()
    assert found["torch"] == "1"
    assert found["protocol"]
    assert "cpu.reference=" in found["kernels"]
    assert any(name.startswith("libc.so") and build for name, build in found.items())


def test_a_file_that_is_no_library_is_named_by_its_size(tmp_path: Path) -> None:
    path = tmp_path / "libx.so"
    path.write_bytes(b"12345")
    assert tuning_cache.build_of(str(path)) == "5 bytes"


def test_another_build_of_the_core_measures_its_kernels_anew(
    own_tuning_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dispatcher = _core.Dispatcher.instance()
    x, out = np.ones((24, 24), np.float32), np.empty((24, 24), np.float32)  # of the same alignment in each call

    def notes() -> tuple[str, ...]:
        dispatcher.forget_measurements()
        xrt.clear_decisions()
        policy = xrt.Policy(kernels=xrt.KernelPolicy(auto_strategy="best_performance"))
        site = _core.CallSite(compile_rules(policy))
        place = CallContext(site=site, allow_tf32=False, deterministic=False, policy=policy)
        _core.op_matmul(place, x, x, None, None, None, out, None, None, None, None)
        (decision,) = xrt.decisions()
        assert decision.source == "tuned"
        return decision.notes

    try:
        tuning_cache.use_tuning_cache()
        assert not notes()
        (entry,) = json.loads(own_tuning_cache.read_text())["entries"].values()
        assert entry["validators"]["core"] == tuning_cache.core_build()
        assert entry["times"][0]["verdict"] in ("control", "faster")
        assert not notes(), "it is replayed"
        monkeypatch.setattr(tuning_cache, "core_build", lambda: "another")
        (note,) = notes()
        assert "stale entry" in note
        assert "core was" in note
    finally:
        monkeypatch.undo()
        tuning_cache.use_tuning_cache()
        dispatcher.forget_measurements()
