# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reasons out of recorded text, as onnxruntime-qnn 2.7.0 wrote it."""

from __future__ import annotations

import json

import pytest

import xpuruntime as xrt
from xpuruntime.engines.qnn.loading import (
    RejectedNode,
    faults_in_log,
    plain_name,
    refusal,
    rejected_in_log,
    rejected_in_trace,
)

_LOG = """\
2026-11-21 03:49:50.461297763 [V:onnxruntime:, qnn_execution_provider.cc:1713 LogNodeSupport] Validation PASSED for 1 nodes in OrtNodeUnit (MatMul) :
\tOperator type: MatMul Node name: mm Node index: 0

2026-11-21 03:49:50.461324173 [V:onnxruntime:, qnn_execution_provider.cc:1713 LogNodeSupport] Validation FAILED for 1 nodes in OrtNodeUnit (Celu) :
\tOperator type: Celu Node name: celu_token_3 Node index: 1
\tREASON : Operators of type `Celu` are not supported by QNN EP.Celu node `celu` will not be assigned to QNN EP.

2026-11-21 03:49:50.461329430 [V:onnxruntime:, qnn_execution_provider.cc:1713 LogNodeSupport] Validation FAILED for 2 nodes in QDQ group (Relu) :
\tOperator type: DequantizeLinear Node name: dq Node index: 2
\tOperator type: Relu Node name: relu Node index: 3
\tREASON : Cannot get shape

\x1b[1;31m2026-11-21 03:49:50.461350292 [E:onnxruntime:, qnn_execution_provider.cc:2453 GetCapabilityImpl] Unsupported nodes in QNN EP: { name: celu_token_3, type: Celu }{ name: alone, type: Erf }, \x1b[m
\x1b[1;31m2026-11-21 03:51:22.529531706 [E:onnxruntime:, qnn_execution_provider.cc:2290 GetCapabilityImpl] QNN SetupBackend failed Failed to create device. Error: QNN_DEVICE_ERROR_INVALID_CONFIG: Invalid config values\x1b[m
\x1b[1;31m2026-11-21 03:51:22.529539928 [E:onnxruntime:, ep_plugin_provider_interfaces.cc:279 GetCapability] OrtEp::GetCapability() for QNNExecutionProvider failed with error: QNN SetupBackend failed\x1b[m
\x1b[1;31m2026-11-21 03:49:50.518582508 [E:onnxruntime:, inference_session.cc:3181 operator()] This session contains graph nodes that are assigned to the default CPU EP, but fallback to CPU EP has been explicitly disabled by the user.\x1b[m
"""  # noqa: E501
_UNSUPPORTED = "Operators of type `Celu` are not supported by QNN EP"


def test_nodes_and_reasons_in_a_log() -> None:
    assert rejected_in_log(_LOG) == [
        RejectedNode(name="celu", op="Celu", reason=_UNSUPPORTED),
        RejectedNode(name="dq", op="DequantizeLinear", reason="Cannot get shape"),
        RejectedNode(name="relu", op="Relu", reason="Cannot get shape"),
        RejectedNode(name="alone", op="Erf", reason="QNN gives no reason"),
    ]


def test_faults_in_a_log_are_causes_only() -> None:
    assert faults_in_log(_LOG) == [
        "QNN SetupBackend failed Failed to create device. Error: QNN_DEVICE_ERROR_INVALID_CONFIG: Invalid config values"
    ]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"unsupported_nodes": [{}]}', '{"unsupported_nodes": 3}'])
def test_a_damaged_trace_tells_nothing(text: str) -> None:
    assert rejected_in_trace(text) == []


def test_nodes_and_reasons_in_a_trace() -> None:
    reason = f"{_UNSUPPORTED}.Celu node `celu` will not be assigned to QNN EP."
    nodes = [
        {"node_index": 1, "node_name": "celu", "op_type": "Celu", "reason": reason},
        {"node_index": 2, "node_name": "relu_token_9", "op_type": "Relu", "reason": ""},
    ]
    assert rejected_in_trace(json.dumps({"unsupported_nodes": nodes})) == [
        RejectedNode(name="celu", op="Celu", reason=_UNSUPPORTED),
        RejectedNode(name="relu", op="Relu", reason="QNN gives no reason"),
    ]


@pytest.mark.parametrize(
    ("name", "plain"),
    [("conv1_token_1", "conv1"), ("r/duplicated", "r"), ("a_token_2/duplicated", "a"), ("my_token", "my_token")],
)
def test_plain_name(name: str, plain: str) -> None:
    assert plain_name(name) == plain


def test_the_refusal_names_nodes_reasons_and_fixes() -> None:
    error = refusal(rejected_in_log(_LOG), [], label="m.onnx", where="SM8650")
    assert isinstance(error, xrt.UnsupportedOperationError)
    text = str(error)
    assert f"celu (Celu): {_UNSUPPORTED}" in text
    assert "execution.allow_cpu_ops: [Celu, DequantizeLinear, Erf, Relu]" in text
    assert "execution.shapes" in text


def test_nodes_that_fail_in_the_graph_are_not_said_to_fit_on_the_cpu() -> None:
    rejected = [RejectedNode(name="Exp:pitch", op="Exp", reason="Failed to add node")]
    text = str(refusal(rejected, [], label="m.onnx", where="SM8650", composing=True))
    assert "Exp:pitch (Exp): Failed to add node" in text
    assert "allow_cpu_ops cannot leave them to the CPU" in text
    assert "Replace them" in text
    assert "To let them run" not in text


def test_without_nodes_it_is_the_engine() -> None:
    error = refusal([], ["QNN SetupBackend failed"], label="m.onnx", where="SM8650")
    assert isinstance(error, xrt.EngineError)
    assert "QNN SetupBackend failed" in str(error)
    assert "gave no reason" in str(refusal([], [], label="m", where="w"))
