# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The models exported from PyTorch are small, tell nothing of the machine they came from, and compute what it does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import onnx
import pytest
from exported_models import NAMES, example, exported

from xpuruntime.engines.model import inspect_model

TOOL = Path(__file__).resolve().parents[3] / "tools" / "export_test_models.py"


@pytest.mark.parametrize("name", NAMES)
def test_files_are_small_and_say_nothing_of_a_machine(name):
    data = exported(name).read_bytes()
    assert len(data) < 1_000_000
    assert re.search(rb"/(home|root|tmp|usr|work)/|\.py", data) is None
    proto = onnx.load_model_from_string(data)
    assert not any(value.metadata_props for value in (proto, *proto.graph.node, *proto.graph.initializer))


@pytest.mark.parametrize("name", NAMES)
def test_inputs_fit_and_every_size_that_is_promised_runs(name):
    import onnxruntime as ort

    info = inspect_model(exported(name))
    assert [tensor.name for tensor in info.inputs] == list(example(name))
    session = ort.InferenceSession(str(exported(name)), providers=["CPUExecutionProvider"])
    for batch, length in ((1, 1), (3, 16), (2, 128)):
        outputs = dict(
            zip([o.name for o in session.get_outputs()], session.run(None, example(name, batch, length)), strict=True)
        )
        assert outputs["logits"].shape == (batch, 8 if name == "encoder" else 10)
        assert float(outputs["logits"].std()) > 0.05
        if name == "encoder":
            assert outputs["hidden"].shape == (batch, length, 64)


@pytest.mark.torch
@pytest.mark.skipif(find_spec("torch") is None, reason="could not import 'torch'")
def test_they_compute_what_pytorch_computes():
    done = subprocess.run(
        [sys.executable, str(TOOL), "--check"], env={**os.environ}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("from PyTorch") == len(NAMES)
