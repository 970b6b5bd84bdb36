# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Verification of what is measured: accuracy, determinism, memory, start, and the audit of timed runs."""

from __future__ import annotations

import time

import numpy as np
import pytest
from verify_cases import CPU, only_claim, plain, planted

import xpuruntime as xrt
from xpuruntime.locks.verification.metrics import Metric


class TestAccuracy:
    def test_an_output_out_of_tolerance(self, digits):
        result = planted(digits, lambda run, feeds: {k: v + 1 for k, v in run(feeds).items()}, only=["accuracy"])
        claim = only_claim(result, "accuracy.logits")
        assert (claim.verdict, claim.code) == ("fail", "out_of_tolerance")
        assert claim.figures["max_abs"] > 0.5
        assert result.exit_code == 1

    def test_nan_is_out_of_tolerance_and_leaves_no_nan_in_the_figures(self, digits):
        result = planted(digits, lambda run, feeds: {k: v * np.nan for k, v in run(feeds).items()}, only=["accuracy"])
        claim = only_claim(result, "accuracy.logits")
        assert claim.verdict == "fail"
        assert all(np.isfinite(value) for value in claim.figures.values())

    def test_a_tolerance_that_the_session_is_refused_for(self, digits):
        policy = {
            "execution": {"engine": "onnxruntime", "device": "cpu", "precision": "fp16"},
            "accuracy": {"rtol": 1e-9, "atol": 0.0},
        }
        result = xrt.verify(digits, policy)
        assert [(claim.id, claim.verdict) for claim in result.claims] == [("accuracy.outputs", "fail")]

    @pytest.mark.parametrize(("floor", "verdict"), [(0.5, "pass"), (0.75, "pass"), (0.76, "fail")])
    def test_a_metric_and_its_floor(self, digits, floor, verdict):
        result = xrt.verify(digits, CPU, only=["accuracy"], metrics=[Metric("share", lambda run: 0.75, floor)])
        claim = only_claim(result, "accuracy.metric.share")
        assert (claim.verdict, claim.figures["value"]) == (verdict, 0.75)


class TestDeterminism:
    def test_grades_up_to_the_one_that_is_stated_pass(self, digits):
        result = xrt.verify(digits, {**CPU, "verify": {"determinism": "concurrency"}}, only=["determinism"])
        assert [(claim.id, claim.verdict) for claim in result.claims] == [
            ("determinism.run_to_run", "pass"),
            ("determinism.concurrency", "pass"),
        ]

    def test_the_grade_of_a_session_is_tested_and_named(self, digits, tmp_path):
        path = tmp_path / "policy.yaml"
        path.write_text("execution: {engine: onnxruntime, device: cpu}\nverify:\n  determinism: run_to_run\n")
        [claim] = xrt.verify(digits, path, only=["determinism"]).claims
        assert (claim.key, claim.line, claim.column) == ("verify.determinism", 3, 3)
        policy = {"execution": {**CPU["execution"], "determinism": "run_to_run"}}
        [claim] = xrt.verify(digits, policy, only=["determinism"]).claims
        assert (claim.key, claim.verdict) == ("execution.determinism", "pass")

    def test_results_that_do_not_repeat(self, digits):
        draw = np.random.default_rng(0)

        def shaken(run, feeds):
            return {name: np.nextafter(v, v + draw.choice([-1, 1])) for name, v in run(feeds).items()}

        policy = {"determinism": "concurrency"}
        result = planted(digits, shaken, only=["determinism"], verify=policy)
        verdicts = {claim.id: (claim.verdict, claim.code) for claim in result.claims}
        assert verdicts["determinism.run_to_run"] == ("fail", "nondeterministic")
        assert verdicts["determinism.concurrency"][0] == "skipped"
        assert result.exit_code == 1

    def test_no_grade_is_skipped(self, digits):
        result = xrt.verify(digits, CPU, only=["determinism"])
        assert [(claim.id, claim.verdict) for claim in result.claims] == [("determinism", "skipped")]


