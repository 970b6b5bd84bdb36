# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""From training to production on a GPU: one policy, the same kernels in PyTorch and in ONNX Runtime.

Needs onnxscript, which comes with ``xpuruntime[torch]``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch_models import batch, language

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.pytorch.dispatch.overrides.registry import installed

pytestmark = [pytest.mark.gpu, pytest.mark.torch]

WIDTH = 256  # of four heads of 64
POLICY = xrt.Policy(
    kernels={
        "matmul": "cublas.cublasLt",
        "layer_norm": "cuda_raw.layer_norm",
        "rules": [{"match": {"module": "layers.*.attn", "op": "attention"}, "use": "cuda_raw.flash_attention_v2"}],
    }
)
KERNELS = {
    **{f"layers.{i}.{part}": "cublas.cublasLt" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")},
    **{f"layers.{i}.attn": "cuda_raw.flash_attention_v2" for i in (0, 1)},
    **{f"layers.{i}.{part}": "cuda_raw.layer_norm" for i in (0, 1) for part in ("ln1", "ln2")},
    "ln": "cuda_raw.layer_norm",
    "head": "cublas.cublasLt",
}


class Trained(NamedTuple):
    model: Any
    ids: Any
    onnx: Any
    program: Any


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model in fp16 that has run under the policy, in both formats."""
    folder = tmp_path_factory.mktemp("exported")
    model, ids = language(width=WIDTH)
    model, ids = model.half().cuda(), ids.cuda()
    xrt.clear_decisions()
    with xt.kernel_policy(POLICY):
        with torch.no_grad():
            model(ids)
        shapes = ({0: batch()},)
        onnx = xt.export(
            model, ids, folder / "model.onnx", dynamic_shapes=shapes, input_names=["ids"], output_names=["logits"]
        )
        program = xt.export(model, ids, folder / "model.pt2", dynamic_shapes=shapes)
    assert installed() == ()
    return Trained(model, ids, onnx, program)


def open_session(path: Path, **stated: Any) -> xrt.InferenceSession:
    engine = "torch" if path.suffix == ".pt2" else "onnxruntime"
    return xrt.InferenceSession(path, device="cuda:0", engine=engine, **stated)


def ours(report: xrt.Report) -> dict[str, str]:
    """Return module to the kernel of ours that ran in it, without its configuration."""
    wanted = set(KERNELS.values())
    named = ((unit.id.rpartition("/")[0], (unit.kernel or "").partition("@")[0]) for unit in report.units)
    return {module: kernel for module, kernel in named if kernel in wanted}


def test_the_lock_says_what_training_ran(trained: Trained) -> None:
    lock = trained.onnx.lock
    major, minor = torch.cuda.get_device_capability(0)
    assert (lock.device, lock.arch) == ("cuda:0", f"sm{major}{minor}")
    assert lock.device_name == torch.cuda.get_device_name(0)
    assert {kernel.kernel.partition("@")[0] for kernel in lock.kernels} == set(KERNELS.values())
    assert {kernel.dtype for kernel in lock.kernels} == {"fp16"}


@pytest.mark.parametrize("form", [pytest.param("onnx", marks=pytest.mark.cuda_onnxruntime), "program"])
def test_the_same_kernels_run(trained: Trained, form: str) -> None:
    exported = getattr(trained, form)
    with open_session(exported.path) as session:
        plan = session.plan
        assert plan.policy_source == "model metadata"
        kernels = {
            control.key: control.enforceability for control in plan.controls if control.key.startswith("kernels")
        }
        assert set(kernels.values()) == {"enforced"}, plan
        report = session.explain({"ids": trained.ids}, runs=2)
    assert ours(report) == KERNELS
    seen = {observation.key: observation for observation in report.observations if observation.key in kernels}
    assert {one.status for one in seen.values()} == {"honoured"}, seen
    assert any("the kernels that the lock has" in note for note in report.notes), report.notes


@pytest.mark.parametrize("form", [pytest.param("onnx", marks=pytest.mark.cuda_onnxruntime), "program"])
def test_layers_agree(trained: Trained, form: str) -> None:
    with open_session(getattr(trained, form).path) as session:
        parity = xt.parity(trained.model, session, trained.ids)
    assert parity.agreed, str(parity)
    assert parity.skipped == {}
    assert {layer.module for layer in parity.layers} >= {*KERNELS, ""}


@pytest.mark.cuda_onnxruntime
def test_results_and_other_batches(trained: Trained) -> None:
    ids = torch.randint(64, (5, 8), device="cuda")
    with torch.no_grad():
        want = trained.model(ids).float().cpu().numpy()
    with open_session(trained.program.path) as session:
        got = session.run({"ids": ids})["output"]
        assert got.device == torch.device("cuda:0")
        np.testing.assert_allclose(got.float().cpu().numpy(), want, rtol=0.02, atol=0.01)
    with open_session(trained.onnx.path) as session:
        got = session.run({"ids": ids.cpu().numpy()})["logits"]
        np.testing.assert_allclose(got.astype(np.float32), want, rtol=0.02, atol=0.01)


def test_a_captured_program_replays_them(trained: Trained) -> None:
    policy = POLICY.replace(execution=xrt.ExecutionPolicy(cuda_graph="require"))
    with open_session(trained.program.path, policy=policy) as session:
        want = session.run({"ids": trained.ids})["output"].clone()
        binding = session.bind({"ids": trained.ids})
        assert binding.graph == "captured"
        binding.run()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(binding.outputs["output"].cpu().numpy(), want.cpu().numpy())
        other = torch.flip(trained.ids, (0,))
        want = session.run({"ids": other})["output"].clone()
        binding.inputs["ids"].copy_(other)
        binding.run()
        torch.cuda.synchronize()
        np.testing.assert_array_equal(binding.outputs["output"].cpu().numpy(), want.cpu().numpy())


def test_pytorchs_own_kernels_by_module(trained: Trained) -> None:
    rules = [
        {"match": {"module": "layers.0.attn", "op": "attention"}, "use": "torch.math"},
        {"match": {"module": "layers.1.attn", "op": "attention"}, "use": "torch.flash"},
    ]
    with open_session(trained.program.path, policy={"kernels": {"rules": rules}}) as session:
        report = session.explain({"ids": trained.ids}, runs=1)
        parity = xt.parity(trained.model, session, trained.ids)
    seen = {observation.key: observation for observation in report.observations}
    assert seen["kernels.rules[0]"].observed == "torch.math (1 operator)"
    assert seen["kernels.rules[1]"].observed == "torch.flash (1 operator)"
    flash = next(u for u in report.units if u.id == "layers.1.attn/scaled_dot_product_attention")
    assert "flash" in (flash.kernel or ""), flash.kernel
    assert parity.agreed, str(parity)


@pytest.mark.cuda_onnxruntime
def test_an_injected_difference_is_found(trained: Trained, tmp_path: Path) -> None:
    import onnx

    proto = onnx.load(trained.onnx.path)
    node = next(node for node in proto.graph.node if node.name == "layers.1.attn.proj/MatMul")
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == node.input[1])
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[11] += 2
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.warns(xrt.XpuRuntimeWarning, match="other weights"):
        session = open_session(tmp_path / "other.onnx")
    with session:
        parity = xt.parity(trained.model, session, trained.ids)
    assert parity.first_diverging is not None
    assert parity.first_diverging.module == "layers.1.attn.proj", str(parity)
