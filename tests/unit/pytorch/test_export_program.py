# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel policies that sessions of the torch engine enforce in exported programs, in memory and from a file."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
from exported_language import KERNELS, export_language, ours  # noqa: E402
from torch_models import convnet, language  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides.registry import installed  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(autouse=True)
def _nothing_is_left():
    yield
    xt.clear_kernel_policy()
    assert installed() == ()


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return export_language(tmp_path_factory.mktemp("exported"))


def served() -> dict[tuple[str, str], int]:
    """Return how many calls of an operation each kernel of ours has served."""
    counts: dict[tuple[str, str], int] = {}
    for decision in xrt.decisions():
        counts[decision.op, decision.chosen] = counts.get((decision.op, decision.chosen), 0) + decision.count
    return counts


class TestEnforced:
    def test_its_own_policy(self, done: Any) -> None:
        model, _ = language()
        ids = torch.arange(24).reshape(3, 8)
        with xrt.InferenceSession(done.path) as session:
            plan = session.plan
            assert plan.policy_source == "model metadata"
            assert {c.enforceability for c in plan.controls if c.key.startswith("kernels.")} == {"enforced"}
            report = session.explain({"ids": ids}, runs=1)
            got = session.run({"ids": ids})["output"]
        assert ours(report) == KERNELS
        seen = {observation.key: observation for observation in report.observations}
        assert seen["kernels.matmul"].observed == "cpu.blas (9 operators)"
        assert seen["kernels.rules[1]"].observed == "cpu.reference (1 operator)"
        assert report.honoured, report.headline
        with torch.no_grad():
            np.testing.assert_allclose(got.numpy(), model(ids).numpy(), rtol=1e-4, atol=1e-5)

    def test_the_module_itself(self, done: Any) -> None:
        model, ids = language()
        with xrt.InferenceSession(model, example_inputs=(ids,), policy=done.policy) as session:
            report = session.explain({"ids": ids}, runs=1)
        assert ours(report) == KERNELS
        assert not report.partial

    def test_runs_go_through_it(self, done: Any) -> None:
        _, ids = language()
        with xrt.InferenceSession(done.path) as session:
            xrt.clear_decisions()
            session.run({"ids": ids})
            first = served()
            session.run({"ids": ids.numpy()})
            binding = session.bind({"ids": ids})
            binding.run()
        assert first == {
            ("matmul", "cpu.blas"): 9,
            ("layer_norm", "cpu.vectorised"): 4,
            ("layer_norm", "cpu.reference"): 1,
            ("attention", "cpu.reference"): 2,
        }
        runs = {count / first[key] for key, count in served().items()}
        assert len(runs) == 1
        assert runs.pop() >= 3

    def test_a_rule_by_node(self) -> None:
        model, ids = language()
        rules = [{"match": {"node": "layers.1.*/addmm"}, "use": "cpu.reference"}]
        with xrt.InferenceSession(model, example_inputs=(ids,), policy={"kernels": {"rules": rules}}) as session:
            report = session.explain({"ids": ids}, runs=1)
        reached = {u.id for u in report.units if u.kernel == "cpu.reference"}
        assert reached == {f"layers.1.{part}/addmm" for part in ("attn.qkv", "attn.proj", "mlp.0", "mlp.2")}

    def test_a_kernel_that_refuses_is_told(self) -> None:
        model = torch.nn.Linear(4, 4).double().eval()
        x = torch.ones(2, 4, dtype=torch.float64)
        policy = {"kernels": {"matmul": ["null.nothing", "torch"]}}
        made = xrt.plan(model, example_inputs=(x,), policy=policy)
        control = made.control("kernels.matmul")
        assert control is not None
        assert control.resolved == "torch"
        assert "there is no kernel null.nothing for matmul" in control.reason