class TestMemory:
    def test_a_leak_is_found(self, digits):
        leaked = []

        def leak(run, feeds):
            leaked.append(np.ones(1 << 18))  # 2 MiB
            return run(feeds)

        result = planted(digits, leak, only=["memory"], verify={"memory": {"max_growth": "5%"}})
        claim = only_claim(result, "memory.growth")
        assert (claim.verdict, claim.code) == ("fail", "memory_growth")
        assert claim.figures["after_bytes"] - claim.figures["before_bytes"] > 50 << 20

    def test_a_peak_over_its_limit(self, digits):
        result = xrt.verify(digits, {**CPU, "verify": {"memory": {"max_peak": "1MiB"}}}, only=["memory"])
        claim = only_claim(result, "memory.peak")
        assert (claim.verdict, claim.code) == ("fail", "memory_peak")


class TestStart:
    def test_a_slow_start_is_tried_again_and_fails(self, digits):
        opened = []

        def opening():
            opened.append(1)
            time.sleep(0.3)

        result = planted(digits, plain, only=["start"], verify={"start": "100ms"}, opening=opening)
        claim = only_claim(result, "start")
        assert (claim.verdict, claim.code, len(opened)) == ("fail", "slow_start", 3)
        assert claim.figures["seconds"] > 0.3

    def test_one_slow_start_of_three_passes(self, digits):
        opened = []

        def opening():
            opened.append(1)
            time.sleep(0.0 if len(opened) > 1 else 1.5)

        result = planted(digits, plain, only=["start"], verify={"start": "1s"}, opening=opening)
        assert only_claim(result, "start").verdict == "pass"
        assert len(opened) > 1

    def test_a_start_without_a_limit_is_skipped(self, digits):
        result = xrt.verify(digits, CPU, only=["start"])
        assert [(claim.id, claim.verdict) for claim in result.claims] == [("start", "skipped")]
        assert result.exit_code == 4


class TestAudit:
    def test_other_work_inside_of_a_timed_loop(self, digits):
        calls = []

        def lazy(run, feeds):
            calls.append(time.perf_counter())
            outputs = run(feeds)
            fast = len(calls) > 3 and calls[-1] - calls[-3] < 0.1  # as one that watches for a benchmark
            return {name: np.zeros_like(value) for name, value in outputs.items()} if fast else outputs

        claim = only_claim(planted(digits, lazy, only=["audit"]), "audit.same_work")
        assert (claim.verdict, claim.code) == ("fail", "other_work")

    def test_a_cache_of_results(self, digits):
        cache = {}

        def cached(run, feeds):
            key = feeds["image"].tobytes()
            if key not in cache:
                time.sleep(0.001)  # a model that takes as long as a cache is worth
                cache[key] = run(feeds)
            return dict(cache[key])

        claim = only_claim(planted(digits, cached, only=["audit"]), "audit.no_cache")
        assert (claim.verdict, claim.code) == ("fail", "cached")

    def test_a_cache_of_the_last_result_alone(self, digits):
        last = {}

        def cached(run, feeds):
            key = feeds["image"].tobytes()
            if last.get("key") != key:
                time.sleep(0.001)
                last.update(key=key, value=run(feeds))
            return dict(last["value"])

        claim = only_claim(planted(digits, cached, only=["audit"]), "audit.no_cache")
        assert (claim.verdict, claim.code) == ("fail", "cached")

    def test_work_that_depends_on_the_values_is_no_cache(self, digits):
        def waits(run, feeds):
            time.sleep(0.001 * (1 + int(feeds["image"].flat[0] * 1000) % 3))
            return run(feeds)

        claim = only_claim(planted(digits, waits, only=["audit"]), "audit.no_cache")
        assert claim.verdict in ("pass", "inconclusive")

    def test_inputs_of_one_value_cannot_be_varied(self, digits):
        zeros = {"image": np.zeros((1, 1, 8, 8), np.float32)}
        claim = only_claim(xrt.verify(digits, CPU, inputs=zeros, only=["audit"]), "audit.no_cache")
        assert (claim.verdict, claim.code) == ("skipped", "not_applicable")
