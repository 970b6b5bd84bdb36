# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Speed, memory and start against a lock: the ratio to a control that is timed again, and what the lock lacks."""

from __future__ import annotations

import time

import msgspec
import pytest
from planted_engine import PlantedEngine

import xpuruntime as xrt
from xpuruntime.cli.entry import run
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.measured import LockedRatio
from xpuruntime.lockfile.records import Lock
from xpuruntime.locks.verification.speed import open_reference

SPEED = {"max_slowdown": "25%", "budget": "4s"}
POLICY = {
    "execution": {"engine": "onnxruntime", "device": "cpu"},
    "verify": {"speed": SPEED, "start": "60s"},
}


@pytest.fixture(scope="module")
def locked(digits, tmp_path_factory):
    path = tmp_path_factory.mktemp("figures") / "digits.lock"
    xrt.lock(digits, POLICY, path)
    return path


def edited(path, folder, **changes):
    lock = load_lock(path)
    return save_lock(
        Lock.of(lock.identity, measured=msgspec.structs.replace(lock.measured, **changes)), folder / "e.lock"
    )


def claims(digits, lock, section, policy=POLICY, **more):
    verification = xrt.verify(digits, policy, lock=lock, only=[section], **more)
    return {claim.id: claim for claim in verification.claims}


def test_a_lock_has_what_its_policy_asks_to_verify(digits, locked, tmp_path):
    measured = load_lock(locked).measured
    assert set(measured.ratios) == {"latency.p50", "start"}
    for ratio in measured.ratios.values():
        assert ratio.control == "reference"
        assert 0 < ratio.low <= ratio.ratio <= ratio.high
    assert measured.memory_peak > 10 << 20
    plain = xrt.lock(digits, {"execution": POLICY["execution"]}, tmp_path / "plain.lock").lock.measured
    assert (plain.ratios, plain.memory_peak) == ({}, None)
    assert plain.latency_us


def test_figures_and_the_section_verify_are_no_part_of_the_identity(digits, locked, tmp_path):
    without = edited(locked, tmp_path, ratios={}, memory_peak=None)
    assert load_lock(without).digest == load_lock(locked).digest


def test_what_did_not_change_does_not_fail(digits, locked):
    for section, id in (("speed", "speed.latency.p50"), ("memory", "memory.locked_peak"), ("start", "start.locked")):
        claim = claims(digits, locked, section)[id]
        assert claim.verdict in ("pass", "inconclusive"), claim
        if section == "memory":
            assert claim.verdict == "pass"
        else:
            assert "locked" in claim.requested
            assert claim.observed == "not measured" or claim.figures["locked_ratio"] > 0


@pytest.mark.timed
@pytest.mark.parametrize("uncertain", [False, True])
def test_a_session_that_became_slower_is_found(digits, tmp_path, uncertain):
    """It is slower than the upper end of what was locked, so that also a lock of a noisy machine decides."""
    engine = PlantedEngine(lambda run, feeds: run(feeds))
    policy = {"execution": {"engine": "planted", "device": "cpu"}, "verify": {"speed": SPEED}}
    path = tmp_path / "planted.lock"
    xrt.lock(digits, policy, path, registry=engine.registry())
    if uncertain:
        wide = LockedRatio(control="reference", ratio=1.0, low=0.7, high=1.5, confidence=0.99, rounds=61)
        path = edited(path, tmp_path, ratios={"latency.p50": wide})

    def slowed(run, feeds):
        until = time.perf_counter() + 500e-6
        while time.perf_counter() < until:
            pass
        return run(feeds)

    engine.around = slowed
    claim = claims(digits, path, "speed", policy, registry=engine.registry())["speed.latency.p50"]
    assert (claim.verdict, claim.code) == ("fail", "slower"), claim
    assert claim.fix == f"find what changed: `xrt diff {path} here MODEL`"


@pytest.mark.timed
def test_a_session_that_was_slow_when_it_was_locked_may_be_slow(digits, locked, tmp_path):
    """The expected value is the lock's: twice the control is no slowdown where three times were locked."""
    triple = LockedRatio(control="reference", ratio=3.0, low=2.95, high=3.05, confidence=0.99, rounds=61)
    slow = edited(locked, tmp_path, ratios={"latency.p50": triple})
    claim = claims(digits, slow, "speed")["speed.latency.p50"]
    assert claim.verdict == "pass", claim
    assert claim.figures["ratio"] < 0.8


def test_an_anchor_is_a_control_of_a_lock(digits, tmp_path):
    policy = {**POLICY, "verify": {"speed": {"max_slowdown": "200%", "budget": "1s", "control": "anchor"}}}
    path = tmp_path / "anchor.lock"
    assert xrt.lock(digits, policy, path).lock.measured.ratios["latency.p50"].control == "anchor"
    claim = claims(digits, path, "speed", policy)["speed.latency.p50"]
    assert claim.verdict in ("pass", "inconclusive"), claim
    assert claim.code == "noisy" or "the anchor, a fixed NumPy workload" in claim.requested
    other = claims(digits, path, "speed")["speed.latency.p50"]
    assert (other.verdict, other.code) == ("unobservable", "unobservable")
    assert "only to 'anchor'" in other.reason


def test_what_a_lock_lacks_is_unobservable(digits, locked, tmp_path):
    bare = edited(locked, tmp_path, ratios={}, memory_peak=None)
    for section, id in (("speed", "speed.latency.p50"), ("memory", "memory.locked_peak"), ("start", "start.locked")):
        claim = claims(digits, bare, section)[id]
        assert (claim.verdict, claim.code) == ("unobservable", "unobservable")
        assert "`xrt lock MODEL --upgrade`" in claim.fix