class TestApart:
    def test_a_policy_of_the_process_does_not_reach_in(self, done: Any) -> None:
        model, ids = language()
        with xt.kernel_policy(matmul="cpu.reference"), xrt.InferenceSession(done.path, policy={}) as session:
            xrt.clear_decisions()
            session.run({"ids": ids})
            assert xrt.decisions() == ()
            with torch.no_grad():
                model(ids)
            assert {decision.chosen for decision in xrt.decisions()} == {"cpu.reference"}

    def test_nor_one_of_a_session_out(self, done: Any) -> None:
        model, ids = language()
        with xrt.InferenceSession(done.path) as session:
            session.run({"ids": ids})
            xrt.clear_decisions()
            with torch.no_grad():
                model(ids)
            assert xrt.decisions() == ()
        assert installed() == ()

    def test_two_sessions_in_two_threads(self, done: Any) -> None:
        _, ids = language()
        other = xrt.Policy(kernels={"matmul": "cpu.reference"})
        with (
            xrt.InferenceSession(done.path) as one,
            xrt.InferenceSession(done.path, policy=other) as two,
        ):
            want = [session.run({"ids": ids})["output"] for session in (one, two)]
            wrong: list[str] = []

            def work(session: Any, expected: Any) -> None:
                for _ in range(20):
                    if not torch.equal(session.run({"ids": ids})["output"], expected):
                        wrong.append(repr(session))

            threads = [threading.Thread(target=work, args=pair) for pair in zip((one, two), want, strict=True)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert not wrong
        assert not torch.equal(*want), "the kernels round differently"

    def test_a_session_that_fails_to_load_leaves_nothing(self, done: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        from xpuruntime.engines.torch.program.sources import ExportedSource

        def broken(*_: Any) -> Any:
            raise RuntimeError("no memory today")

        monkeypatch.setattr(ExportedSource, "place", broken)
        with pytest.raises(xrt.EngineError, match="no memory today"):
            xrt.InferenceSession(done.path)
        assert installed() == ()


class TestPlan:
    @pytest.mark.parametrize(
        ("kernels", "key", "level", "reason"),
        [
            ({"matmul": "auto"}, "kernels.matmul", "enforced", "leaves the choice"),
            ({"matmul": "torch"}, "kernels.matmul", "enforced", "each call is served"),
            ({"matmul": "cublasLt"}, "kernels.matmul", "unsupported", "does not run on cpu"),
            ({"attention": "torch.cudnn"}, "kernels.attention", "unsupported", "runs on CUDA"),
            ({"matmul": "cpu.nothing"}, "kernels.matmul", "unsupported", "there is no kernel cpu.nothing"),
            ({"conv": "cpu.reference"}, "kernels.conv", "unsupported", "no conv was found in the model"),
            (
                {"rules": [{"match": {"node": "layers.0.attn.qkv/linear"}, "precision": "fp32"}]},
                "kernels.rules[0]",
                "unsupported",
                "converts a program as a whole",
            ),
            (
                {"rules": [{"match": {"node": "*/gelu"}, "use": "cpu.blas"}]},
                "kernels.rules[0]",
                "unsupported",
                "no operator in a module",
            ),
        ],
    )
    def test_what_can_be_held(self, done: Any, kernels: dict[str, Any], key: str, level: str, reason: str) -> None:
        made = xrt.plan(done.path, policy={"kernels": kernels})
        control = made.control(key)
        assert control is not None
        assert (control.enforceability, reason in control.reason) == (level, True), control

    def test_the_words_are_those_of_training(self) -> None:
        from xpuruntime.engines.torch.controls import NATIVE
        from xpuruntime.pytorch.dispatch.route import NATIVE_NAMES

        assert {op: set(words) for op, words in NATIVE.items()} == {
            op: set(words) for op, words in NATIVE_NAMES.items()
        }

    @pytest.mark.parametrize("mode", ["strict", "prefer"])
    def test_messages_name_keys_of_the_policy_that_was_stated(self, done: Any, mode: str) -> None:
        rules = [{"match": {"module": "head"}, "use": "torch"}]
        policy = {"mode": mode, "execution": {"precision": "bf16"}, "kernels": {"matmul": "cpu.blas", "rules": rules}}
        wanted = r"kernels\.matmul asks for cpu\.blas"

        def run() -> None:
            with xrt.InferenceSession(done.path, device="cpu", policy=policy) as session:
                session.run({"ids": language()[1]})

        if mode == "strict":
            with pytest.raises(xrt.UnsupportedOperationError, match=wanted):
                run()
        else:
            with pytest.warns(xrt.XpuRuntimeWarning, match=wanted):
                run()

    def test_strict_refuses_the_rest(self, done: Any) -> None:
        with pytest.raises(xrt.UnsupportedOperationError, match="does not run on cpu"):
            xrt.plan(done.path, policy={"mode": "strict", "kernels": {"matmul": "cublasLt"}})
        assert xrt.plan(done.path, policy={"mode": "strict", "kernels": {"matmul": "cpu.blas"}}).warnings == ()

    def test_compiled_programs_are_advisory(self, done: Any) -> None:
        execution = {"provider_options": {"torch": {"mode": "compile"}}}
        made = xrt.plan(done.path, policy={"execution": execution, "kernels": {"layer_norm": "cpu.vectorised"}})
        control = made.control("kernels.layer_norm")
        assert control is not None
        assert control.enforceability == "advisory"
        assert "what the compiler fuses" in control.reason

    def test_an_unmet_key_is_told(self, done: Any) -> None:
        with pytest.warns(xrt.XpuRuntimeWarning, match="does not run on cpu"):
            session = xrt.InferenceSession(done.path, policy={"kernels": {"matmul": "cublasLt"}})
        with session:
            xrt.clear_decisions()
            session.run({"ids": language()[1]})
            report = session.explain(runs=1)
        assert session.plan.control("kernels.matmul").enforceability == "unsupported"
        assert xrt.decisions() == ()
        assert {observation.key: observation.status for observation in report.observations}[
            "kernels.matmul"
        ] == "unsupported"

    def test_an_unmet_rule_still_comes_first(self, done: Any) -> None:
        rules = [{"match": {"module": "head"}, "use": "cublasLt"}]
        with pytest.warns(xrt.XpuRuntimeWarning, match="does not run on cpu"):
            session = xrt.InferenceSession(done.path, policy={"kernels": {"matmul": "cpu.blas", "rules": rules}})
        with session:
            report = session.explain(runs=1)
        kernels = {u.id: u.kernel for u in report.units if u.op == "aten.linear"}
        assert kernels.pop("head/linear") != "cpu.blas"
        assert set(kernels.values()) == {"cpu.blas"}


class TestIntermediates:
    def test_tensors_inside(self, done: Any) -> None:
        model, ids = language()
        with xrt.InferenceSession(done.path, policy={}) as session:
            names = [node.outputs[0] for node in session.model.nodes if node.name == "layers.0.ln1/layer_norm"]
            found = session.intermediates({"ids": ids.numpy()}, names)
            with pytest.raises(xrt.InputError, match="makes a tensor 'nothing'"):
                session.intermediates({"ids": ids}, ["nothing"])
        with torch.no_grad():
            want = model.layers[0].ln1(model.tokens(ids))
        np.testing.assert_array_equal(found[names[0]], want.numpy())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the compiler, about itself
def test_compiled_sessions_of_one_module_keep_their_own_kernels() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 4)).eval()
    x = torch.randn(3, 8)
    execution = {"provider_options": {"torch": {"mode": "compile"}}}
    tag = torch.compiler.config.cache_key_tag

    def observed(**kernels: str) -> tuple[str, ...]:
        policy = {"mode": "auto", "execution": execution, "kernels": kernels}
        with xrt.InferenceSession(model, example_inputs=(x,), policy=policy) as session:
            report = session.explain({"input": x}, runs=1)
            with torch.no_grad():
                np.testing.assert_allclose(session.run({"input": x})["output"], model(x), rtol=1e-4, atol=1e-5)
        return tuple(
            observation.observed for observation in report.observations if observation.key.startswith("kernels.")
        )

    # Products are looked up when compiled code runs; the norm is built into it.
    assert observed(matmul="cpu.blas", layer_norm="cpu.vectorised") == ("cpu.blas (2 calls)", "cpu.vectorised (1 call)")
    assert observed(matmul="cpu.reference", layer_norm="cpu.reference") == (
        "cpu.reference (2 calls)",
        "cpu.reference (1 call)",
    )
    xrt.clear_decisions()
    assert observed() == ()
    assert xrt.decisions() == ()
    assert torch.compiler.config.cache_key_tag == tag


