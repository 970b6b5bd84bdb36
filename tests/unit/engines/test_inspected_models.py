# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model that was checked is not checked again while its content, the packages and this code are the same."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import onnx
import precision_models as zoo
import pytest
from odd_models import ODD

import xpuruntime as xrt
from xpuruntime.engines.model import check as model_check
from xpuruntime.engines.model import info as model_info
from xpuruntime.engines.model import inspect_model
from xpuruntime.errors import ModelError, XpuRuntimeError
from xpuruntime.files import digests

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no private folders")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of the cache, which is empty."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(digests.VARIABLE, raising=False)
    return tmp_path / "cache" / "xpuruntime" / "models"


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the paths of the models that were checked."""
    paths: list[str] = []
    check = model_check.check_graph

    def counted(model, where, **how):
        paths.append(where)
        return check(model, where, **how)

    monkeypatch.setattr(model_check, "check_graph", counted)
    return paths


def strange() -> onnx.ModelProto:
    """Return a model with unnamed nodes out of order, an operator of an engine, a custom one, and metadata."""
    model = zoo.mlp()
    for node in model.graph.node:
        node.name = ""
    nodes = list(reversed(model.graph.node))
    del model.graph.node[:]
    model.graph.node.extend(nodes)
    result = model.graph.output[0].name
    model.graph.node.append(onnx.helper.make_node("Strange", [result], ["strange"], domain="com.example"))
    model.graph.node.append(onnx.helper.make_node("ScaledTanh", [result], ["scaled"]))
    model.graph.node.append(onnx.helper.make_node("RandomNormalLike", [result], ["random"]))
    model.metadata_props.add(key="author", value="someone")
    return model


@pytest.mark.parametrize("make", [zoo.mlp, zoo.encoder, strange])
def test_facts_are_the_same_without_a_check(kept, checks, tmp_path, make):
    path = zoo.save(make(), tmp_path / "m.onnx")
    first = inspect_model(path)
    again = inspect_model(path)
    assert again == first
    assert repr(again) == repr(first)
    assert again.facts() == first.facts()
    assert checks == [str(path)]
    copy = tmp_path / "folder" / "copy.onnx"
    copy.parent.mkdir()
    copy.write_bytes(Path(path).read_bytes())
    os.utime(copy, ns=(1, 1))
    other = inspect_model(copy)
    assert (other.path, other.base_dir, other.mtime_ns) == (str(copy), str(copy.parent), 1)
    assert other.nodes == first.nodes
    assert len(checks) == 1


def test_a_second_process_imports_no_onnx(kept, tmp_path):
    path = zoo.save(zoo.mlp(), tmp_path / "m.onnx")
    inspect_model(path)
    code = (
        "import sys; from xpuruntime.engines.model import inspect_model; info = inspect_model(sys.argv[1]); "
        "print(len(info.nodes), sorted(m for m in sys.modules if m.split('.')[0] in ('onnx', 'google')))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    assert done.stdout.split(maxsplit=1)[1].strip() in ("[]", "['google']")  # packages with .pth files make `google`


def test_other_content_is_checked(kept, checks, tmp_path):
    path = Path(zoo.save(zoo.mlp(), tmp_path / "m.onnx"))
    inspect_model(path)
    facts = path.stat()
    data = bytearray(path.read_bytes())
    at = data.index(b"float32") if b"float32" in data else len(data) // 2
    data[at : at + 4] = b"\xff" * 4
    path.write_bytes(data)
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    try:
        inspect_model(path)
    except ModelError:
        checks.append("refused")
    assert len(checks) > 1


@pytest.mark.parametrize("package", ["onnx", "protobuf", "xpuruntime"])
def test_another_version_checks_again(kept, checks, tmp_path, monkeypatch, package):
    path = zoo.save(zoo.mlp(), tmp_path / "m.onnx")
    inspect_model(path)
    here = model_info.installed
    monkeypatch.setattr(model_info, "installed", lambda *names: {**here(*names), package: "99.0"})
    inspect_model(path)
    inspect_model(path)
    assert len(checks) == 2


def test_a_refused_model_is_refused_again(kept, tmp_path):
    model = zoo.mlp()
    model.opset_import[0].version = 9999
    path = zoo.save(model, tmp_path / "m.onnx")
    for _ in range(2):
        with pytest.raises(ModelError, match="opset 9999"):
            inspect_model(path)
    assert not kept.exists()


@pytest.mark.parametrize("damage", [b"", b"x" * 40])
def test_a_damaged_entry_is_checked_again(kept, checks, tmp_path, damage):
    path = zoo.save(zoo.mlp(), tmp_path / "m.onnx")
    first = inspect_model(path)
    (entry,) = kept.iterdir()
    entry.write_bytes(damage)
    assert inspect_model(path) == first
    assert len(checks) == 2
    model_info._INSPECTED.write(entry.name, b"\x80")  # whole, and no facts of a model
    assert inspect_model(path) == first
    assert len(checks) == 3


def test_files_beside_a_model_are_looked_at_each_time(kept, checks, tmp_path):
    path = tmp_path / "m.onnx"
    onnx.save(zoo.mlp(), path, save_as_external_data=True, location="weights.bin", size_threshold=0)
    inspect_model(path)
    inspect_model(path)
    assert len(checks) == 2
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(ModelError, match=r"weights\.bin"):
        inspect_model(path)


def test_a_schema_that_a_process_registers_is_checked(kept, tmp_path):
    model = strange()
    model.opset_import.add(domain="com.example", version=1)
    path = zoo.save(model, tmp_path / "m.onnx")
    inspect_model(path)
    argument = onnx.defs.OpSchema.FormalParameter("a", "tensor(float)")
    schema = onnx.defs.OpSchema("Strange", "com.example", 1, inputs=[argument, argument], outputs=[argument])
    onnx.defs.register_schema(schema)
    try:
        with pytest.raises(ModelError, match=r"Strange.* has input size 1"):
            inspect_model(path)
    finally:
        onnx.defs.deregister_schema("Strange", 1, "com.example")
    assert inspect_model(path).custom_domains["com.example"] == ("Strange",)


def test_a_large_file_is_not_hashed_for_this(kept, checks, tmp_path, monkeypatch):
    path = zoo.save(zoo.mlp(), tmp_path / "m.onnx")
    for module in (digests, model_info):
        monkeypatch.setattr(module, "LARGE", 1)
    monkeypatch.setattr(digests, "_SETTLED", -1.0)
    monkeypatch.setattr(digests, "_WITHOUT_TIMES", ())
    inspect_model(path)
    assert not kept.exists()
    digests.file_digest(path)  # a lock needs it
    first = inspect_model(path)
    if len(list(kept.parent.iterdir())) > 1:  # this file system tells changes
        assert inspect_model(path) == first
        assert len(checks) == 2


def test_a_large_file_that_is_written_while_it_is_read_leaves_no_facts(kept, tmp_path, monkeypatch):
    path = Path(zoo.save(zoo.mlp(), tmp_path / "m.onnx"))
    os.utime(path, ns=(1, 1))
    data = path.read_bytes()
    model = zoo.mlp()
    model.graph.name = "x" * len(model.graph.name)
    monkeypatch.setattr(model_info, "LARGE", 1)
    monkeypatch.setattr(model_info, "recall_digest", lambda facts: hashlib.sha256(data).hexdigest())
    recall = model_info._recall

    def written_after(entry):
        info = recall(entry)
        path.write_bytes(model.SerializeToString())
        return info

    monkeypatch.setattr(model_info, "_recall", written_after)
    inspect_model(path)
    assert not kept.exists()


def test_the_variable_turns_it_off(kept, checks, tmp_path, monkeypatch):
    monkeypatch.setenv(digests.VARIABLE, "off")
    path = zoo.save(zoo.mlp(), tmp_path / "m.onnx")
    inspect_model(path)
    inspect_model(path)
    assert len(checks) == 2
    assert not kept.exists()


def _plain(*nodes: onnx.NodeProto, opset: int = 18) -> onnx.ModelProto:
    values = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2]) for name in "xy"]
    graph = onnx.helper.make_graph(nodes, "plain", values[:1], values[1:])
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", opset)], ir_version=8)


#: Models whose nodes are left to ONNX Runtime at first, and what the ONNX checker has against each.
LEFT = {
    "sound": (_plain(onnx.helper.make_node("Relu", ["x"], ["y"])), None),
    "too few inputs": (_plain(onnx.helper.make_node("Add", ["x"], ["y"])), "has input size 1 not in range"),
    "unknown attribute": (_plain(onnx.helper.make_node("Relu", ["x"], ["y"], odd=1)), "Unrecognized attribute: odd"),
    "unknown input": (_plain(onnx.helper.make_node("Add", ["x", "z"], ["y"])), "input 'z' of node"),
    "unknown operator": (_plain(onnx.helper.make_node("Reloo", ["x"], ["y"])), "did you mean 'Relu'?"),
    "later operator": (_plain(onnx.helper.make_node("Gelu", ["x"], ["y"])), "first in opset 20"),
}


@pytest.mark.parametrize("name", LEFT)
def test_a_session_refuses_what_the_checker_refuses(kept, tmp_path, name):
    pytest.importorskip("onnxruntime")
    model, reason = LEFT[name]
    path = zoo.save(model, tmp_path / "m.onnx")
    left = inspect_model(path, defer=True)
    assert left.deferred
    if reason is None:
        with xrt.InferenceSession(path, device="cpu") as session:
            assert session.model.deferred
        assert session.model == left
        checked = inspect_model(path)
        assert not checked.deferred, "what was left before is checked where no engine does"
        assert checked == msgspec.structs.replace(left, deferred=False)
        assert inspect_model(path, defer=True) == checked
        return
    with pytest.raises(XpuRuntimeError, match=re.escape(reason)) as planned:
        xrt.plan(path, engine="onnxruntime", device="cpu")
    with pytest.raises(type(planned.value)) as opened:
        xrt.InferenceSession(path, engine="onnxruntime", device="cpu")
    assert str(opened.value) == str(planned.value)


@pytest.mark.parametrize("name", ODD)
def test_what_is_left_to_an_engine_is_as_the_checker_finds_it(kept, tmp_path, name):
    """ONNX Runtime runs each of these: where nodes are left to it, the checker has nothing against them either."""
    path = zoo.save(ODD[name](), tmp_path / "m.onnx")
    left = inspect_model(path, defer=True)
    assert inspect_model(path) == msgspec.structs.replace(left, deferred=False)


def test_an_opset_that_is_no_version_is_refused_at_once(kept, tmp_path):
    model = _plain(onnx.helper.make_node("Relu", ["x"], ["y"]))
    model.opset_import.add(domain="org.nobody", version=1 << 31)
    path = zoo.save(model, tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"of 'org\.nobody' is no version"):
        inspect_model(path, defer=True)


def test_models_of_other_engines_are_checked_before(kept, tmp_path):
    path = zoo.save(LEFT["unknown attribute"][0], tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="Unrecognized attribute"):
        xrt.InferenceSession(path, engine="null", device="cpu")
    with pytest.raises(ModelError, match="Unrecognized attribute"):  # the graph is converted first
        xrt.InferenceSession(path, engine="onnxruntime", device="cpu", precision="fp16")
