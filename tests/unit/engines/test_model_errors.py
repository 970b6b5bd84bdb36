# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`inspect_model` on everything that is no sound model: each error names the path, the reason and the fix."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import tarfile
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import onnx
import precision_models as zoo
import pytest
from onnx import helper, numpy_helper, parser

import xpuruntime as xrt
from xpuruntime.engines.model import inspect_bytes, inspect_model
from xpuruntime.errors import ModelError, XpuRuntimeError


def refused(path) -> str:
    """Return the message; check what every message must hold."""
    with pytest.raises(ModelError) as caught:
        inspect_model(path)
    text = str(caught.value)
    assert isinstance(caught.value, XpuRuntimeError)
    assert isinstance(caught.value, ValueError)
    assert repr(str(path)) in text
    assert "Fix: " in text
    assert text.endswith(".")
    return text


def refused_model(model) -> str:
    with pytest.raises(ModelError) as caught:
        inspect_bytes(model)
    assert "Fix: " in str(caught.value)
    return str(caught.value)


def test_missing_file_lists_the_models_beside_it(tmp_path):
    zoo.save(zoo.mlp(), tmp_path / "digits.onnx")
    text = refused(tmp_path / "digit.onnx")
    assert "no such file" in text
    assert f"Fix: name '{tmp_path / 'digits.onnx'}'" in text
    assert "the folder holds 'digits.onnx'" in refused(tmp_path / "other.onnx")


def test_directory_names_a_file_in_it(tmp_path):
    assert "it is a directory" in refused(tmp_path)
    zoo.save(zoo.mlp(), tmp_path / "a.onnx")
    assert "a.onnx" in refused(tmp_path)


def test_empty_file(tmp_path):
    (tmp_path / "m.onnx").touch()
    assert "the file is empty" in refused(tmp_path / "m.onnx")


def test_dangling_link(tmp_path):
    (tmp_path / "m.onnx").symlink_to("gone.onnx")
    assert "'gone.onnx', which does not exist" in refused(tmp_path / "m.onnx")


def test_pipe_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "m.onnx")
    assert "not a regular file" in refused(tmp_path / "m.onnx")


@pytest.mark.parametrize("path", ["a\0b.onnx", "x" * 5000])
def test_impossible_paths(path):
    assert "cannot be read" in refused(path)


@pytest.mark.parametrize("thing", [None, 5, {}, ["m.onnx"], object()])
def test_a_model_is_given_as_a_path(thing):
    with pytest.raises(ModelError, match=f"not as {type(thing).__name__}"):
        inspect_model(thing)


def _zip(*names):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    return buffer.getvalue()


def _npz():
    buffer = io.BytesIO()
    np.savez(buffer, a=np.zeros(3))
    return buffer.getvalue()


def _npy():
    buffer = io.BytesIO()
    np.save(buffer, np.zeros(3))
    return buffer.getvalue()


def _tar():
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("model.onnx"))
    return buffer.getvalue()


def _safetensors():
    head = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(head).to_bytes(8, "little") + head + b"\0" * 4


LOOKS = {
    "PNG": b"\x89PNG\r\n\x1a\n" + b"\0" * 50,
    "JPEG": b"\xff\xd8\xff\xe0" + b"\0" * 50,
    "PDF": b"%PDF-1.7\n",
    "gzip": gzip.compress(b"model"),
    "PyTorch checkpoint": _zip("archive/data.pkl", "archive/data/0"),
    "NumPy archive": _npz(),
    "ZIP archive": _zip("model.json"),
    r"\.npy": _npy(),
    "pickle": pickle.dumps({"a": 1}),
    "safetensors": _safetensors(),
    "GGUF": b"GGUF\x03\0\0\0" + b"\0" * 20,
    "HDF5": b"\x89HDF\r\n\x1a\n" + b"\0" * 20,
    "TensorFlow Lite": b"\x1c\0\0\0TFL3" + b"\0" * 20,
    "ORT-format": b"\x20\0\0\0ORTM" + b"\0" * 20,
    "TensorRT engine": b"ptrt" + b"\0" * 20,
    "JSON": b'{"graph": {}}',
    "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
    "OpenVINO IR": b'<?xml version="1.0"?><net name="m"></net>',
    "textual form of ONNX": b'<ir_version: 8, opset_import: ["": 17]> g (float[1] x) => (float[1] y) { y = Relu(x) }',
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n",
    "tar archive": _tar(),
    "ELF": b"\x7fELF\x02\x01\x01" + b"\0" * 60,
}


@pytest.mark.parametrize("what", sorted(LOOKS))
def test_other_files_are_recognised(tmp_path, what):
    (tmp_path / "m.onnx").write_bytes(LOOKS[what])
    with pytest.raises(ModelError, match=f"looks like .*{what}.* Fix: "):
        inspect_model(tmp_path / "m.onnx")


