# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compiled artifacts of ONNX Runtime on CUDA: the same bits, the same evidence, and no second optimization."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.engines.precision import probe_feeds
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.cuda_onnxruntime

MODELS = {"mlp": models.mlp, "conv": models.conv, "attention": models.attention}


def asked(precision: str, **execution: Any) -> dict[str, Any]:
    return {"execution": {"engine": "onnxruntime", "device": "cuda:0", "precision": precision, **execution}}


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_an_artifact_gives_the_same_bits_and_evidence(tmp_path: Path, name: str, precision: str) -> None:
    model = models.save(MODELS[name](), tmp_path)
    policy = asked(precision, determinism="run_to_run")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)
        with xrt.InferenceSession(model, policy=policy) as session:
            feeds = probe_feeds(session.model)
            want = session.run(feeds)
            units = {u.source_nodes for u in session.explain(feeds, runs=2).units if u.source_nodes}
            artifact = session.save_compiled(tmp_path / "m.xrt")
        with xrt.InferenceSession(artifact.folder) as session:
            got = session.run(feeds)
            report = session.explain(feeds, runs=2)
    for key, array in want.items():
        np.testing.assert_array_equal(got[key], array)
    assert {u.source_nodes for u in report.units if u.source_nodes} == units
    assert {u.device for u in report.units} == {"cuda:0"}
    assert artifact.manifest.target["compute capability"]
    assert (artifact.manifest.accuracy is None) == (precision == "fp32")


def test_what_is_tied_to_the_chip(tmp_path: Path) -> None:
    artifact = xrt.compile_model(models.save(models.mlp(), tmp_path), tmp_path / "m.xrt", policy=asked("fp32"))
    with pytest.raises(xrt.EngineError, match="artifact_foreign"):
        xrt.InferenceSession(artifact.folder, device="cpu")


def test_memory_and_graphs_are_free(tmp_path: Path) -> None:
    """They say how an artifact is run, so they may differ from when it was made."""
    artifact = xrt.compile_model(models.save(models.mlp(batch=4), tmp_path), tmp_path / "m.xrt", policy=asked("fp32"))
    feeds = {"x": np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)}
    with xrt.InferenceSession(artifact.folder) as session:
        want = session.run(feeds)["y"]
    with xrt.InferenceSession(artifact.folder, policy=asked("fp32", memory={"pool": "caching"})) as session:
        np.testing.assert_array_equal(session.run(feeds)["y"], want)
    with xrt.InferenceSession(artifact.folder, policy=asked("fp32", cuda_graph="require")) as session:
        binding = session.bind({"x": (4, 64)})
        assert binding.graph == "captured"
        binding.close()


def test_the_cache(tmp_path: Path) -> None:
    model = models.save(models.conv(), tmp_path)
    policy = asked("fp32", artifacts={"cache": str(tmp_path / "cache")})
    for ending in ("which was compiled now", "from the cache"):
        with xrt.InferenceSession(model, policy=policy) as session:
            assert session.plan.notes[-1].endswith(ending)


def test_engines_are_compared_on_the_device(tmp_path: Path) -> None:
    table = xrt.compare_engines(
        models.save(models.conv(), tmp_path), ["onnxruntime@cuda:0", "onnxruntime@cpu"], precision="fp32", runs=3
    )
    assert table.agreed, str(table)
    assert [row.device for row in table.rows] == ["cuda:0", "cpu"]
