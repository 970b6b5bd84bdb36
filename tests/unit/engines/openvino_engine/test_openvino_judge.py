# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What OpenVINO is said to be able to do, from facts alone: devices, precisions, keys, options."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Any

import machines
import msgspec
import pytest
from onnx import TensorProto, helper

import xpuruntime as xrt
from xpuruntime.engines.openvino import OpenVinoEngine, probing
from xpuruntime.engines.openvino.options import CPU_OPTIONS, GPU_OPTIONS, NPU_OPTIONS
from xpuruntime.runtime.machine import CpuFacts, EngineFacts, Machine
from xpuruntime.testing import models

pytest.importorskip("openvino")

AVX512 = ("avx2", "avx512f", "avx512_bf16")


def machine(*providers: str, features: tuple[str, ...] = AVX512, **facts: Any) -> Machine:
    engine = EngineFacts(name="openvino", version="2026.4.1", loadable=True, providers=providers or ("CPU",), **facts)
    cpu = CpuFacts(name="test", cores=4, features=features)
    return machines.machine(python="3.11", cpu=cpu, engines={"openvino": engine})


def capabilities() -> list[str]:
    import openvino as ov

    return list(ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"))


def plan(model: Path, on: Machine, device: str = "cpu", **policy: Any) -> xrt.Plan:
    whole = {"mode": policy.pop("mode", "auto"), "execution": policy}
    return xrt.plan(model, device=device, engine="openvino", policy=whole, machine=on)


def control(model: Path, key: str, on: Machine | None = None, device: str = "cpu", **policy: Any) -> Any:
    return plan(model, on or machine(), device, **policy).control(key)


class TestProbe:
    def test_the_installed_one(self) -> None:
        facts = OpenVinoEngine().probe()
        assert facts.version == metadata.version("openvino")
        assert facts.loadable
        assert "CPU" in facts.providers

    def test_asked_where_there_may_be_more(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probing, "_accelerator_nodes", lambda: True)
        facts = OpenVinoEngine().probe()
        assert facts.detail["CPU"]
        assert "CPU" in facts.providers
        for kind in ("GPU", "NPU"):
            there = any(word.startswith(kind) for word in facts.providers)
            assert there != (kind in facts.broken), facts
            if not there:
                assert "it needs" in facts.broken[kind]

    def test_not_installed(self, monkeypatch: pytest.MonkeyPatch, mlp: Path) -> None:
        monkeypatch.setattr(probing, "installed", lambda name: {})
        facts = OpenVinoEngine().probe()
        assert facts.version is None
        on = msgspec.structs.replace(machine(), engines={"openvino": facts})
        with pytest.raises(xrt.EngineError, match=r'engine_missing: .*pip install "openvino>=.*xpuruntime\[openvino\]'):
            plan(mlp, on)

    def test_a_folder_that_is_gone(self, monkeypatch: pytest.MonkeyPatch, mlp: Path) -> None:
        monkeypatch.setattr(probing.importlib.util, "find_spec", lambda _: None)
        facts = OpenVinoEngine().probe()
        assert not facts.loadable
        on = msgspec.structs.replace(machine(), engines={"openvino": facts})
        with pytest.raises(xrt.EngineError, match=r"engine_broken: .*its folder is gone.*force-reinstall openvino"):
            plan(mlp, on)

    def test_another_python(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(probing.importlib.machinery, "EXTENSION_SUFFIXES", [".cpython-399-other.so"])
        facts = OpenVinoEngine().probe()
        assert "no extension module for Python" in str(facts.reason)


class TestDevices:
    def test_order(self) -> None:
        on = machine("CPU", "GPU.0", "GPU.1", "NPU")
        assert OpenVinoEngine().devices(on) == ("npu", "gpu:0", "gpu:1", "cpu")
        assert OpenVinoEngine().devices(msgspec.structs.replace(on, engines={})) == ()

    def test_missing_with_the_reason(self, mlp: Path) -> None:
        on = machine("CPU", broken={"GPU": "libOpenCL.so.1 cannot be opened"})
        with pytest.raises(xrt.EngineError, match=r"device_missing: gpu .*libOpenCL\.so\.1.*use device cpu"):
            plan(mlp, on, "gpu")
        with pytest.raises(xrt.EngineError, match=r"device_missing: gpu:7 .*OpenVINO has cpu, gpu:0, gpu:1"):
            plan(mlp, machine("CPU", "GPU.0", "GPU.1"), "gpu:7")

    def test_a_device_that_vanished_is_refused_when_loading(self, mlp: Path) -> None:
        on = machine("CPU", "NPU")
        with pytest.raises(xrt.XpuRuntimeError, match=r"npu was not found|NPU plugin"):
            xrt.InferenceSession(mlp, device="npu", engine="openvino", machine=on)


class TestPrecision:
    @pytest.mark.parametrize(
        ("precision", "device", "hint"),
        [
            ("model", "cpu", "f32"),
            ("fp32", "cpu", "f32"),
            ("bf16", "cpu", "bf16"),
            ("fp16", "gpu", "f16"),
            ("fp16", "npu", "f16"),
        ],
    )
    def test_the_hint_is_always_stated(self, mlp: Path, precision: str, device: str, hint: str) -> None:
        found = plan(mlp, machine("CPU", "GPU", "NPU"), device, precision=precision)
        assert found.settings["hint"] == hint
        assert f"INFERENCE_PRECISION_HINT={hint}" in found.accepted.reason

    def test_a_half_model_is_left_in_its_types(self, tmp_path: Path) -> None:
        path = models.save(models.identity("float16"), tmp_path)
        assert plan(path, machine()).settings["hint"] == "dynamic"

    def test_tf32(self, mlp: Path) -> None:
        with pytest.raises(xrt.UnsupportedOperationError, match="no plugin of OpenVINO computes in TF32"):
            plan(mlp, machine(), precision="tf32")
        assert control(mlp, "execution.tf32", tf32=True).enforceability == "unsupported"
        assert control(mlp, "execution.tf32", tf32=False).enforceability == "enforced"

    def test_fp16_on_a_processor_without_it(self, mlp: Path) -> None:
        with pytest.raises(xrt.UnsupportedOperationError, match="this processor has no fp16 arithmetic"):
            plan(mlp, machine(), precision="fp16")
        assert plan(mlp, machine(features=(*AVX512, "avx512_fp16")), precision="fp16").settings["hint"] == "f16"

    def test_int8_without_inputs(self, mlp: Path) -> None:
        with pytest.raises(xrt.XpuRuntimeError, match=r"calibration_missing: .*calibration="):
            plan(mlp, machine(), precision="int8")

    def test_what_it_narrows_is_said(self, tmp_path: Path) -> None:
        path = models.save(models.identity("int64"), tmp_path)
        assert "computes int64 as int32" in plan(path, machine()).accepted.reason

    @pytest.mark.parametrize("zero", [TensorProto.UINT16, TensorProto.INT16])
    def test_16_bit_activations_are_refused(self, tmp_path: Path, zero: int) -> None:
        nodes = [
            helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"], name="q"),
            helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"], name="d"),
        ]
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            nodes,
            "g",
            [value("x", TensorProto.FLOAT, [2, 3])],
            [value("y", TensorProto.FLOAT, [2, 3])],
            [helper.make_tensor("s", TensorProto.FLOAT, [], [0.1]), helper.make_tensor("z", zero, [], [0])],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
        path = models.save(model, tmp_path)
        with pytest.raises(xrt.UnsupportedOperationError, match=r"u?int16, and OpenVINO computes such models wrongly"):
            plan(path, machine())

    def test_custom_domains_are_refused_by_name(self, tmp_path: Path) -> None:
        model = models.mlp()
        model.graph.node[1].domain = "my.dom"
        model.opset_import.append(helper.make_opsetid("my.dom", 1))
        path = models.save(model, tmp_path)
        with pytest.raises(xrt.UnsupportedOperationError, match=r"custom operators my\.dom: Relu"):
            plan(path, machine())


class TestKeys:
    @pytest.mark.parametrize(
        ("key", "value", "level"),
        [
            ("threads", 2, "enforced"),
            ("threads", 400, "unsupported"),
            ("determinism", "run_to_run", "advisory"),
            ("layout", "nhwc", "unsupported"),
            ("layout", "nchw", "unsupported"),
            ("cuda_graph", "prefer", "unsupported"),
            ("allow_cpu_ops", ["Shape"], "enforced"),
            ("precision", "fp32", "enforced"),
            ("precision", "bf16", "advisory"),
        ],
    )
    def test_each(self, mlp: Path, key: str, value: Any, level: str) -> None:
        assert control(mlp, f"execution.{key}", **{key: value}).enforceability == level

    def test_kernels(self, mlp: Path) -> None:
        kernels = {"matmul": "cublasLt", "attention": "auto", "rules": [{"match": {"op": "matmul"}, "use": "cublas"}]}
        found = xrt.plan(
            mlp, device="cpu", engine="openvino", policy={"mode": "auto", "kernels": kernels}, machine=machine()
        )
        levels = {one.key: one.enforceability for one in found.controls if one.key.startswith("kernels.")}
        assert levels == {
            "kernels.matmul": "unsupported",
            "kernels.attention": "enforced",
            "kernels.rules[0]": "unsupported",
        }


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"NUM_STREAM": 1}, "did you mean 'NUM_STREAMS'"),
            ({"SCHEDULING_CORE_TYPE": "FAST"}, "'FAST' is not one of 'ANY_CORE', 'PCORE_ONLY', 'ECORE_ONLY'"),
            ({"NUM_STREAMS": 0}, r"0 is outside 1\.\.4096"),
            ({"NUM_STREAMS": "many"}, "is not an integer"),
            ({"INFERENCE_PRECISION_HINT": "f16"}, r"is set by execution\.precision"),
            ({"INFERENCE_NUM_THREADS": 1}, r"is set by execution\.threads"),
            ({"CACHE_DIR": "/tmp"}, r"is set by execution\.artifacts"),
            ({"NPU_TURBO": True}, "unknown option 'NPU_TURBO'"),
        ],
    )
    def test_refused(self, mlp: Path, options: dict[str, Any], message: str) -> None:
        with pytest.raises(xrt.PolicyError, match=message):
            plan(mlp, machine(), provider_options={"openvino": options})

    def test_the_table_is_true_of_this_openvino(self, tmp_path: Path) -> None:
        """Every CPU option is taken, is a property that OpenVINO has, and reads back as it was set."""
        import openvino as ov

        from xpuruntime.engines.openvino.options import read_back

        known = set(ov.Core().get_property("CPU", "SUPPORTED_PROPERTIES"))
        graph = ov.Core().read_model(models.mlp().SerializeToString())
        for name, option in CPU_OPTIONS.items():
            if option.owned_by is not None:
                assert name in known | {"CACHE_DIR", "CACHE_MODE"}, name
                continue
            assert name in known, name
            values = option.values or (str(max(option.low, 1)),)
            for value in values:
                given = ("NO", "YES")[int(value)] if values == ("0", "1") else value
                compiled = ov.Core().compile_model(graph, "CPU", {name: given, "INFERENCE_PRECISION_HINT": "f32"})
                got = read_back(compiled, name)
                del compiled  # it may hold all cores
                assert got == given or (name, given) in _UNHEARD, (name, given, got)

    def test_the_tables_of_other_devices_are_in_the_wheel(self) -> None:
        import openvino

        folder = Path(openvino.__file__).parent / "libs"
        for kind, table in (("gpu", GPU_OPTIONS), ("npu", NPU_OPTIONS)):
            plugins = [p.read_bytes() for p in folder.glob(f"*openvino_intel_{kind}_plugin*")]
            if not plugins:  # macOS has no GPU plugin
                continue
            missing = [name for name, o in table.items() if o.owned_by is None and name.encode() not in plugins[0]]
            assert not missing


