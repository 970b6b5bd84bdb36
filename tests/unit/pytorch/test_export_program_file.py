# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Modules written as programs of PyTorch: what the file has, and what is left where none can be written."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
from exported_language import export_language, ours  # noqa: E402
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
