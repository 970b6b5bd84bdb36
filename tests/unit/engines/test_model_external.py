# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Models with their weights in other files."""

from __future__ import annotations

import numpy as np
import onnx
import precision_models as zoo
import pytest

from xpuruntime.engines.model import ExternalFile, inspect_bytes, inspect_model
from xpuruntime.engines.model import external as model_external
from xpuruntime.engines.model.graph import tensors
from xpuruntime.errors import ModelError


@pytest.fixture
def path(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    zoo.save(zoo.mlp(), folder / "m.onnx", save_as_external_data=True, location="m.data", size_threshold=0)
    return folder / "m.onnx"


def point(path, **entries):
    """Rewrite where the first weight says its data is."""
    model = onnx.load(str(path), load_external_data=False)
    for entry in model.graph.initializer[0].external_data:
        if entry.key in entries:
            entry.value = str(entries.pop(entry.key))
    for key, value in entries.items():
        model.graph.initializer[0].external_data.add(key=key, value=str(value))
    path.write_bytes(model.SerializeToString())


def refused(path) -> str:
    with pytest.raises(ModelError) as caught:
        inspect_model(path)
    assert repr(str(path)) in str(caught.value)
    assert "Fix: " in str(caught.value)
    return str(caught.value)


def test_external_files_are_listed(path):
    info = inspect_model(path)
    assert info.has_external_data
    assert info.external_files == (
        ExternalFile(location="m.data", size=(path.parent / "m.data").stat().st_size, tensors=4),
    )
    assert info.weights == {"float32": 808}
    proto = info.named_proto()
    assert all(t.data_location == onnx.TensorProto.EXTERNAL for t in proto.graph.initializer)


def test_loading_gives_the_same_weights(path):
    proto = inspect_model(path).named_proto()
    model_external.load(tensors(proto), str(path.parent), str(path))
    expected = zoo.mlp()
    for got, want in zip(proto.graph.initializer, expected.graph.initializer, strict=True):
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(got), onnx.numpy_helper.to_array(want))


def test_missing(path):
    (path.parent / "m.data").unlink()
    text = refused(path)
    assert "'w1'" in text
    assert "'m.data', which does not exist" in text


def test_truncated(path):
    data = path.parent / "m.data"
    data.write_bytes(data.read_bytes()[:-10])
    assert "truncated" in refused(path)


def test_length_that_does_not_fit_the_shape(path):
    point(path, length=12)
    assert "said to have 12 bytes, and its shape needs 2048" in refused(path)


@pytest.mark.parametrize("value", ["-1", "0x10", "many", "1e3", "²"])
def test_offset_that_is_no_number(path, value):
    point(path, offset=value)
    assert "not a number" in refused(path)


@pytest.mark.parametrize("location", ["/etc/passwd", "C:\\data.bin", "\\\\server\\share\\x", "C:x.bin"])
def test_absolute(path, location):
    point(path, location=location)
    assert "absolute path" in refused(path)


@pytest.mark.parametrize("location", ["../m.data", "sub/../../m.data", "..\\m.data", "sub/.."])
def test_parent_folder(path, location):
    (path.parent.parent / "m.data").write_bytes((path.parent / "m.data").read_bytes())
    point(path, location=location)
    assert "outside the model's own folder" in refused(path)


def test_link_that_leads_outside(path, tmp_path):
    outside = tmp_path / "secret"
    (path.parent / "m.data").rename(outside)
    (path.parent / "m.data").symlink_to(outside)
    text = refused(path)
    assert "symbolic link" in text
    assert "secret" in text


def test_link_inside_the_folder_is_fine(path):
    (path.parent / "m.data").rename(path.parent / "real")
    (path.parent / "m.data").symlink_to("real")
    assert inspect_model(path).has_external_data


def test_download_cache_where_model_and_data_are_links_to_one_folder(path, tmp_path):
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "m.onnx").symlink_to(path)
    (snapshot / "m.data").symlink_to(path.parent / "m.data")
    assert inspect_model(snapshot / "m.onnx").has_external_data


def test_directory(path):
    (path.parent / "m.data").unlink()
    (path.parent / "m.data").mkdir()
    assert "is a directory" in refused(path)


def test_bytes_need_a_folder(path):
    with pytest.raises(ModelError, match=r"another file.*give the path"):
        inspect_bytes(path.read_bytes())
    assert inspect_bytes(path.read_bytes(), base_dir=path.parent).has_external_data


def test_bytes_do_not_open_the_working_directory(path, tmp_path, monkeypatch):
    (path.parent / "m.data").rename(tmp_path / "m.data")
    (path.parent / "m.data").symlink_to(tmp_path / "m.data")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError, match="symbolic link"):
        inspect_bytes(path.read_bytes(), base_dir=path.parent)
