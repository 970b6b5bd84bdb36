# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Modules written as ONNX: their nodes go by module paths, and the file carries policy, marks and lock."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
pytest.importorskip("onnxscript", reason="export to ONNX needs onnxscript, which comes with xpuruntime[torch]")
import onnx  # noqa: E402
from torch_models import batch, convnet, language  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.ops import fused_attention, fused_layernorm, fused_rms_norm  # noqa: E402

pytestmark = pytest.mark.torch
RULES = [
    {"match": {"op": "matmul", "phase": "backward"}, "use": "cpu.reference"},
    {"match": {"module": "layers.*.attn", "op": "attention"}, "use": "cpu.reference"},
    {"match": {"node": "layers.1.ln2"}, "use": "cpu.reference"},
    {"match": {"module": "layers.9"}, "use": "cpu.reference"},
]
POLICY = xrt.Policy(kernels={"matmul": "cpu.blas", "layer_norm": "cpu.vectorised", "rules": RULES})
#: What each module must run in inference, whatever the engine calls its nodes.
KERNELS = {
    **{f"layers.{i}.{part}": "cpu.blas" for i in (0, 1) for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")},
    **{f"layers.{i}.attn": "cpu.reference" for i in (0, 1)},
    **dict.fromkeys(("layers.0.ln1", "layers.0.ln2", "layers.1.ln1", "ln"), "cpu.vectorised"),
    "layers.1.ln2": "cpu.reference",
    "head": "cpu.blas",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exported")


@pytest.fixture(scope="module")
def done(folder: Path) -> Any:
    model, ids = language()
    threads = torch.get_num_threads()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        export = xt.export(
            model, ids, folder / "language.onnx", policy=POLICY,
            input_names=["ids"], output_names=["logits"], dynamic_shapes=({0: batch()},),
        )  # fmt: skip
    assert torch.get_num_threads() == threads
    assert not any(part.training for part in model.modules())
    return export


@pytest.fixture(scope="module")
def graph(done: Any) -> Any:
    proto = onnx.load(done.path)
    onnx.checker.check_model(proto, full_check=True)
    return proto


class TestGraph:
    def test_attention_and_norms_are_one_node_each(self, graph: Any) -> None:
        kinds = [node.op_type for node in graph.graph.node]
        assert kinds.count("Attention") == 2
        assert kinds.count("LayerNormalization") == 5
        assert "Softmax" not in kinds
        assert graph.opset_import[0].version == 23

    def test_nodes_go_by_module_paths(self, graph: Any) -> None:
        names = [node.name for node in graph.graph.node]
        assert len(set(names)) == len(names)
        assert {"layers.0.attn/Attention", "layers.1.mlp.2/MatMul", "layers.1.mlp.1/Gelu", "ln/LayerNormalization"} <= {
            *names
        }
        model, _ = language()
        paths = {path for path, _ in model.named_modules()}
        assert {name.rpartition("/")[0] for name in names} <= paths
        assert "layers.0.attn/Split" in names, "a node that the exporter says nothing of"

    def test_nothing_of_the_machine_is_in_it(self, done: Any) -> None:
        assert str(Path(__file__).parent).encode() not in done.path.read_bytes()
        assert b"torch_models.py" not in done.path.read_bytes()

    def test_the_first_dimension_is_free(self, done: Any) -> None:
        model, _ = language()
        ids = torch.arange(24).reshape(3, 8)
        with xrt.InferenceSession(done.path, device="cpu", engine="onnxruntime", policy={}) as session:
            assert [t.shape for t in session.inputs] == [("batch", 8)]
            got = session.run({"ids": ids.numpy()})["logits"]
        with torch.no_grad():
            np.testing.assert_allclose(got, model(ids).numpy(), rtol=1e-4, atol=1e-5)


class TestPolicy:
    def test_it_is_translated(self, done: Any, graph: Any) -> None:
        carried = {entry.key: entry.value for entry in graph.metadata_props}["xpuruntime.policy"]
        assert xrt.Policy.loads(carried, "json") == done.policy
        rules = done.policy.kernels.rules
        assert [(rule.match.module, rule.match.node) for rule in rules] == [
            ("layers.*.attn", "layers.*.attn/*"),
            ("layers.1.ln2", "layers.1.ln2/*"),
        ]
        told = "\n".join(done.notes)
        assert "kernels.rules[0] is left out: it is for backward" in told
        assert "kernels.rules[2]: node 'layers.1.ln2' names modules" in told
        assert "kernels.rules[3] is left out: module 'layers.9' names no module" in told

    def test_nodes_that_a_rule_pins_are_marked(self, done: Any, graph: Any) -> None:
        marks = {
            node.name: entry.value
            for node in graph.graph.node
            for entry in node.metadata_props
            if entry.key == "xpuruntime.kernel"
        }
        assert marks == dict.fromkeys(
            ("layers.0.attn/Attention", "layers.1.attn/Attention", "layers.1.ln2/LayerNormalization"), "cpu.reference"
        )
        assert done.pinned == {name: (kernel,) for name, kernel in marks.items()}
        assert "layers.0.attn/Attention: cpu.reference" in str(done)

    def test_the_same_kernels_run(self, done: Any) -> None:
        with xrt.InferenceSession(done.path, device="cpu", engine="onnxruntime") as session:
            assert session.plan.policy_source == "model metadata"
            report = session.explain(runs=1)
        kernels = {unit.id.rpartition("/")[0]: unit.kernel for unit in report.units if unit.kernel in KERNELS.values()}
        assert kernels == KERNELS
        seen = {observation.key: observation.status for observation in report.observations}
        assert seen["kernels.matmul"] == seen["kernels.rules[0]"] == seen["kernels.rules[1]"] == "honoured"

    def test_the_one_in_force_without_its_machine(self, folder: Path) -> None:
        model, images = convnet()
        held = xrt.Policy(
            execution={"device": "cpu", "threads": 1, "determinism": "run_to_run"}, kernels={"matmul": "cpu.blas"}
        )
        with xt.kernel_policy(held):
            xrt.clear_decisions()
            with torch.no_grad():
                model(images)
            before = xrt.decisions()
            export = xt.export(model, {"image": images}, folder / "inforce.onnx", precision="fp32")
            assert xrt.decisions() == before, "no policy holds while it is traced"
        assert export.policy == xrt.Policy(
            execution={"determinism": "run_to_run", "precision": "fp32"}, kernels={"matmul": "cpu.blas"}
        )
        (kernel,) = export.lock.kernels
        assert (kernel.op, kernel.dtype, kernel.kernel.partition("@")[0]) == ("matmul", "fp32", "cpu.blas")
        nodes = {node.name: node for node in onnx.load(export.path).graph.node}
        assert {"again/Conv", "again/Conv_1", "stem/Conv"} <= set(nodes), "a module that is called twice"
        said = {entry.key: entry.value for entry in nodes["stem/Conv"].metadata_props}
        assert said["xpuruntime.result_of"] == "bn", "the normalization was folded into the convolution"


class TestLock:
    def test_what_it_says(self, done: Any) -> None:
        lock = done.lock
        assert lock.torch == torch.__version__
        assert lock.opset == 23
        assert "onnxscript" in lock.exporter
        assert (lock.device, lock.arch) == ("cpu", "")
        with xrt.InferenceSession(done.path, device="cpu", engine="onnxruntime", policy={}) as session:
            assert any(f"exported by torch {torch.__version__}" in note for note in session.plan.notes)

    def test_a_changed_weight_is_noticed(self, done: Any, tmp_path: Path) -> None:
        proto = onnx.load(done.path)
        tensor = next(t for t in proto.graph.initializer if t.name == "tokens.weight")
        tensor.raw_data = b"\0\0\0\0" + tensor.raw_data[4:]
        onnx.save(proto, tmp_path / "changed.onnx")
        with pytest.raises(xrt.LockError, match="other weights"):
            xrt.plan(tmp_path / "changed.onnx", policy={"mode": "strict"})


class TestFiles:
    def test_weights_in_a_file_of_their_own(self, folder: Path) -> None:
        model, images = convnet()
        export = xt.export(model, images, folder / "beside.onnx", external_data=True)
        (data,) = folder.glob("beside.onnx.*.data")
        assert any(data.name in note for note in export.notes)
        assert not any(path.name.startswith(".") for path in folder.iterdir()), "nothing is left over"
        with xrt.InferenceSession(export.path, device="cpu", engine="onnxruntime") as session:
            got = next(iter(session.run({session.inputs[0].name: images.numpy()}).values()))
        with torch.no_grad():
            np.testing.assert_allclose(got, model(images).numpy(), rtol=1e-4, atol=1e-5)

    def test_a_failed_export_leaves_what_was_there(self, tmp_path: Path) -> None:
        class Branch(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return x * 2 if float(x.sum()) > 0 else x

        target = tmp_path / "model.onnx"
        target.write_bytes(b"before")
        with pytest.raises(xrt.ModelError, match=r"torch\.onnx cannot export <.*Branch>"):
            xt.export(Branch().eval(), torch.ones(2), target)
        assert target.read_bytes() == b"before"
        assert list(tmp_path.iterdir()) == [target]


class Counting(torch.nn.Module):
    """Counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return x * self.calls


class TestState:
    def test_what_is_lost_is_said(self, tmp_path: Path) -> None:
        with pytest.warns(xrt.XpuRuntimeWarning, match=r"<Counting> changes 'calls' when it runs.*keeps no state"):
            export = xt.export(Counting().eval(), torch.ones(2), tmp_path / "model.onnx")
        assert "changes 'calls'" in "".join(export.notes)
        with pytest.warns(xrt.XpuRuntimeWarning, match="changes 'calls' when it runs, and no session opens"):
            export = xt.export(Counting().eval(), torch.ones(2), tmp_path / "model.pt2")
        assert "changes 'calls'" in "".join(export.notes)
        with pytest.raises(xrt.ModelError, match="it changes 'calls' when it runs"):
            xrt.InferenceSession(export.path, device="cpu")


class Fused(torch.nn.Module):
    """Calls our own operators, with kernels named or not."""

    def __init__(self, norm: str | None, attention: str | None) -> None:
        super().__init__()
        self.weight, self.bias = (torch.nn.Parameter(torch.rand(16)) for _ in range(2))
        self.norm, self.attention = norm, attention

    def forward(self, x: Any) -> Any:
        out, total = fused_layernorm(x, 16, self.weight, self.bias, residual=x, kernel=self.norm)
        heads = out.unflatten(-1, (2, 8)).transpose(1, 2)
        mixed = fused_attention(heads, heads, heads, is_causal=True, kernel=self.attention)
        return mixed.transpose(1, 2).flatten(2) + fused_rms_norm(total, 16, self.weight, kernel=self.norm)


class TestOurOperators:
    POLICY = xrt.Policy(
        kernels={"layer_norm": "cpu.vectorised", "rms_norm": "cpu.vectorised", "attention": "cpu.reference"}
    )

    def test_they_become_nodes_of_onnx(self, tmp_path: Path) -> None:
        model, x = torch.nn.Sequential(Fused(None, None)).eval(), torch.randn(2, 6, 16)
        export = xt.export(model, x, tmp_path / "model.onnx", policy=self.POLICY)
        kinds = [node.op_type for node in onnx.load(export.path).graph.node]
        assert {"LayerNormalization", "Attention", "RMSNormalization"} <= set(kinds)
        with xrt.InferenceSession(export.path, device="cpu", engine="onnxruntime", policy={}) as session:
            assert xt.parity(model, session, x).agreed

    def test_a_kernel_that_a_call_names_is_said_to_be_lost(self, tmp_path: Path) -> None:
        model, x = Fused("cpu.vectorised", "cpu.reference").eval(), torch.randn(2, 6, 16)
        with pytest.warns(xrt.XpuRuntimeWarning) as caught:
            xt.export(model, x, tmp_path / "model.onnx")
        said = [str(one.message).partition(" is exported")[0] for one in caught]
        assert said == [
            "fused_layernorm(kernel='cpu.vectorised')",
            "fused_attention(kernel='cpu.reference')",
            "fused_rms_norm(kernel='cpu.vectorised')",
        ]


class TestRefusals:
    def test_training_mode(self, tmp_path: Path) -> None:
        model, images = convnet()
        model.bn.train()
        with pytest.raises(xrt.ModelError, match=r"its part 'bn' is in training mode.*training=True"):
            xt.export(model, images, tmp_path / "model.onnx")
        assert model.bn.training
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        ("path", "options", "message"),
        [
            ("model.pt", {}, r"ends in \.onnx or in \.pt2"),
            ("nowhere/model.onnx", {}, "there is no folder"),
            ("model.pt2", {"opset": 23}, r"opset has no meaning for a \.pt2 file"),
            ("model.pt2", {"input_names": ["x"]}, "input_names has no meaning"),
            ("model.onnx", {"policy": {"kernels": {"matmul": "fastest"}}}, "fastest"),
            ("model.onnx", {"precision": "fp12"}, "fp12"),
            ("model.onnx", {"input_names": ["a", "b"]}, "has 1 inputs, and input_names has 2"),
            ("model.onnx", {"output_names": ["a", "b"]}, "has 1 outputs, and output_names has 2"),
            ("model.onnx", {"output_names": "y"}, "output_names is 'y'. Fix: pass a list of names"),
            ("model.onnx", {"input_names": ["x"], "output_names": ["x"]}, "'x' is twice among input_names"),
        ],
    )
    def test_arguments(self, tmp_path: Path, path: str, options: dict[str, Any], message: str) -> None:
        with pytest.raises(xrt.XpuRuntimeError, match=message):
            xt.export(torch.nn.Linear(2, 2).eval(), torch.ones(2), tmp_path / path, **options)

    def test_what_is_no_module(self, tmp_path: Path) -> None:
        with pytest.raises(xrt.InputError, match=r"takes a torch\.nn\.Module, got a function"):
            xt.export(lambda x: x, torch.ones(2), tmp_path / "model.onnx")  # type: ignore[arg-type]

    def test_a_missing_package_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        from importlib import util

        real = util.find_spec
        monkeypatch.setattr(util, "find_spec", lambda name: None if name == "onnxscript" else real(name))
        with pytest.raises(xrt.UnsupportedOperationError, match="needs the package onnxscript"):
            xt.export(torch.nn.Linear(2, 2).eval(), torch.ones(2), tmp_path / "model.onnx")


def test_what_leaves_the_choice_to_pytorch_leaves_it_to_the_engine(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)).eval()
    rule = {"match": {"op": "matmul", "module": "0"}, "use": "torch"}
    policy = xrt.Policy(mode="strict", kernels={"layer_norm": "torch", "rules": [rule]})
    done = xt.export(net, torch.zeros(2, 4), tmp_path / "net.onnx", policy=policy)
    assert done.policy.kernels.layer_norm == "auto"
    assert [rule.use for rule in done.policy.kernels.rules] == ["auto"]
    assert sum("'torch' became 'auto'" in note for note in done.notes) == 2
    with xrt.InferenceSession(tmp_path / "net.onnx", device="cpu", engine="onnxruntime") as session:
        assert session.run({session.inputs[0].name: torch.zeros(2, 4).numpy()})
