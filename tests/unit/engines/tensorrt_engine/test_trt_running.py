# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The path of a run, with a stand-in for the vendor: executing a real engine needs a GPU, which these tests do not."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import trt_fake as fake

import xpuruntime as xrt
from xpuruntime import _core
from xpuruntime.engines.base import Request
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model import inspect_model
from xpuruntime.engines.model.shapes import with_shapes
from xpuruntime.engines.tensorrt.building import CacheFile
from xpuruntime.engines.tensorrt.handle import Handle
from xpuruntime.engines.tensorrt.model import TensorRtModel
from xpuruntime.engines.tensorrt.options import RTX, TensorRtSettings
from xpuruntime.engines.tensorrt.refusals import Record
from xpuruntime.policies import Policy
from xpuruntime.testing import models

RECORD = Record(target={}, flags={"tf32": "0", "builder_optimization_level": "3"}, layers={}, size=0, sha256="")
LAYERS = [
    {"Name": "reformat", "LayerType": "Reformat", "Metadata": "[ONNX Layer: mm1]"},
    {
        "Name": "fused",
        "LayerType": "gemm",
        "Metadata": "[ONNX Layer: mm1]\x1e[ONNX Layer: relu]",
        "Inputs": [{"Name": "x", "Dimensions": [4, 64], "Format": "kLINEAR", "Datatype": "Float"}],
        "Outputs": [{"Name": "r", "Dimensions": [4, 64], "Format": "kLINEAR", "Datatype": "Float"}],
        "TacticName": "sm86_xmma_gemm_f32f32",
    },
    {"Name": "last", "LayerType": "gemm", "Metadata": "[ONNX Layer: mm2]", "TacticName": "sm86_gemm"},
]


def doubling(**options: Any) -> fake.Engine:
    """Return an engine with x and y float32 [open, 64]."""
    shape = (-1, 64)
    return fake.Engine(
        {"x": (fake.DataType.FLOAT, shape)},
        {"y": (fake.DataType.FLOAT, shape)},
        lambda x: {"y": 2 * x},
        LAYERS,
        **options,
    )


def load(
    tmp_path: Any, engine: fake.Engine | None, model: Any = None, cache: Any = None, **settings: Any
) -> TensorRtModel:
    """Return a loaded model over the stand-in, on host memory."""
    info = inspect_model(models.save(models.mlp(), tmp_path))
    policy = Policy.coerce({"execution": {"shapes": {"x": ["1..4..8", 64]}}})
    handle = Handle(fake.module(engine), RTX, "cpu", TensorRtSettings(**settings), RECORD, info.path)
    handle.open(b"plan", cache, None)
    request = Request(model=info, device="cpu", policy=policy)
    return TensorRtModel(handle, with_shapes(info, policy), request=request, log=ConversionLog())


def x(rows: int = 4, seed: int = 0) -> np.ndarray[Any, Any]:
    """Return an input."""
    return np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32)


def test_numpy_in_numpy_out(tmp_path: Any) -> None:
    engine = doubling()
    loaded = load(tmp_path, engine)
    for rows in (1, 4, 8, 4):
        out = loaded.run({"x": x(rows)})
        assert list(out) == ["y"]
        np.testing.assert_array_equal(out["y"], 2 * x(rows))
    assert engine.contexts[0].nvtx_verbosity is fake.ProfilingVerbosity.NONE
    loaded.close()
    loaded.close()
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        loaded.run({"x": x()})


def test_tensors_in_tensors_out(tmp_path: Any) -> None:
    loaded = load(tmp_path, doubling())
    given = _core.Tensor.empty((4, 64), "float32", "cpu")
    given.numpy()[:] = x()
    out = loaded.run({"x": given})["y"]
    assert isinstance(out, _core.Tensor)
    np.testing.assert_array_equal(out.numpy(), 2 * x())
    assert not loaded.conversions()


