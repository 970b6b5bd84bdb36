# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays between processes, and workers with another version of xpuruntime."""

from __future__ import annotations

import sys

import ml_dtypes
import numpy as np

import xpuruntime as xrt
from xpuruntime.locks.worker_side import xrt_session_worker
from xpuruntime.locks.worker_side.xrt_session_worker import read_arrays, write_arrays


def test_arrays_keep_names_types_and_order(tmp_path):
    arrays = {
        "file": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "a/b": np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16),
        "text": np.array(["one", "three"], dtype=object),
        "": np.float64(3.0),
        "none": np.zeros((0, 4), dtype=np.int8),
    }
    write_arrays(tmp_path / "arrays", arrays)
    found = read_arrays(tmp_path / "arrays")
    assert list(found) == list(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        assert np.array_equal(found[name], array)


def test_equal_strings_are_equal_outputs(tmp_path):
    """An array of objects holds addresses, which differ between equal strings."""
    texts = [np.array(["".join(["a", "bc"])], dtype=object) for _ in range(2)]
    assert xrt_session_worker._digest(texts[0]) == xrt_session_worker._digest(texts[1])


def test_a_version_without_tensors_of_nodes_is_a_note(tmp_path, monkeypatch):
    write_arrays(tmp_path / "inputs", {})
    facts = xrt_session_worker.open_session(str(xrt.demo_model_path()), str(tmp_path / "inputs"), {"device": "cpu"})
    assert facts["xpuruntime"] == xrt.__version__
    monkeypatch.setitem(sys.modules, "xpuruntime.inference.comparison", None)
    intermediates = xrt_session_worker.intermediates(str(tmp_path))
    assert intermediates["nodes"] == []
    assert "gives no tensors of nodes" in intermediates["note"]
