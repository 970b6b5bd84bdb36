# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls that the override did not decide, under rules by each fact: requested and bypassed, never "nothing asked"."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.policies.call_facts import UNKNOWN

torch = pytest.importorskip("torch")
pytest.importorskip("xpuruntime.pytorch")

from xpuruntime.pytorch.dispatch import context  # noqa: E402 - it needs PyTorch
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.dispatch.route import facts_of_call  # noqa: E402
from xpuruntime.pytorch.explanation import call_recorder  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(
    ("match", "sure"),
    [
        ({"device": "sm90"}, True),
        ({"device": "cuda:0"}, True),
        ({"node": "net.*"}, True),
        ({"module": "net.head"}, True),
        ({"op": "attention", "dtype": "fp16", "phase": "infer"}, True),
        ({"op": "attention", "head_dim": "<=128"}, False),
        ({"device": "sm80"}, None),
        ({"node": "body.*"}, None),
        ({"op": "attention", "m": 4}, None),
    ],
)
def test_a_recorded_call_without_a_route_is_bypassed(monkeypatch, match, sure):
    """A rule by architecture or by node, which the recorder once left out of the facts of a call."""
    policy = xrt.Policy(kernels=xrt.KernelPolicy(rules=[{"match": match, "use": "cudnn"}]))
    monkeypatch.setattr(context, "_arch", lambda index: "sm90")
    held = CompiledPolicy(policy)
    monkeypatch.setattr(call_recorder, "active_policy", lambda: held)
    tensors = [torch.empty(2, 2, 4, 8, dtype=torch.float16, device="meta")]
    monkeypatch.setattr(call_recorder, "_device_of", lambda found: "cuda:0")
    seen = call_recorder.RecordedCalls(0, "sdpa", "attention", None, "net.head", "infer", tensors)
    if sure is None:
        assert (seen.asked, seen.source, seen.status) == ((), "default", "default")
        return
    assert (seen.asked, seen.source, seen.status) == (("cudnn",), "kernels.rules[0]", "bypassed")
    assert ("is not known" in seen.reason) is not sure


def test_facts_that_a_caller_does_not_know_are_unknown():
    facts = facts_of_call("matmul", device=None, dtype=None, phase=UNKNOWN, module="")
    assert {name for name, value in facts._asdict().items() if value is UNKNOWN} == {
        *("m", "n", "k", "dtype", "device", "arch", "phase"),
    }
    assert (facts.module, facts.node, facts.head_dim) == (None, None, None)
    known = facts_of_call("matmul", device="cpu", dtype=torch.bfloat16, phase="", module="a", sizes={"m": 1})
    assert (known.dtype, known.device, known.arch, known.node, known.m, known.k) == ("bf16", "cpu", None, "a", 1, None)
    assert facts_of_call("conv", device="cuda", dtype="fp16", phase="infer", module="").arch is UNKNOWN