def test_addresses_that_are_not_aligned_are_copied_and_told(tmp_path: Any) -> None:
    engine = doubling()
    base = np.zeros(4 * 64 + 65, np.float32)
    start = (-base.ctypes.data // 4) % 64 + 1  # four bytes behind a multiple of 256
    view = base[start : start + 4 * 64].reshape(4, 64)
    view[:] = x()
    given = _core.Tensor.from_numpy(view)
    assert given.data_ptr % 256 == 4
    loaded = load(tmp_path, engine)
    np.testing.assert_array_equal(loaded.run({"x": given})["y"].numpy(), 2 * x())
    assert engine.contexts[0].addresses["x"] % 256 == 0
    assert [(c.what, c.reason) for c in loaded.conversions()] == [
        ("input 'x' copied once", "it does not start at a multiple of 256 bytes")
    ]
    strict = load(tmp_path, doubling(), strict=True)
    with pytest.raises(xrt.InputError, match="multiple of 256"):
        strict.run({"x": given})


@pytest.mark.parametrize(
    ("feeds", "message"),
    [
        ({"xx": x()}, "did you mean 'x'"),
        ({"x": x().astype(np.float64)}, "dtype float64"),
        ({"x": x(9)}, "from 1 to 8"),
        ({"x": x()[:, :63]}, "axis 1 must be 64"),
    ],
)
def test_bad_inputs_are_refused_and_the_session_works_on(tmp_path: Any, feeds: Any, message: str) -> None:
    loaded = load(tmp_path, doubling())
    with pytest.raises(xrt.InputError, match=message):
        loaded.run(feeds)
    assert loaded.run({"x": x()})["y"].shape == (4, 64)


def test_an_engine_that_fails_is_an_error_with_its_reason(tmp_path: Any) -> None:
    engine = doubling()
    loaded = load(tmp_path, engine)
    engine.failing = True
    with pytest.raises(xrt.EngineError, match=r"running .* with TensorRT-RTX on cpu failed: it gave no reason"):
        loaded.run({"x": x()})
    engine.failing = False
    assert loaded.run({"x": x()})["y"].shape == (4, 64)


def test_shapes_outside_of_the_engine_are_refused_by_name(tmp_path: Any) -> None:
    loaded = load(tmp_path, doubling(most=(2, 64)))
    with pytest.raises(xrt.EngineError, match=r"setting the shape \[4, 64\] of input 'x'"):
        loaded.run({"x": x()})


def test_plans_that_do_not_load_say_why(tmp_path: Any) -> None:
    with pytest.raises(xrt.EngineError, match="Version tag does not match"):
        load(tmp_path, None)


def test_outputs_whose_size_only_the_run_knows(tmp_path: Any) -> None:
    engine = fake.Engine(
        {"x": (fake.DataType.FLOAT, (-1, 64))},
        {"y": (fake.DataType.FLOAT, (-2, 64))},
        lambda x: {"y": x[x[:, 0] > 0]},
    )
    loaded = load(tmp_path, engine)
    given = x(8)
    np.testing.assert_array_equal(loaded.run({"x": given})["y"], given[given[:, 0] > 0])
    nothing = -np.abs(given)
    assert loaded.run({"x": nothing})["y"].shape == (0, 64)
    assert loaded.conversions()[0].reason == "its size is known only after the run"
    with pytest.raises(xrt.InputError, match="known only after a run"):
        loaded.bind({"x": (8, 64)}, None)


def test_engines_that_want_host_memory_are_refused(tmp_path: Any) -> None:
    engine = fake.Engine(
        {"x": (fake.DataType.FLOAT, (-1, 64)), "on_host": (fake.DataType.INT64, (1,))},
        {"y": (fake.DataType.FLOAT, (-1, 64))},
        lambda x, on_host: {"y": x},
    )
    with pytest.raises(xrt.UnsupportedOperationError, match="'on_host' on the host"):
        load(tmp_path, engine)


def test_as_many_contexts_as_stated(tmp_path: Any) -> None:
    inside, most = [], [0]
    gate = threading.Barrier(3, timeout=20)

    def compute(x: Any) -> dict[str, Any]:
        inside.append(1)
        most[0] = max(most[0], len(inside))
        gate.wait()
        inside.pop()
        return {"y": 2 * x}

    engine = doubling()
    engine.compute = compute
    loaded = load(tmp_path, engine, options={"contexts": "3"})
    answers: dict[int, Any] = {}

    def work(seed: int) -> None:
        answers[seed] = loaded.run({"x": x(seed=seed)})["y"]

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most[0] == 3
    assert len(engine.contexts) == 3
    for seed, answer in answers.items():
        np.testing.assert_array_equal(answer, 2 * x(seed=seed))


def test_memory_from_our_pool(tmp_path: Any) -> None:
    loaded = load(tmp_path, doubling(), pool="caching", pool_limit=1 << 20)
    assert loaded.memory() == {"engine": 1024, "activations_per_context": 1024}
    loaded.close()
    assert loaded.memory() == {}
    with pytest.raises(xrt.OutOfMemoryError, match=r"The pool said: .*limit"):
        load(tmp_path, doubling(), pool="caching", pool_limit=512)


def test_bound_buffers(tmp_path: Any) -> None:
    engine = doubling()
    loaded = load(tmp_path, engine)
    binding = loaded.bind({"x": (4, 64)}, None)
    assert binding.graph == "off"
    given, result = binding.inputs["x"].numpy(), binding.outputs["y"].numpy()
    for seed in (1, 2):
        given[:] = x(seed=seed)
        binding.run()
        np.testing.assert_array_equal(result, 2 * x(seed=seed))
    assert len(engine.contexts) == 2  # its own, so that session.run goes on beside it
    binding.close()
    binding.close()
    with pytest.raises(xrt.XpuRuntimeError, match="closed"):
        binding.run()


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        ({}, {}, "free dimensions"),
        ({"xx": (4, 64)}, {}, "no input 'xx'"),
        ({"x": (4, 63)}, {}, r"shape \[4, 63\]"),
        ({"x": (9, 64)}, {}, "from 1 to 8"),
        ({"x": (4, 64)}, {"z": x()}, "no output 'z'"),
        ({"x": x()}, {}, "NumPy array, whose memory cannot be bound"),
        ({"x": (4, 64)}, {"y": x()}, "NumPy array, whose memory cannot be bound"),
        ({"x": (4, 64)}, {"y": _core.Tensor.empty((3, 64), "float32", "cpu")}, r"is float32 \[4, 64\] for these"),
    ],
)
def test_wrong_buffers_are_refused(tmp_path: Any, inputs: Any, outputs: Any, message: str) -> None:
    loaded = load(tmp_path, doubling())
    with pytest.raises(xrt.InputError, match=message):
        loaded.bind(inputs, outputs)


