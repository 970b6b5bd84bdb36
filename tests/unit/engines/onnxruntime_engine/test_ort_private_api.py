# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Private names of ONNX Runtime: each is there, has a reason and a fallback, and is used in one module."""

from __future__ import annotations

import ast
import re
import types
from pathlib import Path

import onnxruntime
import pytest
from onnxruntime.capi import onnxruntime_pybind11_state as state

import xpuruntime
from xpuruntime.engines.onnxruntime import _private_api as private

PACKAGE = Path(xpuruntime.__file__).parent
CLASSES = {"onnxruntime.InferenceSession": "_sess", "onnxruntime.IOBinding": "_iobinding"}


@pytest.mark.parametrize("one", private.TABLE, ids=lambda one: one[0])
def test_each_is_there_and_says_why(one):
    path, why, without = one
    assert why
    assert without
    owner, _, name = path.rpartition(".")
    if owner in CLASSES:  # set by the constructor
        source = Path(onnxruntime.__file__).parent / "capi" / "onnxruntime_inference_collection.py"
        assert CLASSES[owner] == name
        assert f"self.{name} = " in source.read_text()
    else:
        owners = {"OrtValue": state.OrtValue, "OrtDevice": onnxruntime.OrtDevice}
        assert hasattr(owners.get(owner.rpartition(".")[2], state), name)


def test_without_them_the_public_classes_serve(monkeypatch):
    session, binding = object(), object()
    assert private.raw_session(session) is session
    assert private.raw_binding(binding) is binding
    device = onnxruntime.OrtDevice.make("cpu", 0)
    assert isinstance(private.raw_device(device), state.OrtDevice)
    assert private.raw_device(session) is session
    assert private.operator_schemas()
    monkeypatch.setattr("onnxruntime.capi.onnxruntime_pybind11_state", types.SimpleNamespace())
    assert private.operator_schemas() == []


def test_no_other_module_uses_a_private_name():
    texts = []
    names = re.compile(rf"\.({'|'.join(CLASSES.values())})\b|onnxruntime_pybind11_state")
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text()
        if path == Path(private.__file__) or names.search(text) is None:
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and node.attr in CLASSES.values():
                texts.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {node.attr}")
            elif isinstance(node, (ast.Import, ast.ImportFrom)) and "onnxruntime_pybind11_state" in ast.unparse(node):
                texts.append(f"{path.relative_to(PACKAGE)}:{node.lineno}: {ast.unparse(node)}")
    assert texts == []
