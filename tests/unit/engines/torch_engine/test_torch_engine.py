# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The torch engine: what it reads, what it refuses, how it runs, and what it tells."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt
from xpuruntime.engines.registry import default_registry
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.snapshot import machine_snapshot

torch = pytest.importorskip("torch")


class Net(torch.nn.Module):
    """A convolution, a norm and a product, with a nested result."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv1d(2, 4, 3, padding=1)
        self.norm = torch.nn.LayerNorm(16)
        self.head = torch.nn.Linear(16, 5)

    def forward(self, x: Any, *, scale: Any = None) -> dict[str, Any]:
        hidden = torch.relu(self.norm(self.conv(x)))
        if scale is not None:
            hidden = hidden * scale
        return {"hidden": hidden, "more": (self.head(hidden), hidden.sum((1, 2)))}


@pytest.fixture
def net() -> Any:
    torch.manual_seed(0)
    return Net().eval()


@pytest.fixture
def x() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).standard_normal((3, 2, 16)).astype(np.float32)


@pytest.fixture
def program(net: Any, tmp_path: Path) -> Path:
    size = torch.export.Dim("N", min=1, max=8)
    example = torch.zeros(3, 2, 16)
    saved = torch.export.export(net, (example,), dynamic_shapes={"x": {0: size}})
    torch.export.save(saved, tmp_path / "net.pt2")
    return tmp_path / "net.pt2"


def test_a_switch_for_tf32_that_was_left_on_is_told() -> None:
    """Either of PyTorch's two, whichever way it was set; the real ones are held on CUDA alone."""
    from xpuruntime.engines.torch.names import TorchSettings
    from xpuruntime.engines.torch.pinning import read_back

    off, on = TorchSettings(tf32=False), TorchSettings(tf32=True)
    values = {"matmul.allow_tf32": False, "cudnn.allow_tf32": False}
    assert read_back(off, values) == {"execution.tf32": "false"}
    for name in values:
        assert read_back(off, {**values, name: True}) == {"execution.tf32": f"{name}=true"}
        assert read_back(on, {**values, name: True})["execution.tf32"].endswith("=false")
    assert read_back(on, dict.fromkeys(values, True)) == {"execution.tf32": "true"}
    assert read_back(off, {"num_threads": 3}) == {"execution.threads": "3"}