@pytest.mark.parametrize("data", [b"plain text\n", bytes(range(256)), b"\0" * 100, b"\xff" * 100])
def test_bytes_that_are_nothing_known(tmp_path, data):
    (tmp_path / "m.onnx").write_bytes(data)
    text = refused(tmp_path / "m.onnx")
    assert "not ONNX" in text or "not an ONNX model" in text


def test_a_cut_model_says_what_is_missing(tmp_path):
    data = zoo.mlp().SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data[: len(data) // 2])
    text = refused(tmp_path / "m.onnx")
    assert "truncated: the graph needs" in text
    assert "download it again" in text


def test_no_graph_and_no_outputs():
    model = zoo.mlp()
    del model.graph.output[:]
    assert "no outputs" in refused_model(model)
    bare = onnx.ModelProto(ir_version=8, producer_name="x")
    assert "no graph" in refused_model(bare)


def test_invalid_graph_names_the_node():
    model = zoo.mlp()
    model.graph.node[1].input.append("x")
    text = refused_model(model)
    assert "graph is invalid" in text
    assert "act" in text


def test_dangling_input_and_cycle():
    model = zoo.mlp()
    model.graph.node[1].input[0] = "nobody"
    assert "'nobody'" in refused_model(model)
    model = zoo.mlp()
    model.graph.node[0].input[0] = "g"
    assert "graph is invalid" in refused_model(model)


def test_newer_ir_and_opset_say_what_is_known():
    model = zoo.mlp()
    model.ir_version = 99
    assert f"IR version is 99, and onnx {onnx.__version__} knows up to {onnx.IR_VERSION}" in refused_model(model)
    model = zoo.mlp(opset=17)
    model.opset_import[0].version = 999
    text = refused_model(model)
    assert "opset 999" in text
    assert "pip install -U onnx" in text


def unknown(model) -> str:
    """Return what is said of operators that the standard has not: other engines may have them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        onnx.save(model, path)
        inspect_model(path)
        with pytest.raises(xrt.UnsupportedOperationError, match="op_unsupported: unknown operator") as caught:
            xrt.plan(path, device="cpu", engine="onnxruntime")
    return str(caught.value)


def test_unknown_operators_are_all_listed_with_the_nearest_name():
    model = parser.parse_model("""<ir_version: 8, opset_import: ["": 13]>
    g (float[2,4] x, float[4] s) => (float[2,4] y) {
        [near] a = Softmx(x)
        [late] b = GroupNormalization<num_groups=1>(a, s, s)
        y = Frobnicate(b) }""")
    text = unknown(model)
    assert "Softmx" in text
    assert "did you mean 'Softmax'?" in text
    assert "'near'" in text
    assert "GroupNormalization (first in opset 18, and the model imports 13" in text
    assert "Frobnicate" in text


def test_domain_without_an_opset_import():
    model = zoo.mlp()
    model.graph.node[1].domain = "com.microsoft"
    assert inspect_bytes(model).notes == ("the domain 'com.microsoft' is used and not imported",)


def test_duplicate_tensors_name_both_makers():
    model = zoo.mlp()
    model.graph.node[2].output[0] = "h"
    model.graph.node[3].input[0] = "h"
    text = refused_model(model)
    assert "'h' is made twice" in text
    assert "'fc1'" in text
    assert "'fc2'" in text
    model = zoo.mlp()
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(3, np.float32), "b1"))
    assert inspect_bytes(model).notes == ("tensor 'b1' is defined by two initializers; engines take the last",)
    model = zoo.mlp()
    model.graph.node[0].output[0] = "x"
    assert "a graph input" in refused_model(model)


def test_weights_shorter_than_their_shape():
    model = zoo.mlp()
    tensor = model.graph.initializer[0]
    tensor.raw_data = tensor.raw_data[:-4]
    text = refused_model(model)
    assert "'w1' (float[32, 16]) holds 2044 bytes, and needs 2048" in text


def test_more_than_two_gib_points_to_external_data(tmp_path):
    path = tmp_path / "m.onnx"
    with path.open("wb") as file:  # sparse: takes no room
        file.write(zoo.mlp().SerializeToString())
        file.truncate((1 << 31) + 10)
    text = refused(path)
    assert "2 GiB" in text
    assert "save_as_external_data=True" in text


def _field(number, data):
    """Encode one length-delimited protobuf field."""
    size, text = len(data), b""
    while size > 127:
        text += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + text + bytes([size]) + data


@pytest.mark.parametrize("depth", [20, 30, 200, 20000])
def test_deep_nesting_is_refused_not_crashed(tmp_path, depth):
    graph = b""
    for _ in range(depth):
        attribute = _field(1, b"then_branch") + b"\xa0\x01\x05" + _field(6, graph)
        graph = _field(1, _field(4, b"If") + _field(1, b"c") + _field(2, b"o") + _field(5, attribute))
    output = _field(12, helper.make_tensor_value_info("o", 1, [1]).SerializeToString())
    opset = _field(8, b"\x10\x11")
    (tmp_path / "m.onnx").write_bytes(b"\x08\x08" + _field(7, graph + _field(2, b"g") + output) + opset)
    refused(tmp_path / "m.onnx")
