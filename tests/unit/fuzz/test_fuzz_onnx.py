# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Damaged and hostile ONNX models: reading, planning, converting and making up inputs give a result or our errors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import onnx
import pytest
from fuzzing import NUMBERS, TEXTS, cases, expect_ours, flip_bytes
from onnx import helper, parser

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_bytes, inspect_model
from xpuruntime.engines.precision import convert, probe_feeds
from xpuruntime.engines.registry import default_registry
from xpuruntime.runtime.snapshot import machine_snapshot
from xpuruntime.testing import models

if TYPE_CHECKING:
    import random
    from pathlib import Path

_LOCAL = """
<ir_version: 8, opset_import: ["" : 17, "my" : 1]>
g (float[N, 4] x, bool c) => (float[N, 4] y) {
  a = my.Twice (x)
  y = If (c) <
    then_branch = t () => (float[N, 4] r) { r = Relu (a) },
    else_branch = e () => (float[N, 4] s) { s = Neg (x) }
  >
}
<domain: "my", opset_import: ["" : 17]>
Twice (v) => (w) { two = Constant <value = float {2.0}> () w = Mul (v, two) }
"""
_QUANTIZED = """
<ir_version: 8, opset_import: ["" : 17]>
g (float[N, 4] x) => (float[N, 4] y) <float scale = {0.1}, int8 zero = {0}> {
  q = QuantizeLinear (x, scale, zero)
  d = DequantizeLinear (q, scale, zero)
  y = Softmax <axis = -1> (d)
}
"""


#: Policies that look at a model in different ways.
POLICIES: tuple[dict[str, Any], ...] = (
    {},
    {"mode": "strict", "execution": {"precision": "fp16", "engine": "onnxruntime"}},
    {"execution": {"engine": "openvino"}, "kernels": {"attention": "flash_v2"}},
    {"kernels": {"rules": [{"match": {"op": "matmul", "k": 8}, "use": "cpu.blas"}]}, "execution": {"engine": "null"}},
)


def seeds() -> list[onnx.ModelProto]:
    """Return sound models of different kinds."""
    return [
        models.mlp(),
        models.conv(),
        models.two_inputs(),
        models.island(),
        models.attention(2, 8, 8),
        parser.parse_model(_LOCAL),
        parser.parse_model(_QUANTIZED),
    ]


@pytest.fixture(scope="module")
def sound() -> list[bytes]:
    strings = [model.SerializeToString() for model in seeds()]
    for data in strings:
        inspect_bytes(data)
    return strings


def change(message: Any, rng: random.Random) -> None:
    """Change one field somewhere in a protobuf message."""
    spots: list[tuple[Any, Any]] = []
    waiting = [message]
    while waiting:
        one = waiting.pop()
        for field, value in one.ListFields():
            spots.append((one, field))
            if field.message_type is not None:
                waiting.extend(value if field.is_repeated else [value])
    holder, field = rng.choice(spots)
    name = field.name
    if field.is_repeated:
        values = getattr(holder, name)
        kind = rng.randrange(4)
        if kind == 0:
            del values[rng.randrange(len(values))]
        elif kind == 1:
            count = rng.choice((1, 3, 200))
            values.extend([values[rng.randrange(len(values))] for _ in range(count)])
        elif field.message_type is not None:
            change(values[rng.randrange(len(values))], rng) if values[0].ListFields() else values.add()
        else:
            values[rng.randrange(len(values))] = other(field, rng)
    elif field.message_type is not None:
        holder.ClearField(name)
    else:
        setattr(holder, name, other(field, rng))


def other(field: Any, rng: random.Random) -> Any:
    """Return another value for a scalar field of protobuf."""
    kind = field.cpp_type
    if kind == field.CPPTYPE_STRING:
        text = rng.choice(TEXTS)
        return text.encode() if field.type == field.TYPE_BYTES else text
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice((0.0, -1.0, float("nan"), float("inf"), 1e38))
    if kind == field.CPPTYPE_ENUM:
        return rng.choice([value.number for value in field.enum_type.values])
    number = rng.choice(NUMBERS)
    return number if kind in (field.CPPTYPE_INT64, field.CPPTYPE_UINT64) and number >= 0 else abs(number) % 2**31


def changed(data: bytes, rng: random.Random) -> bytes:
    """Return a model with a few fields or bytes changed."""
    if rng.random() < 0.3:
        return flip_bytes(data, rng)
    model = onnx.ModelProto.FromString(data)
    for _ in range(rng.randint(1, 3)):
        change(model, rng)
        if rng.random() < 0.2:
            hostile(model, rng)
        if not model.ListFields():
            break
    return model.SerializeToString()


def hostile(model: onnx.ModelProto, rng: random.Random) -> None:
    """Put something in that no exporter writes."""
    kind = rng.randrange(5)
    if kind == 0:
        tensor = onnx.TensorProto(
            name="w", data_type=rng.randrange(30), dims=[rng.choice(NUMBERS)] * rng.choice((1, 3, 2000))
        )
        tensor.data_location = 1
        for key in ("location", "offset", "length"):
            tensor.external_data.add(key=key, value=rng.choice((*TEXTS, "m.onnx", "5", "-5")))
        model.graph.initializer.append(tensor)
    elif kind == 1:
        model.metadata_props.add(key=rng.choice(("xpuruntime.policy", "xpuruntime.lock", "")), value=rng.choice(TEXTS))
    elif kind == 2:
        name = rng.choice(TEXTS)
        model.functions.append(
            helper.make_function("my", name, ["a"], ["b"], [helper.make_node(name, ["a"], ["b"], domain="my")], [])
        )
    elif kind == 3:
        value = model.graph.input.add(name=rng.choice(TEXTS))
        for _ in range(rng.choice((0, 2, 70, 2000))):
            value.type.tensor_type.shape.dim.add(dim_value=rng.choice(NUMBERS))
        value.type.tensor_type.elem_type = rng.randrange(30)
    else:
        for _ in range(300):
            model.graph.node.add(op_type="Relu", input=["x"], output=[rng.choice(TEXTS)])


def test_models(sound: list[bytes], tmp_path: Path) -> None:
    machine = machine_snapshot(default_registry().engines())
    path = tmp_path / "m.onnx"
    for seed, rng in cases():
        data = changed(rng.choice(sound), rng)
        path.write_bytes(data)
        info = expect_ours(seed, lambda: inspect_model(path))
        policy = rng.choice(POLICIES)
        expect_ours(seed, lambda policy=policy: xrt.plan(path, device="cpu", machine=machine, policy=policy), Warning)
        if info is not None:
            expect_ours(seed, lambda info=info: probe_feeds(info))
            expect_ours(seed, lambda info=info, rng=rng: convert(info, rng.choice(("fp16", "bf16"))))


def test_sessions_on_the_null_engine(sound: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"

    def use() -> None:
        with xrt.InferenceSession(path, device="cpu", engine="null") as session:
            session.run(probe_feeds(session.model))
            str(session.plan), session.plan.to_json(), str(session.explain(runs=1)), session.explain(runs=1).to_html()

    for seed, rng in cases():
        path.write_bytes(changed(rng.choice(sound), rng))
        expect_ours(seed, use, Warning)