class TestFile:
    def test_what_it_carries(self, done: Any) -> None:
        with zipfile.ZipFile(done.path) as archive:
            texts = {n.rpartition("/")[2]: archive.read(n) for n in archive.namelist() if "/extra/" in n}
        assert xrt.Policy.loads(texts["xpuruntime.policy"].decode(), "json") == done.policy
        assert set(texts) == {"xpuruntime.policy", "xpuruntime.lock", "xpuruntime.dimensions"}
        assert list(json.loads(texts["xpuruntime.dimensions"]).values()) == ["batch"]
        assert done.lock.exporter == "torch.export"
        rules = done.policy.kernels.rules
        assert [(rule.match.module, rule.match.node) for rule in rules] == [
            ("layers.*.attn", None), ("layers.1.ln2", None)
        ]  # fmt: skip

    @pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # by PyTorch 2.11, of its own reading
    def test_it_is_an_ordinary_program(self, done: Any) -> None:
        model, ids = language()
        with torch.no_grad():
            assert torch.equal(torch.export.load(done.path).module()(ids), model(ids))

    def test_nodes_go_by_module_paths(self, done: Any) -> None:
        with xrt.InferenceSession(done.path, policy={}) as session:
            names = [node.name for node in session.model.nodes]
        assert len(set(names)) == len(names)
        assert {"layers.0.attn/scaled_dot_product_attention", "layers.1.mlp.2/linear", "ln/layer_norm"} <= set(names)

    def test_a_module_that_is_called_twice(self, tmp_path: Path) -> None:
        model, images = convnet()
        xt.export(model, images, tmp_path / "convnet.pt2")
        with xrt.InferenceSession(tmp_path / "convnet.pt2") as session:
            names = {node.name for node in session.model.nodes}
        assert {"again/conv2d", "again/conv2d_1"} <= names

    def test_other_weights_are_told(self, done: Any, tmp_path: Path) -> None:
        program = torch.export.load(done.path)
        with torch.no_grad():
            program.state_dict["head.weight"][0, 0] += 1
        with zipfile.ZipFile(done.path) as archive:
            extra = {n.rpartition("/")[2]: archive.read(n).decode() for n in archive.namelist() if "/extra/" in n}
        torch.export.save(program, tmp_path / "other.pt2", extra_files=extra)
        assert any("other weights" in line for line in xrt.plan(tmp_path / "other.pt2", policy={}).warnings)
        assert not any("other weights" in line for line in xrt.plan(done.path, policy={}).warnings)

    def test_training_mode_where_it_is_asked_for(self, tmp_path: Path) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(), torch.nn.ReLU().eval()).train()
        model[2].eval()
        with pytest.raises(xrt.ModelError, match="in training mode"):
            xt.export(model, torch.ones(2, 4), tmp_path / "model.pt2")
        xt.export(model, torch.ones(2, 4), tmp_path / "model.pt2", training=True)
        assert [part.training for part in model] == [True, True, False]
        graph = torch.export.load(tmp_path / "model.pt2").graph
        (dropout,) = [node for node in graph.nodes if "dropout" in str(node.target)]
        assert dropout.args[2] is True

    def test_while_hooks_follow_modules(self, tmp_path: Path) -> None:
        model, ids = language()
        with xt.kernel_policy({"kernels": {"rules": [{"match": {"module": "head"}, "use": "cpu.reference"}]}}):
            export = xt.export(model, ids, tmp_path / "model.pt2")
            xrt.clear_decisions()
            with torch.no_grad():
                model(ids)
        assert [(decision.module, decision.chosen) for decision in xrt.decisions()] == [("head", "cpu.reference")]
        assert export.policy.kernels.rules[0].match.module == "head"
        with xrt.InferenceSession(export.path) as session:
            report = session.explain({"ids": ids}, runs=1)
        assert ours(report) == {"head": "cpu.reference"}

    def test_a_failed_export_leaves_nothing(self, tmp_path: Path) -> None:
        class Branch(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return x * 2 if float(x.sum()) > 0 else x

        with pytest.raises(xrt.ModelError, match=r"torch\.export cannot export <.*Branch>"):
            xt.export(Branch().eval(), torch.ones(2), tmp_path / "model.pt2")
        assert not list(tmp_path.iterdir())


FULL = """
import resource, sys, torch, xpuruntime as xrt, xpuruntime.pytorch as xt
net, room, target = torch.nn.Linear(300, 300).eval(), int(sys.argv[1]), sys.argv[2]
resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
try:
    xt.export(net, torch.ones(2, 300), target)
except xrt.XpuRuntimeError as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of the size of files")
@pytest.mark.parametrize("room", [20_000, 361_000])
def test_a_file_that_has_no_room_is_an_error(tmp_path: Path, room: int) -> None:
    target = tmp_path / "net.pt2"
    target.write_bytes(b"before")
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(room), str(target)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"cannot write '{target}'" in done.stdout
    assert target.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [target]
