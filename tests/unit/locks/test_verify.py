# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`verify` with a fault planted in each section, and with none."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import msgspec
import numpy as np
import pytest
from verify_cases import CPU, only_claim, plain, planted

import xpuruntime as xrt
from xpuruntime.errors import EngineError, InputError
from xpuruntime.evidence import Report
from xpuruntime.evidence.records import Observation
from xpuruntime.inference import InferenceSession
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.snapshot import machine_snapshot


class TestUnchanged:
    def test_all_passes(self, digits):
        result = xrt.verify(digits, {**CPU, "verify": {"start": "60s", "memory": {"max_peak": "64GiB"}}})
        assert result.verdict == "pass", str(result)
        ids = {claim.id for claim in result.claims}
        assert {"evidence.execution.engine", "evidence.execution.device", "evidence.execution.precision"} <= ids
        assert {"accuracy.logits", "memory.growth", "memory.peak", "start", "audit.same_work"} <= ids
        assert (result.engine, result.device) == ("onnxruntime", "cpu")
        assert "inputs were generated (seed 0) for image [1, 1, 8, 8]" in result.notes[0]

    def test_the_planted_engine_without_a_fault_passes(self, digits):
        result = planted(digits, plain, only=["accuracy", "memory", "audit"])
        open_ = {claim.id for claim in result.claims if claim.verdict != "pass"}
        assert open_ <= {"audit.no_cache"}, str(result)  # which a busy machine leaves undecided
        assert not result.of("fail"), str(result)

    @pytest.mark.parametrize(
        ("text", "x"),
        [
            ("g (string[n] x) => (bool[n] y) { y = Equal (x, x) }", np.array(["a", "b"], object)),
            ("g (int64[n] x) => (float[n] y) <float[2] w = {1, 2}, int64 k = {9}> { i = Sub (x, k) y = Gather (w, i) }",
             np.array([9, 10])),
        ],
    )  # fmt: skip
    def test_a_lock_of_a_model_that_takes_no_generated_inputs(self, text, x, tmp_path):
        onnx = pytest.importorskip("onnx")
        path = tmp_path / "model.onnx"
        onnx.save(onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["" : 19]> {text}'), path)
        xrt.lock(path, CPU, tmp_path / "model.lock", inputs={"x": x})
        result = xrt.verify(path, CPU, lock=tmp_path / "model.lock", inputs={"x": x}, only=["evidence"])
        assert result.verdict == "pass", str(result)
        assert only_claim(result, "evidence.lock").verdict == "pass"

    def test_warnings_of_the_plan_are_notes(self, digits):
        policy = {"execution": {"engine": "onnxruntime", "device": "cpu", "determinism": "run_to_run"}}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = xrt.verify(digits, policy, only=["evidence"])
        assert any("determinism" in note for note in result.notes)


class TestGeneration:
    """`xrt.verify` of an ONNX decoder without a cache."""

    @pytest.fixture
    def decoder(self, tmp_path):
        helper = pytest.importorskip("onnx").helper
        table = helper.make_tensor("table", 1, [4, 4], np.random.default_rng(0).normal(size=16).astype(np.float32))
        ids = helper.make_tensor_value_info("input_ids", 7, ["batch", "length"])
        mask = helper.make_tensor_value_info("attention_mask", 7, ["batch", "length"])
        logits = helper.make_tensor_value_info("logits", 1, ["batch", "length", 4])
        nodes = [
            helper.make_node("Gather", ["table", "input_ids"], ["rows"]),
            helper.make_node("Cast", ["attention_mask"], ["kept"], to=1),
            helper.make_node("Unsqueeze", ["kept", "last"], ["column"]),
            helper.make_node("Mul", ["rows", "column"], ["logits"]),
        ]
        last = helper.make_tensor("last", 7, [1], [2])
        graph = helper.make_graph(nodes, "decoder", [ids, mask], [logits], [table, last])
        opset = [helper.make_opsetid("", 18)]
        path = tmp_path / "decoder.onnx"
        path.write_bytes(helper.make_model(graph, opset_imports=opset, ir_version=9).SerializeToString())
        (tmp_path / "texts.json").write_text(json.dumps([[0, 1, 2, 3, 0, 1], [3, 2, 1, 0]]))
        return path

    def verify(self, decoder, scale=1.0, **limits):
        text = limits.pop("text", str(decoder.with_name("texts.json")))
        verify = {"generation": {"text": text, **limits}}

        def around(run, feeds):
            return {name: scale * value for name, value in run(feeds).items()}

        return planted(str(decoder), around, only=["generation"], verify=verify)

    def test_a_session_that_is_right(self, decoder):
        result = self.verify(decoder, top1=1.0, kl=1e-9, perplexity="0.01%", tokens=8)
        assert {claim.id: claim.verdict for claim in result.claims} == {
            "generation.top1": "pass", "generation.kl": "pass", "generation.perplexity": "pass",
            "generation.tokens": "skipped",
        }  # fmt: skip
        assert result.exit_code == 0

    def test_a_session_that_is_off_by_a_factor(self, decoder):
        result = self.verify(decoder, 1.05, top1=1.0, kl=1e-9, perplexity="0.01%", tokens=8)
        failed = {claim.id: claim.key for claim in result.of("fail")}
        assert failed == {
            "generation.kl": "verify.generation.kl", "generation.perplexity": "verify.generation.perplexity"
        }  # fmt: skip

    @pytest.mark.parametrize("text", ["none.json", '["text"]', "[[0, 77]]"])
    def test_texts_that_cannot_be_compared_are_inconclusive(self, decoder, text):
        file = decoder.with_name("other.json")
        if not text.endswith(".json"):
            file.write_text(text)
        [claim] = self.verify(decoder, text=str(file), kl=0.1).claims
        assert (claim.id, claim.verdict, claim.code) == ("generation.kl", "inconclusive", "not_compared")

    def test_a_model_of_images_is_inconclusive(self, decoder, digits):
        policy = {"verify": {"generation": {"text": str(decoder.with_name("texts.json")), "top1": 1.0}}}
        [claim] = xrt.verify(digits, policy, only=["generation"]).claims
        assert claim.verdict == "inconclusive"
        assert "does not compute logits" in claim.reason


class TestEvidence:
    def test_a_key_that_is_substituted_names_its_line(self, digits, tmp_path):
        path = tmp_path / "policy.yaml"
        path.write_text("mode: prefer\nexecution:\n  engine: onnxruntime\n  device: cpu\n  layout: nchw\n")
        result = xrt.verify(digits, path, only=["evidence"])
        claim = only_claim(result, "evidence.execution.layout")
        assert (claim.verdict, claim.code, claim.line, claim.column) == ("fail", "substituted", 5, 3)
        assert (result.exit_code, result.policy) == (1, str(path))
        assert only_claim(result, "evidence.execution.engine").line == 3

    def test_a_key_that_is_unsupported(self, digits):
        result = xrt.verify(digits, {**CPU, "kernels": {"matmul": "cublas"}}, only=["evidence"])
        claim = only_claim(result, "evidence.kernels.matmul")
        assert (claim.verdict, claim.code) == ("fail", "unsupported")
        assert claim.fix

    @pytest.mark.parametrize("pattern", ["execution.layout", "execution.*", "*"])
    def test_what_may_deviate_is_skipped(self, digits, pattern):
        policy = {"execution": {**CPU["execution"], "layout": "nchw"}, "verify": {"evidence": {"allow": pattern}}}
        result = xrt.verify(digits, policy, only=["evidence"])
        claim = only_claim(result, "evidence.execution.layout")
        assert (claim.verdict, claim.code) == ("skipped", "allowed")
        assert repr(pattern) in claim.reason
        assert result.exit_code == 0

    def observed(self, monkeypatch, **statuses):
        """Let the instrumented pass see these statuses."""
        real = InferenceSession.explain

        def explain(session, *args, **more):
            report = real(session, *args, **more)
            rows = [
                Observation(key=key, requested="a", resolved="a", observed="b", status=status, reason="because")
                for key, status in statuses.items()
            ]
            return Report(observations=tuple(rows), units=report.units, partial=True, notes=("records are missing",))

        monkeypatch.setattr(InferenceSession, "explain", explain)

    def test_what_was_not_observed_fails_where_it_is_required(self, digits, monkeypatch):
        self.observed(monkeypatch, **{"execution.precision": "unobservable", "execution.engine": "honoured"})
        result = xrt.verify(digits, CPU, only=["evidence"])
        assert only_claim(result, "evidence.execution.precision").verdict == "unobservable"
        assert result.exit_code == 0
        policy = {**CPU, "verify": {"evidence": {"require": ["engine", "precision"]}}}
        result = xrt.verify(digits, policy, only=["evidence"])
        assert only_claim(result, "evidence.execution.precision").code == "not_observed"
        assert only_claim(result, "evidence.execution.engine").verdict == "pass"
        assert result.exit_code == 1

    def test_nothing_observed_is_inconclusive_and_an_incomplete_pass_is_told(self, digits, monkeypatch):
        self.observed(monkeypatch, **{"execution.precision": "unobservable"})
        result = xrt.verify(digits, CPU, only=["evidence"])
        assert result.exit_code == 4
        assert only_claim(result, "evidence.observed").verdict == "inconclusive"
        assert only_claim(result, "evidence.complete").reason == "records are missing"

    def test_a_fallback_that_the_policy_permits_passes(self, digits, monkeypatch):
        self.observed(monkeypatch, **{"execution.fallback": "fallback", "execution.engine": "inconclusive"})
        result = xrt.verify(digits, CPU, only=["evidence"])
        assert only_claim(result, "evidence.execution.fallback").verdict == "pass"
        assert only_claim(result, "evidence.execution.engine").verdict == "inconclusive"

    def test_placement(self, digits, monkeypatch):
        policy = {**CPU, "verify": {"evidence": {"require": "placement"}}}
        assert only_claim(xrt.verify(digits, policy, only=["evidence"]), "evidence.placement").verdict == "pass"
        real = InferenceSession.explain

        def explain(session, *args, **more):
            report = real(session, *args, **more)
            units = tuple(msgspec.structs.replace(u, device="npu") if u.op == "Gemm" else u for u in report.units)
            return msgspec.structs.replace(report, units=units)

        monkeypatch.setattr(InferenceSession, "explain", explain)
        claim = only_claim(xrt.verify(digits, policy, only=["evidence"]), "evidence.placement")
        assert (claim.verdict, claim.code) == ("fail", "misplaced")
        assert "(Gemm, npu)" in claim.reason

    def test_kernels_that_are_required_and_unknown(self, digits):
        policy = {**CPU, "verify": {"evidence": {"require": "kernels"}}}
        claim = only_claim(xrt.verify(digits, policy, only=["evidence"]), "evidence.kernels")
        assert (claim.verdict, claim.code) == ("fail", "not_observed")

    def test_a_key_that_cannot_be_enforced_under_strict(self, digits):
        result = xrt.verify(digits, {**CPU, "mode": "strict", "kernels": {"matmul": "cublas"}})
        assert [(claim.id, claim.verdict, claim.code) for claim in result.claims] == [
            ("evidence.session", "fail", "not_opened")
        ]
        assert "kernels.matmul" in result.claims[0].reason
        assert result.exit_code == 1


class TestLock:
    def test_a_lock_that_holds_and_one_that_does_not(self, digits, tmp_path):
        path = tmp_path / "digits.lock"
        xrt.lock(digits, CPU, path)
        result = xrt.verify(digits, lock=path, only=["evidence"])
        claim = only_claim(result, "evidence.lock")
        assert claim.verdict == "pass", str(result)
        assert claim.figures["unobservable"] == claim.figures["entries"] == 9
        assert "9 kernels are not reported" in claim.observed
        assert (result.exit_code, result.lock) == (0, str(path))
        policy = {"execution": {**CPU["execution"], "threads": 1}}
        result = xrt.verify(digits, policy, lock=path, only=["evidence"])
        failed = [one.id for one in result.of("fail") if one.id.startswith("evidence.lock.")]
        assert "evidence.lock.policy" in failed
        assert "evidence.lock.policy" in str(only_claim(result, "evidence.lock.plan").fix)
        assert result.exit_code == 1

    def test_a_lock_of_another_machine_is_not_compared(self, digits, tmp_path, monkeypatch):
        from xpuruntime.evidence import Difference
        from xpuruntime.locks.relock import LockResult
        from xpuruntime.locks.verification import evidence

        path = tmp_path / "digits.lock"
        lock = xrt.lock(digits, CPU, path).lock
        drift = Difference(code="cpu_isa", subject="cpu", validator="cpu-1", before="avx512f", after="avx2")
        monkeypatch.setattr(evidence, "lock", lambda *_, **__: LockResult(lock=lock, drifts=(drift,)))
        result = xrt.verify(digits, lock=path, only=["evidence"])
        assert only_claim(result, "evidence.lock.cpu_isa").code == "other_machine"
        assert (result.comparable, result.exit_code) == (False, 3)

        drifts = (drift, Difference(code="model", subject="digits.onnx", validator="mod-1", before="a", after="b"))
        monkeypatch.setattr(evidence, "lock", lambda *_, **__: LockResult(lock=lock, drifts=drifts))
        result = xrt.verify(digits, lock=path, only=["evidence"])
        assert only_claim(result, "evidence.lock.model").verdict == "fail"  # no machine changes a file
        assert (result.exit_code, result.headline.split(",")[0]) == (1, "1 failed")


class TestFailures:
    def test_an_engine_that_raises_fails_the_sections_that_run_it(self, digits):
        calls = []

        def breaks(run, feeds):
            calls.append(1)
            if len(calls) > 1:
                raise EngineError("the device fell off the bus", engine="planted")
            return run(feeds)

        result = planted(digits, breaks, only=["evidence", "memory", "audit"])
        assert {claim.id: claim.verdict for claim in result.claims if claim.code == "raised"} == {
            "evidence.run": "fail",
            "memory.run": "fail",
            "audit.run": "fail",
        }
        assert all("fell off the bus" in claim.reason for claim in result.claims if claim.code == "raised")
        assert result.exit_code == 1

    def test_an_error_of_any_class_is_a_claim(self, digits):
        calls = []

        def breaks(run, feeds):
            calls.append(1)
            if len(calls) > 1:
                raise ZeroDivisionError("odd")
            return run(feeds)

        [claim] = planted(digits, breaks, only=["memory"]).claims
        assert (claim.verdict, claim.reason) == ("fail", "ZeroDivisionError: odd")

    def test_memory_that_runs_out_decides_nothing(self, digits):
        calls = []

        def breaks(run, feeds):
            calls.append(1)
            if len(calls) > 1:
                raise MemoryError("too much")
            return run(feeds)

        result = planted(digits, breaks, only=["memory"])
        assert (result.claims[0].verdict, result.exit_code) == ("inconclusive", 4)

    def test_an_engine_that_fails_to_load_is_a_claim(self, digits):
        def opening():
            raise EngineError("it crashed while loading", engine="planted")

        result = planted(digits, plain, only=["accuracy"], opening=opening)
        assert [(claim.id, claim.verdict) for claim in result.claims] == [("evidence.session", "fail")]
        assert "it crashed while loading" in result.claims[0].reason

    def test_an_engine_that_is_not_there_is_of_the_environment(self, digits):
        gone = EngineFacts(name="onnxruntime", reason="it is not installed")
        machine = msgspec.structs.replace(machine_snapshot(), engines={"onnxruntime": gone})
        with pytest.raises(EngineError, match="it is not installed"):
            xrt.verify(digits, CPU, machine=machine)

    def test_inputs_that_do_not_fit_are_refused(self, digits):
        with pytest.raises(InputError):
            xrt.verify(digits, CPU, inputs={"image": np.zeros((1, 2, 3), np.float32)})

    @pytest.mark.parametrize("only", [[], "evidence", ["evidnce"]])
    def test_sections_that_there_are_not(self, digits, only):
        with pytest.raises(InputError):
            xrt.verify(digits, CPU, only=only)


def test_a_plan_pays_no_attention_to_what_is_verified(digits):
    plans = [
        xrt.plan(digits, policy={**CPU, **({"verify": {"start": "1s", "memory": {}}} if stated else {})})
        for stated in (False, True)
    ]
    assert plans[0].request_hash == plans[1].request_hash
    assert plans[0].to_dict() == plans[1].to_dict()


def test_places_of_keys():
    from xpuruntime.policies import files
    from xpuruntime.policies.document import position_of

    text = (
        "execution:\n  shapes: {a.b: [1]}\n  memory: {limit: 1GiB}\nkernels:\n  rules:\n"
        "    - {match: {op: matmul}, use: torch}\n    - use: torch\n      match: {op: conv}\n"
        "auto_strategy: first_supported\n"
    )
    root = files.loads(text, "yaml", "p").root
    assert position_of(root, "execution.shapes.a.b") == (2, 12)
    assert position_of(root, "execution.memory.limit") == (3, 12)
    assert position_of(root, "execution.memory.pool") == (3, 3)
    assert position_of(root, "kernels.rules[1]") == (7, 7)
    assert position_of(root, "kernels.auto_strategy") == (9, 1)
    assert position_of(root, "accuracy.rtol") is None
    assert position_of(files.loads('{"execution": {"device": "cpu"}}', "json", "p").root, "execution.device") == (1, 16)


def test_the_digest_of_a_policy_is_that_of_its_file(digits, tmp_path):
    import hashlib

    path = tmp_path / "policy.yaml"
    path.write_text("execution: {engine: onnxruntime, device: cpu}\n")
    result = xrt.verify(digits, path, only=["start"])
    assert result.policy_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert result.model_sha256 == hashlib.sha256(Path(digits).read_bytes()).hexdigest()