def test_a_ratio_that_is_not_known_well_passes_nothing(digits, locked, tmp_path):
    wide = LockedRatio(control="reference", ratio=1.0, low=0.7, high=1.3, confidence=0.99, rounds=61)
    claim = claims(digits, edited(locked, tmp_path, ratios={"latency.p50": wide}), "speed")["speed.latency.p50"]
    assert (claim.verdict, claim.code) == ("inconclusive", "noisy")


def test_what_a_ratio_cannot_decide_is_said_when_it_is_locked(digits, locked, tmp_path, capsys):
    wide = LockedRatio(control="reference", ratio=1.0, low=0.7, high=1.1, confidence=0.99, rounds=41, margin=0.05)
    path = edited(locked, tmp_path, ratios={"latency.p50": wide, "start": msgspec.structs.replace(wide, margin=0.5)})
    assert run(["lock", str(digits), "-o", str(path)]) == 0
    (line,) = [splitline for splitline in capsys.readouterr().out.splitlines() if "cannot decide" in splitline]
    assert line.strip() == (
        "this lock cannot decide a slowdown of 5% of latency.p50: its ratio 1.000 [0.700, 1.100] may be off by 10%, "
        "more than half of that. It takes about 611 rounds in place of 41, a margin of 20%, or a quieter machine"
    )


def test_the_control_has_the_threads_of_the_policy(digits, tmp_path):
    policy = {
        "execution": {**POLICY["execution"], "threads": 1},
        "verify": {"speed": {**SPEED, "max_slowdown": "90%"}},
    }
    with (
        xrt.InferenceSession(digits, policy=policy) as session,
        open_reference(session, digits, trust=False) as control,
    ):
        assert (control.plan.engine, control.policy.execution.threads) == ("onnxruntime", 1)
    path = tmp_path / "one.lock"
    ratio = xrt.lock(digits, policy, path).lock.measured.ratios["latency.p50"]
    assert ratio.margin >= 0.9
    claim = claims(digits, path, "speed", policy)["speed.latency.p50"]
    assert "onnxruntime@cpu with execution.threads 1 alone" in claim.requested
    earlier = edited(path, tmp_path, ratios={"latency.p50": msgspec.structs.replace(ratio, margin=msgspec.UNSET)})
    claim = claims(digits, earlier, "speed", policy)["speed.latency.p50"]
    assert (claim.verdict, claim.reason) == (
        "unobservable", "the lock has no ratio of latency.p50 to a control with execution.threads 1",
    )  # fmt: skip


def test_a_peak_that_grew_fails(digits, locked, tmp_path):
    old = edited(locked, tmp_path, memory_peak=20 << 20)
    peak = claims(digits, old, "memory")["memory.locked_peak"]
    assert (peak.verdict, peak.code) == ("fail", "memory_peak")


def test_a_session_that_opens_more_slowly_is_found(digits, tmp_path):
    engine = PlantedEngine(lambda run, feeds: run(feeds))
    policy = {"execution": {"engine": "planted", "device": "cpu"}, "verify": {"start": "60s"}}
    path = tmp_path / "planted.lock"
    xrt.lock(digits, policy, path, registry=engine.registry())
    known = msgspec.structs.replace(load_lock(path).measured.ratios["start"], ratio=1.5, low=1.4, high=1.6)
    path = edited(path, tmp_path, ratios={"start": known})

    def open_others():  # takes longer on a busy machine, as the reference does
        for _ in range(8):
            xrt.InferenceSession(digits).close()

    engine.opening = open_others
    claim = claims(digits, path, "start", policy, registry=engine.registry())["start.locked"]
    assert (claim.verdict, claim.code) == ("fail", "slow_start"), claim


def test_a_lock_of_another_machine_is_compared_with_nothing(digits, locked, tmp_path):
    lock = load_lock(locked)
    validators = tuple(
        msgspec.structs.replace(validator, expect=["sse2"]) if validator.kind == "cpu_isa" else validator
        for validator in lock.identity.validators
    )
    path = save_lock(
        Lock.of(msgspec.structs.replace(lock.identity, validators=validators), measured=lock.measured),
        tmp_path / "other.lock",
    )
    result = xrt.verify(digits, POLICY, lock=path, only=["speed", "memory", "start"])
    codes = {claim.id: claim.code for claim in result.claims}
    assert codes["speed.latency.p50"] == codes["memory.locked_peak"] == codes["start.locked"] == "other_machine"
    assert result.exit_code == 3


def test_an_upgrade_measures_again(digits, tmp_path):
    policy, path = {**POLICY, "verify": {"memory": {"max_growth": "20%"}}}, tmp_path / "digits.lock"
    lock = xrt.lock(digits, {"execution": POLICY["execution"]}, path).lock
    kept = path.read_bytes()
    assert not xrt.lock(digits, policy, path).written
    assert path.read_bytes() == kept
    assert not xrt.lock(digits, policy, path, upgrade=True, dry_run=True).written
    assert path.read_bytes() == kept
    found = xrt.lock(digits, policy, path, upgrade=True)
    assert (found.written, found.drifts) == (True, ())
    assert load_lock(path).measured.memory_peak
    assert load_lock(path).identity.validators == lock.identity.validators