def wanted(net: Any, x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    with torch.no_grad():
        result = net.double()(torch.from_numpy(x).double())
    net.float()
    return {
        "hidden": result["hidden"].numpy(),
        "more_0": result["more"][0].numpy(),
        "more_1": result["more"][1].numpy(),
    }


class TestPrograms:
    def test_computes_and_names_its_results(self, program: Path, net: Any, x: Any) -> None:
        with xrt.InferenceSession(program) as session:
            assert session.plan.candidate == "torch@cpu"
            assert [t.name for t in session.inputs] == ["x"]
            assert [t.name for t in session.outputs] == ["hidden", "more_0", "more_1"]
            got = session.run({"x": x})
        for name, value in wanted(net, x).items():
            np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-5)

    def test_sizes_beyond_the_export_are_refused(self, program: Path, x: Any) -> None:
        with xrt.InferenceSession(program) as session:
            assert session.run({"x": x[:1]})["more_1"].shape == (1,)
            with pytest.raises(xrt.InputError, match=r"axis 0.*from 1 to 8"):
                session.run({"x": np.zeros((9, 2, 16), np.float32)})

    def test_evidence_names_operators_and_kernels(self, program: Path) -> None:
        with xrt.InferenceSession(program, precision="fp32") as session:
            report = session.explain(runs=10)
        assert report.honoured, report.headline
        assert report.timeline is not None
        spans = report.timeline.spans
        assert [span.unit for span in spans] == [unit.id for unit in report.units if unit.time is not None]
        assert all(0 <= span.start_us <= span.start_us + span.us <= report.timeline.run_us for span in spans)
        units = {unit.op: unit for unit in report.units}
        for op, kernel in (("aten.layer_norm", "aten::native_layer_norm"), ("aten.linear", "aten::addmm")):
            # Operators so small may take as long as the views around them, and then no name is certain.
            assert units[op].kernel == kernel or units[op].kernel_source == "inferred", units[op]
        assert all(unit.time is not None and unit.time.value > 0 for unit in report.units)

    def test_a_converted_program_keeps_its_types_outside(self, program: Path, net: Any, x: Any) -> None:
        with xrt.InferenceSession(program, precision="bf16") as session:
            got = session.run({"x": x})
            report = session.explain({"x": x}, runs=1)
            again = torch.export.load(program).module()(torch.from_numpy(x))
        assert all(value.dtype == np.float32 for value in got.values())
        np.testing.assert_allclose(got["more_0"], wanted(net, x)["more_0"], rtol=0.1, atol=0.1)
        assert not np.array_equal(got["more_0"], again["more"][0].detach().numpy()), "bf16 rounds"
        assert {unit.precision_run for unit in report.units} == {"bf16"}

    @pytest.mark.parametrize(
        ("write", "message"),
        [
            (lambda path: path.write_bytes(b""), "no archive"),
            (lambda path: path.write_bytes(path.read_bytes()[:500]), "no archive"),
            (lambda path: zipfile.ZipFile(path, "w").close(), "export it again"),
            (lambda path: path.unlink(), "no such file"),
        ],
        ids=["empty", "cut off", "no program", "missing"],
    )
    def test_what_is_no_program_is_refused(self, program: Path, write: Any, message: str) -> None:
        write(program)
        with pytest.raises(xrt.ModelError, match=message):
            xrt.InferenceSession(program)

    def test_a_program_with_state_is_refused(self, tmp_path: Path) -> None:
        class Counts(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.register_buffer("count", torch.zeros(1))

            def forward(self, x: Any) -> Any:
                self.count += 1
                return x + self.count

        path = tmp_path / "counts.pt2"
        torch.export.save(torch.export.export(Counts(), (torch.zeros(2),)), path)
        with pytest.raises(xrt.ModelError, match="changes 'count' when it runs"):
            xrt.InferenceSession(path)

    def test_arguments_fixed_at_export(self, tmp_path: Path) -> None:
        class Two(torch.nn.Module):
            def forward(self, x: Any, times: int, *, y: Any = None) -> Any:
                return x * times + y

        path = tmp_path / "two.pt2"
        given = (torch.ones(2), 3), {"y": torch.ones(2)}
        torch.export.save(torch.export.export(Two(), *given), path)
        with xrt.InferenceSession(path) as session:
            assert [t.name for t in session.inputs] == ["x", "y"]
            out = session.run({"x": np.full(2, 2, np.float32), "y": np.ones(2, np.float32)})
            np.testing.assert_array_equal(out["output"], [7, 7])
            assert session.explain(runs=1).honoured


class TestModules:
    def test_runs_and_is_left_alone(self, net: Any, x: Any) -> None:
        before = {name: (value.data_ptr(), value.clone()) for name, value in net.state_dict().items()}
        with xrt.InferenceSession(net, example_inputs=(torch.from_numpy(x),), precision="fp16") as session:
            session.run({"x": x})
        for name, value in net.state_dict().items():
            assert value.data_ptr() == before[name][0]
            assert torch.equal(value, before[name][1])
        assert not net.training

    def test_nodes_go_by_module_paths(self, net: Any, x: Any) -> None:
        with xrt.InferenceSession(net, example_inputs={"x": torch.from_numpy(x)}) as session:
            names = [node.name for node in session.model.nodes]
            report = session.explain(runs=1)
        assert {"norm/native_layer_norm", "head/addmm"} <= set(names)
        assert sorted(n for unit in report.units for n in unit.source_nodes) == sorted(names)
        assert report.honoured

    def test_the_digest_follows_the_weights(self, net: Any, x: Any) -> None:
        def digest() -> str:
            return xrt.plan(net, example_inputs=(torch.from_numpy(x),)).model.sha256

        one = digest()
        assert digest() == one
        with torch.no_grad():
            net.head.weight[0, 0] += 1
        assert digest() != one

    def test_training_mode_is_refused(self, net: Any, x: Any) -> None:
        with pytest.raises(xrt.ModelError, match=r"training mode.*\.eval\(\)"):
            xrt.InferenceSession(net.train(), example_inputs=(torch.from_numpy(x),))

    def test_examples_are_needed(self, net: Any) -> None:
        with pytest.raises(xrt.InputError, match="pass example_inputs"):
            xrt.InferenceSession(net)
        with pytest.raises(xrt.InputError, match=r"is a list\. Fix: pass a torch tensor"):
            xrt.InferenceSession(net, example_inputs=([1.0],))

    def test_examples_that_do_not_fit(self, net: Any, x: Any) -> None:
        with pytest.raises(xrt.InputError, match=r"do not fit forward\(x, scale\) of <Net>: .*; got y"):
            xrt.InferenceSession(net, example_inputs={"y": torch.from_numpy(x)})
        with pytest.raises(xrt.InputError, match="too many positional arguments"):
            xrt.InferenceSession(net, example_inputs=(torch.from_numpy(x),) * 3)
        with pytest.raises(xrt.ModelError, match=r"'<Net>'.*channels.*Fix: pass example_inputs that it runs on"):
            xrt.InferenceSession(net, example_inputs=(torch.zeros(3, 4, 16),))

    def test_torchscript_is_refused(self, net: Any) -> None:
        relu = torch.jit.trace(torch.nn.ReLU().eval(), torch.zeros(1))
        with pytest.raises(xrt.ModelError, match=r"TorchScript.*Fix: give the module that it was made from"):
            xrt.InferenceSession(relu, example_inputs=(torch.zeros(1),))

    def test_a_checkpoint_is_no_program(self, net: Any, tmp_path: Path, capfd: Any) -> None:
        torch.save(net.state_dict(), tmp_path / "net.pt2")
        with pytest.raises(xrt.ModelError, match=r"checkpoint of PyTorch.*Fix: export it again with torch\.export"):
            xrt.InferenceSession(tmp_path / "net.pt2")
        assert capfd.readouterr() == ("", "")

    def test_a_result_that_is_no_tensor(self) -> None:
        class Answer(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return {"y": x, "n": 3}

        with pytest.raises(xrt.ModelError, match="'n' is a int, not a tensor"):
            xrt.InferenceSession(Answer().eval(), example_inputs=(torch.zeros(1),))

    def test_control_flow_that_depends_on_inputs_is_told(self) -> None:
        class Branch(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return torch.relu(x) if float(x.sum()) > 0 else torch.sigmoid(x)

        with xrt.InferenceSession(Branch().eval(), example_inputs=(torch.ones(4),)) as session:
            report = session.explain({"x": -np.ones(4, np.float32)}, runs=1)
        assert report.partial
        assert any("control flow" in note for note in report.notes)

    def test_it_needs_the_torch_engine(self, net: Any, x: Any) -> None:
        with pytest.raises(xrt.UnsupportedOperationError, match="takes an ONNX model"):
            xrt.InferenceSession(net, engine="onnxruntime", example_inputs=(torch.from_numpy(x),))


class TestRunning:
    def test_torch_in_torch_out(self, program: Path, x: Any) -> None:
        tensor = torch.from_numpy(x)
        with xrt.InferenceSession(program) as session:
            for _ in range(3):
                out = session.run({"x": tensor})
            assert all(isinstance(value, torch.Tensor) for value in out.values())
            assert not out["hidden"].requires_grad
            with pytest.raises(xrt.InputError, match="requires grad"):
                session.run({"x": tensor.clone().requires_grad_()})

    def test_a_result_can_be_differentiated_further(self, program: Path, x: Any) -> None:
        weight = torch.ones(5, requires_grad=True)
        with xrt.InferenceSession(program) as session:
            (session.run({"x": torch.from_numpy(x)})["more_0"] * weight).sum().backward()
        assert weight.grad is not None

    def test_bound_buffers_of_torch(self, program: Path, x: Any) -> None:
        given, result = torch.from_numpy(x.copy()), torch.zeros(3, 4, 5)
        with xrt.InferenceSession(program) as session:
            binding = session.bind({"x": given}, {"more_0": result})
            binding.run()
            want = session.run({"x": x})["more_0"]
            np.testing.assert_array_equal(result.numpy(), want)
            given.zero_()
            binding.run()
            assert not np.array_equal(result.numpy(), want)

    def test_a_bound_buffer_is_never_broadcast_into(self, tmp_path: Path) -> None:
        class Found(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return torch.nonzero(x)

        x = torch.ones(4)
        torch.export.save(torch.export.export(Found(), (x,)), tmp_path / "found.pt2")
        with xrt.InferenceSession(tmp_path / "found.pt2", device="cpu") as session:
            name = session.outputs[0].name
            for outputs in ({}, {name: torch.zeros(4, 1, dtype=torch.int64)}):
                binding = session.bind({"x": x.clone()}, outputs)
                binding.run()
                binding.inputs["x"][:3] = 0
                with pytest.raises(xrt.InputError, match=r"from int64 \[4, 1\] to int64 \[1, 1\].*Fix: "):
                    binding.run()
                np.testing.assert_array_equal(binding.outputs[name], [[0], [1], [2], [3]])


class TestSwitches:
    def test_they_go_back(self, program: Path) -> None:
        before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
        policy = {"execution": {"threads": 1, "determinism": "run_to_run"}}
        with xrt.InferenceSession(program, policy=policy) as session:
            assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == (1, True)
            assert session.explain(runs=1).honoured
        assert (torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()) == before

    def test_casts_of_the_program_change_no_run(self, program: Any) -> None:
        with xrt.InferenceSession(program, policy={"mode": "strict", "execution": {"precision": "fp32"}}) as session:
            sizes = {
                tensor.name: [2 if isinstance(size, str) else size for size in tensor.shape]
                for tensor in session.inputs
            }
            x = {name: torch.randn(size) for name, size in sizes.items()}
            want = session.run(x)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                got = session.run(x)
                binding = session.bind(x)
                binding.run()
                report = session.explain(x, runs=1)
            assert torch.is_autocast_enabled("cpu") is False
            for name, output in want.items():
                assert torch.equal(got[name], output)
                assert torch.equal(torch.as_tensor(binding.outputs[name]), output)
            assert report.honoured

    def test_attention_of_modules_runs_where_a_policy_reaches_it(self) -> None:
        """Without gradients such a layer runs one kernel of its own, but not while it is watched."""
        layer, x = torch.nn.TransformerEncoderLayer(8, 2, batch_first=True).eval(), torch.randn(2, 4, 8)
        fast = torch.backends.mha.get_fastpath_enabled

        def ran(kernels: Any) -> set[str]:
            policy = {"mode": "strict", "kernels": kernels}
            with xrt.InferenceSession(layer, example_inputs=(x,), policy=policy, device="cpu") as session:
                with torch.profiler.profile() as seen:
                    session.run({session.inputs[0].name: x})
                with xrt.InferenceSession(layer, example_inputs=(x,), policy=policy, device="cpu"):
                    assert fast() is ("attention" not in kernels)
                assert fast() is ("attention" not in kernels)
            assert fast()
            return {event.name for event in seen.events()}

        assert "aten::_transformer_encoder_layer_fwd" in ran({"layer_norm": "cpu.vectorised"})
        found = ran({"attention": "cpu.reference"})
        assert "aten::scaled_dot_product_attention" in found
        assert "aten::_transformer_encoder_layer_fwd" not in found

    def test_two_sessions_cannot_hold_two_values(self, program: Path) -> None:
        with xrt.InferenceSession(program, policy={"execution": {"threads": 1}}):
            with pytest.raises(xrt.EngineError, match=r"num_threads is one for the whole process.*holds it at 1"):
                xrt.InferenceSession(program, policy={"execution": {"threads": 2}})
            assert torch.get_num_threads() == 1


class TestPlans:
    @pytest.mark.parametrize(
        ("policy", "message"),
        [
            ({"execution": {"precision": "int8"}}, "does not quantize"),
            ({"execution": {"device": "cuda:0"}}, "cuda:0 was not found"),
            ({"execution": {"device": "npu", "engine": "torch"}}, "PyTorch has no device 'npu'"),
            ({"execution": {"provider_options": {"torch": {"mode": "fast"}}}}, "'fast' is not one of"),
            ({"execution": {"provider_options": {"torch": {"fullgraph": True}}}}, "an option of torch.compile"),
            ({"mode": "strict", "kernels": {"matmul": "cublasLt"}}, "cublasLt does not run on cpu"),
        ],
    )
    def test_refusals(self, program: Path, policy: Any, message: str) -> None:
        with pytest.raises(xrt.XpuRuntimeError, match=message):
            xrt.InferenceSession(program, policy=policy)

    def test_a_machine_without_torch(self, program: Path) -> None:
        gone = EngineFacts(name="torch", reason="torch is not installed")
        machine = machine_snapshot([default_registry().get("onnxruntime")]).with_engines({"torch": gone})
        with pytest.raises(xrt.EngineError, match=r'pip install "torch'):
            xrt.plan(program, machine=machine)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about itself
def test_compiled(program: Path, net: Any, x: Any) -> None:
    policy = {"execution": {"provider_options": {"torch": {"mode": "compile", "fullgraph": True}}}}
    with xrt.InferenceSession(program, policy=policy) as session:
        got = session.run({"x": x})
        report = session.explain({"x": x}, runs=2)
    np.testing.assert_allclose(got["more_0"], wanted(net, x)["more_0"], rtol=1e-4, atol=1e-5)
    (unit,) = report.units
    assert unit.relation == "opaque"
    assert set(unit.source_nodes) == {node.name for node in session.model.nodes}
