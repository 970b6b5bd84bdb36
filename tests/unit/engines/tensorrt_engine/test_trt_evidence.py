# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The engine inspector's documents, in the forms that the vendor documents, and their join to source nodes."""

from __future__ import annotations

import json
from typing import Any

import pytest

from xpuruntime.engines.model.facts import NodeInfo
from xpuruntime.engines.tensorrt.network import layer_nodes
from xpuruntime.engines.tensorrt.observing import SourceModel, attribute_units, read_engine
from xpuruntime.errors import EngineError

#: TensorRT 10, built with detailed verbosity: ``Format/Datatype`` in one field, ``Bindings`` as names.
TEN = {
    "Layers": [
        {
            "Name": "Reformatting CopyNode for Input Tensor 0 to conv1 + relu1",
            "LayerType": "Reformat",
            "Inputs": [{"Name": "x", "Dimensions": [2, 3, 32, 32], "Format/Datatype": "Row major linear FP32 format"}],
            "Outputs": [
                {
                    "Name": "Reformatted Input Tensor 0 to conv1 + relu1",
                    "Location": "Device",
                    "Dimensions": [2, 3, 32, 32],
                    "Format/Datatype": "Channel major FP16 format where channel % 8 == 0",
                }
            ],
            "ParameterType": "Reformat",
            "Origin": "REFORMAT",
            "TacticValue": "0x00000000000003e8",
            "StreamId": 0,
            "Metadata": "",
        },
        {
            "Name": "conv1 + relu1",
            "LayerType": "CaskConvolution",
            "Inputs": [
                {
                    "Name": "Reformatted Input Tensor 0 to conv1 + relu1",
                    "Dimensions": [2, 3, 32, 32],
                    "Format/Datatype": "Channel major FP16 format where channel % 8 == 0",
                }
            ],
            "Outputs": [
                {
                    "Name": "r1",
                    "Dimensions": [2, 16, 32, 32],
                    "Format/Datatype": "Channel major FP16 format where channel % 8 == 0",
                }
            ],
            "ParameterType": "Convolution",
            "Weights": {"Type": "Half", "Count": 432},
            "HasBias": 0,
            "Activation": "RELU",
            "TacticName": "sm80_xmma_fprop_implicit_gemm_f16f16_f16f16_f16_nhwckrsc_nhwc_tilesize128x32x32",
            "TacticValue": "0x9cb304e2edbc1221",
            "StreamId": 0,
            "Metadata": "[ONNX Layer: conv1]\u001e[ONNX Layer: relu1]",
        },
        {
            "Name": "PWN(add)",
            "LayerType": "PointWiseV2",
            "Inputs": [{"Name": "c2", "Dimensions": [2, 16, 32, 32], "Format/Datatype": "N/A due to dynamic shapes"}],
            "Outputs": [{"Name": "a", "Dimensions": [2, 16, 32, 32], "Format/Datatype": "N/A due to dynamic shapes"}],
            "TacticValue": "0x0000000000000001",
        },
    ],
    "Bindings": ["x", "logits"],
}

#: TensorRT 11 and TensorRT-RTX: format and type apart, ``I/O Tensors`` as objects.
ELEVEN = {
    "Layers": [
        {
            "Name": "__myl_ConvRelu_myl0_1",
            "LayerType": "conv",
            "Inputs": [
                {"Name": "x", "Dimensions": [2, 3, 32, 32], "Format": "kLINEAR", "Datatype": "Int8"},
            ],
            "Outputs": [{"Name": "r1", "Dimensions": [2, 16, 32, 32], "Format": "kCHW32", "Datatype": "Half"}],
            "TacticName": "sm86_xmma_fprop_i8f16",
            "Metadata": "[ONNX Layer: conv1]\u001f[ONNX Layer: relu1]",
        },
        {
            "Name": "__myl_Add_myl0_2",
            "LayerType": "kgen",
            "TacticName": "__myl_Add_0x1",
            "Metadata": "[ONNX Layer: add]",
        },
    ],
    "I/O Tensors": [
        {
            "Name": "x",
            "IOMode": "Input",
            "DataType": "Float",
            "Dimensions": [2, 3, 32, 32],
            "Location": "Device",
            "IsShapeInferenceIO": False,
            "ProfileInfo": [{"MinShape": [2, 3, 32, 32], "OptShape": [2, 3, 32, 32], "MaxShape": [2, 3, 32, 32]}],
        }
    ],
}