#: What OpenVINO decides otherwise on a machine: not every processor has efficiency cores, or two threads a core.
_UNHEARD = {
    ("SCHEDULING_CORE_TYPE", "ECORE_ONLY"),
    ("ENABLE_CPU_PINNING", "YES"),
    ("ENABLE_CPU_RESERVATION", "YES"),
    ("ENABLE_HYPER_THREADING", "YES"),
}


@pytest.mark.skipif("FP16" in capabilities(), reason="this processor computes in fp16")
def test_fp16_that_openvino_does_not_compute_is_refused_when_loading(mlp: Path) -> None:
    """Where the facts promise fp16 and the plugin takes another precision, that is an error, not a silent change."""
    on = machine(features=("avx512_fp16",))
    with pytest.raises(
        xrt.UnsupportedOperationError, match=r"INFERENCE_PRECISION_HINT=f16 was requested, and OpenVINO chose"
    ):
        xrt.InferenceSession(
            mlp, device="cpu", engine="openvino", precision="fp16", policy={"mode": "auto"}, machine=on
        )


def test_a_wrong_option_of_one_engine_does_not_send_the_model_to_another(mlp: Path) -> None:
    options = {"execution": {"device": "cpu", "provider_options": {"onnxruntime": {"use_areena": 1}}}}
    with pytest.raises(xrt.PolicyError, match="did you mean 'use_arena'"):
        xrt.InferenceSession(mlp, policy=options)