def test_graphs_that_cannot_be_captured(tmp_path: Any) -> None:
    binding = load(tmp_path, doubling(), graph="prefer").bind({"x": (4, 64)}, None)
    assert "cannot be captured" in binding.graph
    binding.inputs["x"].numpy()[:] = x()
    binding.run()
    np.testing.assert_array_equal(binding.outputs["y"].numpy(), 2 * x())
    with pytest.raises(xrt.UnsupportedOperationError, match="cannot be captured"):
        load(tmp_path, doubling(), graph="require").bind({"x": (4, 64)}, None)


def test_options_of_the_runtime_reach_the_context(tmp_path: Any) -> None:
    engine = doubling()
    options = {
        "kernel_specialization": "eager",
        "cuda_graph_strategy": "whole_graph_capture",
        "persistent_cache_limit": "64",
    }
    loaded = load(tmp_path, engine, options={**options, "context_allocation": "on_profile_change"})
    config = engine.contexts[0].config
    assert config.dynamic_shapes_kernel_specialization_strategy.name == "EAGER"
    assert config.cuda_graph_strategy.name == "WHOLE_GRAPH_CAPTURE"
    assert config.strategy.name == "ON_PROFILE_CHANGE"
    assert engine.contexts[0].persistent_cache_limit == 64
    loaded.close()


def test_the_runtime_cache_is_read_and_kept(tmp_path: Any) -> None:
    file = CacheFile(tmp_path / "cache" / "kernels.runtime")
    for before, after in ((None, b"kernels+"), (b"kernels+", b"kernels++")):
        assert file.read() == before
        load(tmp_path, doubling(), cache=file).close()
        assert file.read() == after
    file.update(lambda _: b"bad: of another driver")
    loaded = load(tmp_path, doubling(), cache=file)
    assert "made for another GPU" in loaded.handle.cache_note[1]  # type: ignore[index]
    loaded.close()
    assert file.read() == b"kernels+"


def test_evidence(tmp_path: Any) -> None:
    loaded = load(tmp_path, doubling(), options={"kernel_specialization": "eager"})
    seen = loaded.observe({"x": x()}, runs=3)
    told = sorted(name for unit in seen.units for name in unit.source_nodes)
    assert told == ["mm1", "mm2", "relu"]
    moving, fused, last = seen.units
    assert (moving.relation, moving.serves) == ("inserted", ("mm1",))
    assert (fused.relation, fused.source_nodes, fused.kernel) == ("fused", ("mm1", "relu"), "sm86_xmma_gemm_f32f32")
    assert (fused.precision_requested, fused.precision_run) == ("fp32", "fp32")
    assert fused.time is not None
    assert (fused.time.value, fused.time.kind, fused.time.runs) == (pytest.approx(2.0), "device", 3)
    assert (last.relation, last.precision_run) == ("exact", None)
    assert [b.kind for b in seen.boundaries] == ["layout"]
    assert seen.effective["execution.tf32"] == "BuilderFlag.TF32=0"
    assert seen.effective["execution.determinism"] == "kernel_specialization=eager"
    assert seen.effective["execution.shapes.x"] == "[1..4..8, 64]"
    assert seen.effective["execution.provider_options.trt-rtx.builder_optimization_level"] == "3"
    assert not seen.partial