NODES = tuple(
    NodeInfo(name=name, op=op, domain="", inputs=(), outputs=(output,))
    for name, op, output in (
        ("conv1", "Conv", "c1"),
        ("relu1", "Relu", "r1"),
        ("add", "Add", "a"),
        ("shape", "Shape", "s"),
    )
)
TYPES = {"c1": "fp32", "r1": "fp32", "a": "fp32", "s": "int64"}
SOURCE = SourceModel(
    nodes=NODES,
    types=TYPES,
    parsed={node.name: (node.name,) for node in NODES},
    layers={node.name: (node.name,) for node in NODES},
)


def joined(document: Any, times: Any = None, source: SourceModel = SOURCE, **more: Any) -> Any:
    """Read and join a document."""
    layers = read_engine(json.dumps(document))
    return attribute_units(layers, times or {}, source, engine="tensorrt", device="cuda:0", **more)


def once(units: Any) -> None:
    """Every source node is in exactly one unit."""
    assert sorted(name for unit in units for name in unit.source_nodes) == sorted(node.name for node in NODES)


def test_ten() -> None:
    found = joined(TEN, {"conv1 + relu1": [12.0, 10.0, 11.0]}, precision="fp16")
    once(found.units)
    move, conv, add, shape = found.units
    assert (move.relation, move.source_nodes, move.precision_run, move.layout) == ("inserted", (), "fp32->fp16", "nhwc")
    assert (conv.relation, conv.op, conv.outputs) == ("fused", "CaskConvolution", ("r1",))
    assert (conv.precision_requested, conv.precision_run, conv.layout) == ("fp16", "fp16", "nhwc")
    assert conv.kernel is not None
    assert (conv.kernel[:15], conv.kernel_source) == ("sm80_xmma_fprop", "reported")
    assert (conv.time.value, conv.time.unit, conv.time.runs) == (11.0, "us", 3)
    assert (add.relation, add.source_nodes, add.precision_run, add.kernel_source) == (
        "exact",
        ("add",),
        None,
        "unknown",
    )
    assert (shape.relation, shape.device) == ("folded", "none")
    assert [(b.kind, b.where) for b in found.boundaries] == [("cast", move.id)]


def test_eleven_and_rtx() -> None:
    found = joined(ELEVEN, precision="int8")
    once(found.units)
    conv, add, _ = found.units
    assert (conv.relation, conv.precision_requested, conv.precision_run) == ("fused", "int8", "int8->fp16")
    assert conv.layout == "nchw32c"
    assert (add.op, add.kernel) == ("kgen", "__myl_Add_0x1")
    assert not found.boundaries


def test_names_only() -> None:
    found = joined({"Layers": ["Reformat 1", "conv1 + relu1", "PWN(add)"], "Bindings": []})
    once(found.units)
    assert [unit.source_nodes for unit in found.units] == [(), ("conv1", "relu1"), ("add",), ("shape",)]
    assert "profiling_verbosity: detailed" in found.notes[0]


def test_a_layer_that_does_not_say_what_is_inside() -> None:
    layers = [TEN["Layers"][1], {"Name": "{ForeignNode[add...shape]}", "LayerType": "Myelin", "TacticValue": "0x0"}]
    found = joined({"Layers": layers, "Bindings": []})
    once(found.units)
    assert (found.units[1].relation, found.units[1].source_nodes) == ("opaque", ("add", "shape"))
    assert "2 nodes are accounted for at" in found.notes[0]


