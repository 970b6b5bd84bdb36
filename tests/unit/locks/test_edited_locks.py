# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Edited locks whose digest fits and whose records agree: refused; and locks of measured kernels."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import onnx
import pytest
from locked_cases import Case, make_case
from onnx import parser

import xpuruntime as xrt
from xpuruntime.lockfile.records import CallEntry, Identity
from xpuruntime.lockfile.rules import locked_policy
from xpuruntime.serving.models.service import Models
from xpuruntime.serving.models.settings import ServeSettings
from xpuruntime.testing import models

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture(scope="module")
def ort(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return make_case("onnxruntime", tmp_path_factory.mktemp("ort"))


def of_plain(change: Callable[[Any], None]) -> Callable[[Identity], Identity]:
    """Return an edit of an identity as plain values."""

    def edit(identity: Identity) -> Identity:
        plain = msgspec.to_builtins(identity)
        change(plain)
        return msgspec.convert(plain, Identity)

    return edit


#: Edits, and what opening a session says of each.
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "outputs are gone": (lambda it: it.update(outputs=[]), "output y: expected no such output, found float32"),
    "format of the model": (
        lambda it: it["model"].update(format="pt2"),
        "model model.onnx: expected format pt2, found",
    ),
    "shapes of another model": (
        lambda it: it["shapes"][0]["inputs"].update(x=[2, 65]),
        r"shapes s0: expected x 2 65, found a model that does not run with them: .*64",
    ),
    "shapes without end": (
        lambda it: it["shapes"][0]["inputs"].update(x=[10**15, 64]),
        r"shapes s0: expected x 1000000000000000 64, found a model that does not run with them: .*GiB",
    ),
    "a policy that is none": (
        lambda it: it["policy"]["document"].update(mode="stricter"),
        "is none: policy: mode: ",
    ),
    "a fact that was not there": (
        lambda it: next(validator for validator in it["validators"] if validator["kind"] == "package").update(
            expect=None
        ),
        "package xpuruntime: expected nothing, found .*Fix: make the lock again",
    ),
}
#: Edits that only an instrumented run can tell, and what a check says of each.
FOUND: dict[str, tuple[Callable[[Any], Any], str]] = {
    "sources of a unit": (lambda it: it["entries"][0].update(sources=["mm2"]), "fusion mm1"),
    "outputs of a unit": (lambda it: it["entries"][0].update(outputs=["q"]), "fusion mm1.*makes q, found .*makes "),
    "digest of the policy": (
        lambda it: it["policy"].update(sha256="0" * 64),
        "policy its digest: expected sha256 0",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_session_refuses(ort: Case, tmp_path: Path, name: str) -> None:
    edit, message = REFUSED[name]
    path = ort.edited(of_plain(edit), tmp_path)
    with pytest.raises(xrt.LockError, match=rf"(?s)edited\.lock .*{message}") as refused:
        ort.open(path)
    assert "Fix: " in str(refused.value)
    document = {"schema": "xpuruntime.serve/1", "models": {"m": {"source": str(ort.model), "lock": str(path)}}}
    served = Models(ServeSettings.coerce(document))
    try:
        served.start()
        good, reason = served.ready()
        assert not good
        assert "edited.lock" in reason
    finally:
        served.close(drain=0.0)


@pytest.mark.parametrize("name", FOUND)
def test_what_a_check_finds(ort: Case, tmp_path: Path, name: str) -> None:
    edit, message = FOUND[name]
    path = ort.edited(of_plain(edit), tmp_path)
    drifts = xrt.lock(ort.model, output=path, check=True).drifts
    assert any(re.match(message, str(drift)) for drift in drifts), drifts
    claims = xrt.verify(ort.model, lock=path, only=["evidence"]).claims
    assert [claim.verdict for claim in claims if claim.id.startswith("evidence.lock")] == ["fail"]


def test_without_outputs_none_are_claimed(tmp_path: Path) -> None:
    """A lock of a model whose inputs cannot be generated has no outputs, and says so."""
    body = parser.parse_model(
        '<ir_version: 9, opset_import: ["": 19]> g (string[2] x) => (string[2] y) { y = Identity(x) }'
    )
    onnx.save(body, tmp_path / "m.onnx")
    words = {"x": np.array(["a", "b"], object)}
    policy = {"execution": {"engine": "onnxruntime", "device": "cpu"}}
    lock = xrt.lock(tmp_path / "m.onnx", policy, tmp_path / "m.lock", inputs=words)
    assert lock.lock.identity.outputs == ()
    with xrt.InferenceSession(tmp_path / "m.onnx", lock=tmp_path / "m.lock") as session:
        control = next(control for control in session.plan.controls if control.key == "execution.lock")
        seen = {observation.key: observation for observation in session.explain(words, runs=1).observations}[
            "execution.lock"
        ]
    assert "no outputs are, since the lock has none" in control.reason
    assert "no outputs were compared, since the lock has none" in seen.reason


def test_a_locked_policy_leaves_no_choice() -> None:
    policy = xrt.Policy.coerce(
        {
            "auto_strategy": "best_performance",
            "kernels": {
                "matmul": ["cpu.blas", "auto"],
                "layer_norm": "auto",
                "rules": [
                    {"match": {"node": "a"}, "use": "auto"},
                    {"match": {"node": "b"}, "use": "auto", "precision": "fp32"},
                    {"match": {"node": "c"}, "use": ["cpu.reference", "auto"]},
                ],
            },
        }
    )
    call = CallEntry(op="matmul", dtype="fp32", node="a", kernel="cpu.blas")
    kernels = locked_policy(policy, "onnxruntime", "cpu", (call,)).kernels
    assert kernels.auto_strategy == "first_supported"
    assert (kernels.matmul, kernels.layer_norm) == (("cpu.blas",), None)
    assert [(rule.match.node, rule.use, rule.precision) for rule in kernels.rules] == [
        ("a", "cpu.blas", None),
        ("b", None, "fp32"),
        ("c", ("cpu.reference",), None),
    ]


def test_the_first_that_works_is_no_measurement() -> None:
    policy = xrt.Policy.coerce({"kernels": {"matmul": "auto"}})
    assert locked_policy(policy, "onnxruntime", "cpu", ()).kernels.matmul == policy.kernels.matmul


def test_a_session_under_the_lock_runs_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", str(tmp_path / "tuning.json"))
    model, path = models.save(models.mlp(), tmp_path), tmp_path / "m.lock"
    policy = {
        "auto_strategy": "best_performance",
        "execution": {"engine": "onnxruntime", "device": "cpu"},
        "kernels": {"matmul": "auto"},
    }
    lock = xrt.lock(model, policy, path, shapes={"x": (2, 64)}).lock
    monkeypatch.setenv("XPURUNTIME_TUNING_CACHE", str(tmp_path / "empty.json"))
    with xrt.InferenceSession(model, lock=path) as session:
        report = session.explain()
    ran = {node: decision.kernel for decision in report.decisions for node in decision.nodes if decision.chosen}
    assert ran == {call.node: call.kernel for call in lock.identity.calls}
    assert not (tmp_path / "empty.json").exists()
