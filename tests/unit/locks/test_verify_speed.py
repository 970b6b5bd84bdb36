# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Claims of speed of `verify`: with a slowdown planted, with none, and beside another interpreter."""

from __future__ import annotations

import os
import sys
import time

import pytest
from planted_interpreters import interpreter
from verify_cases import CPU, only_claim, planted

import xpuruntime as xrt
from xpuruntime.errors import EngineUnavailable, InputError
from xpuruntime.locks.verification.speed import TimedMetric, decide, time_metric
from xpuruntime.measuring.statistics import RatioComparison, RatioVerdict
from xpuruntime.policies import VerifySpeed

SPEED = {"speed": {"max_slowdown": "25%", "budget": "8s"}}


class TestSpeed:
    def test_a_session_that_is_its_own_control_is_not_slower(self, digits):
        result = xrt.verify(digits, {**CPU, "verify": SPEED}, only=["speed"])
        claim = only_claim(result, "speed.latency.p50")
        assert claim.verdict in ("pass", "inconclusive"), str(result)
        assert claim.figures["rounds"] >= 1  # as many as the machine leaves time for

    @pytest.mark.timed
    def test_a_slowed_session_is_found(self, digits):
        def slowed(run, feeds):
            until = time.perf_counter() + 100e-6
            while time.perf_counter() < until:
                pass
            return run(feeds)

        result = planted(digits, slowed, only=["speed"], verify=SPEED)
        claim = only_claim(result, "speed.latency.p50")
        assert (claim.verdict, claim.code, result.exit_code) == ("fail", "slower", 1), str(result)
        assert claim.figures["low"] > 1 + claim.figures["margin"]

    @pytest.mark.timed
    def test_too_few_runs_for_a_percentile(self, digits):
        def slow(run, feeds):
            time.sleep(0.005)
            return run(feeds)

        speed = {"metric": ["latency.p99"], "budget": "1s", "inconclusive": "warn"}
        result = planted(digits, slow, only=["speed"], verify={"speed": speed})
        claim = only_claim(result, "speed.latency.p99")
        assert (claim.verdict, claim.code) == ("inconclusive", "undecided")
        assert "p99 takes 662 runs of each side" in claim.reason
        assert (result.verdict, result.exit_code) == ("warn", 0)

    def test_an_anchor_needs_a_lock(self, digits):
        policy = {**CPU, "verify": {"speed": {"control": "anchor"}}}
        claim = only_claim(xrt.verify(digits, policy, only=["speed"]), "speed.latency.p50")
        assert (claim.verdict, claim.code) == ("inconclusive", "no_control")

    def test_another_interpreter(self, digits, tmp_path):
        """This one under another name: two workers, and no difference between them."""
        policy = {**CPU, "verify": SPEED}
        result = xrt.verify(digits, policy, only=["speed"], against=sys.executable)
        claim = only_claim(result, "speed.latency.p50")
        assert claim.verdict in ("pass", "inconclusive"), str(result)
        assert f"{sys.executable} (onnxruntime " in claim.requested

    def test_an_interpreter_without_the_package_is_an_error(self, digits, tmp_path):
        import venv

        venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
        bare = tmp_path / "bare" / "bin" / "python"
        with pytest.raises(EngineUnavailable, match=r"No module named.*Fix: `\S*bare/bin/python -m pip install"):
            xrt.verify(digits, CPU, against=bare, inconclusive="warn")

    def test_an_interpreter_that_cannot_open_the_model_fails_the_claim(self, digits, tmp_path):
        """Also where what is undecided is no more than a warning: the control never ran."""
        broken = interpreter(tmp_path / "broken", customize="import sys; sys.modules['onnxruntime'] = None")
        result = xrt.verify(digits, CPU, only=["speed"], against=broken.removeprefix("py:"), inconclusive="warn")
        claim = only_claim(result, "speed.latency.p50")
        assert (claim.verdict, claim.code, result.exit_code) == ("fail", "worker_failed", 1)
        assert "onnxruntime" in claim.reason
        assert claim.fix

    def test_what_is_no_interpreter(self, digits, tmp_path):
        with pytest.raises(InputError, match="is not an executable file"):
            xrt.verify(digits, CPU, against=tmp_path / "nowhere")
        with pytest.raises(InputError, match=r"against: .*/bin/true.*interpreter"):
            xrt.verify(digits, CPU, against="/bin/true")

    @pytest.mark.parametrize(
        ("p_slower", "p_within", "interval", "noisy", "verdict"),
        [
            ((1e-6, 1.0), (1.0, 1.0), (1.10, 1.08, 1.12), False, "fail"),
            ((1e-6, 1.0), (1.0, 1.0), (1.10, 1.04, 1.12), False, "inconclusive"),
            ((8e-3, 9e-3), (1.0, 1.0), (1.10, 1.08, 1.12), False, "inconclusive"),  # of two, by Holm
            ((4e-3, 9e-3), (1.0, 1.0), (1.10, 1.08, 1.12), False, "fail"),
            ((1.0, 1.0), (1e-6, 1.0), (1.01, 1.00, 1.02), False, "pass"),
            ((1.0, 1.0), (1e-6, 1.0), (1.01, 1.00, 1.06), False, "inconclusive"),
            ((1e-6, 1.0), (1.0, 1.0), (1.10, 1.08, 1.12), True, "inconclusive"),
        ],
    )
    def test_verdicts_of_comparisons(self, p_slower, p_within, interval, noisy, verdict):
        def comparison(place):
            ratio, low, high = interval
            return RatioComparison(
                ratio=ratio, low=low, high=high, confidence=0.99, margin=0.05, rounds=20, looks=3, family=2,
                verdict=RatioVerdict.INCONCLUSIVE, within_limit=False, not_faster=False, too_noisy=noisy,
                control_split=None, p_slower=p_slower[place], p_within_limit=p_within[place],
            )  # fmt: skip

        findings = [
            TimedMetric(name, comparison(index), {}, ()) for index, name in enumerate(("latency.p50", "latency.p99"))
        ]
        first, second = decide(findings, VerifySpeed(metric=["latency.p50", "latency.p99"]), "control")
        assert first.verdict == verdict
        assert second.verdict == ("fail" if verdict == "fail" and p_slower[1] < 1 else "inconclusive")

    @pytest.mark.parametrize(
        ("margin", "requested"),
        [(0.05, "at most 5% slower than it"), (0.11, "at most 5% or 2 us, which are 11% here, slower than it")],
    )
    def test_the_limit_of_short_runs_is_stated(self, margin, requested):
        comparison = RatioComparison(
            ratio=1.0, low=0.99, high=1.01, confidence=0.99, margin=margin, rounds=20, looks=3, family=1,
            verdict=RatioVerdict.TIED, within_limit=True, not_faster=True, too_noisy=False,
            control_split=None, p_slower=1.0, p_within_limit=1e-6,
        )  # fmt: skip
        (claim,) = decide([TimedMetric("latency.p50", comparison, {}, ())], VerifySpeed(max_slowdown="5%"), "it")
        assert (claim.verdict, claim.requested) == ("pass", requested)

    @pytest.mark.parametrize(
        ("load", "session", "control", "verdict"),
        [
            (99.0, (1.1, 1.1), (1.0, 8.0), "inconclusive"),  # it is slower than a control that waits for processors
            (99.0, (1.0, 8.0), (1.0, 1.0), "inconclusive"),  # it is no slower, and waits for processors
            (99.0, (1.1, 8.8), (1.0, 8.0), "fail"),
            (99.0, (1.0, 1.0), (1.0, 1.0), "pass"),
            (0.0, (1.0, 8.0), (1.0, 1.0), "fail"),  # nothing but itself makes some of its calls slow
        ],
    )
    def test_one_of_two_processes_waits_for_processors(self, monkeypatch, load, session, control, verdict):
        """Most calls of the one that waits are slow, in all rounds, and some are not."""
        monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))

        def sampler(times):
            fast, usual = times
            return lambda calls, samples: [1e-3 * calls * (usual if index % 8 else fast) for index in range(samples)]

        metric = time_metric("latency.p50", sampler(session), sampler(control), VerifySpeed(max_slowdown="5%"), 5.0)
        (claim,) = decide([metric], VerifySpeed(max_slowdown="5%"), "control")
        assert claim.verdict == verdict, claim
        assert verdict != "inconclusive" or (claim.code == "noisy" and "the fastest 5% of the calls" in claim.reason)