def test_a_node_in_two_layers_counts_once() -> None:
    layers = [
        {"Name": "copy", "LayerType": "Reformat", "Metadata": "[ONNX Layer: add]"},
        {"Name": "first", "LayerType": "kgen", "Metadata": "[ONNX Layer: add]"},
        {"Name": "second", "LayerType": "kgen", "Metadata": "[ONNX Layer: add][ONNX Layer: relu1]"},
    ]
    found = joined({"Layers": layers})
    once(found.units)
    assert [(u.source_nodes, u.serves) for u in found.units[:3]] == [
        ((), ("add",)),
        (("add",), ()),
        (("relu1",), ("add",)),
    ]


def test_a_node_that_only_a_copy_carries_out() -> None:
    found = joined({"Layers": [{"Name": "add copy", "LayerType": "Reformat", "Metadata": "[ONNX Layer: add]"}]})
    once(found.units)
    assert (found.units[0].relation, found.units[0].source_nodes) == ("exact", ("add",))
    assert not found.boundaries


def test_quantized_graphs_are_told_in_source_nodes() -> None:
    parsed = {**SOURCE.parsed, "conv1_quant": ("conv1", "relu1")}
    layers = [
        {"Name": "l", "LayerType": "conv", "Metadata": "[ONNX Layer: x_QuantizeLinear]\u001e[ONNX Layer: conv1_quant]"}
    ]
    found = joined({"Layers": layers}, source=SOURCE._replace(parsed=parsed))
    once(found.units)
    assert found.units[0].source_nodes == ("conv1", "relu1")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("[ONNX Layer: a]", ("a",)),
        ("[ONNX Layer: a]\u001e[ONNX Layer: b]\u001f[ONNX Layer: a]", ("a", "b")),
        ("[ONNX Layer: a]\n[ONNX Layer: b]", ("a", "b")),
        ("[ONNX Layer: a][ONNX Layer: c[0]]", ("a", "c[0]")),
        ("[ONNX Layer: /block/d]", ("/block/d",)),
        ("[ONNX Layer: inserted cast]", ()),
        ("", ()),
        (None, ()),
    ],
)
def test_metadata(text: str | None, names: tuple[str, ...]) -> None:
    known = {name: (name,) for name in ("a", "b", "c[0]", "/block/d")}
    assert layer_nodes(text, known) == names


@pytest.mark.parametrize(
    ("text", "dtype", "layout"),
    [
        ("Row major linear FP32 format", "fp32", "nchw"),
        ("Row major linear FP16 format", "fp16", "nchw"),
        ("Row major linear INT8 format", "int8", "nchw"),
        ("Thirty-two wide channel vectorized row major Int8 format", "int8", "nchw32c"),
        ("Two wide channel vectorized row major FP16 format", "fp16", "nchw2c"),
        ("Channel major FP16 format where channel % 8 == 0", "fp16", "nhwc"),
        ("Half", "fp16", None),
        ("Float", "fp32", None),
        ("BFloat16", "bf16", None),
        ("Int64", "int64", None),
        ("UInt8", "uint8", None),
        ("Bool", "bool", None),
        ("FP8", "fp8", None),
        ("N/A due to dynamic shapes", None, None),
    ],
)
def test_words_for_types_and_formats(text: str, dtype: str | None, layout: str | None) -> None:
    layer = {"Name": "l", "Inputs": [{"Name": "t", "Dimensions": [1, 2, 3, 4], "Format/Datatype": text}]}
    seen = read_engine(json.dumps({"Layers": [layer]}))[0].inputs[0]
    assert (seen.dtype, seen.layout) == (dtype, layout)


@pytest.mark.parametrize("text", ["", "no JSON", "[]", "{}", '{"Layers": 1}'])
def test_answers_that_are_none(text: str) -> None:
    with pytest.raises(EngineError, match="inspector"):
        read_engine(text)
