# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CompileSuite`: what every engine that compiles must do, also where its device is not.

Subclass it in a test module of your engine, name the engine and the device, and run pytest::

    from xpuruntime.testing import CompileSuite


    class TestMyCompiler(CompileSuite):
        engine = "mine"
        device = "npu"
        execution = {"provider_options": {"mine": {"chip": "v3"}}}

It compiles only. What a compiled model computes is for `EngineSuite`, where there is a device.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

import xpuruntime as xrt
from xpuruntime.artifacts.manifest import Artifact, open_artifact
from xpuruntime.engines import default_registry
from xpuruntime.testing import models

if TYPE_CHECKING:
    from pathlib import Path

    import onnx

    from xpuruntime.engines import EngineRegistry

_THREADS = 4


class CompileSuite:
    """The conformance checks; see the module's text."""

    engine: ClassVar[str]
    device: ClassVar[str]
    execution: ClassVar[dict[str, Any]] = {}
    unsupported_op: ClassVar[str | None] = None

    def registry(self) -> EngineRegistry:
        """Return the registry that has the engine."""
        return default_registry()

    def compile(self, model: onnx.ModelProto, folder: Path, name: str = "m.xrt", **options: Any) -> Artifact:
        """Compile a model for the engine under test, in a folder that exists."""
        path = models.save(model, folder, external=options.pop("external", False))
        policy = {"execution": {**self.execution, **options.pop("execution", {})}}
        return xrt.compile_model(
            path,
            folder / name,
            device=self.device,
            engine=self.engine,
            policy=policy,
            registry=self.registry(),
            **options,
        )

    def test_says_that_it_compiles(self) -> None:
        """The engine is there, and declares what the other checks need."""
        engine = self.registry().get(self.engine)
        assert engine.compiles
        assert engine.probe().loadable

    def test_an_artifact(self, tmp_path: Path) -> None:
        """It is whole, reads back as written, says what it is tied to, and speaks of source nodes only."""
        artifact = self.compile(models.conv(batch=2), tmp_path)
        manifest = artifact.manifest
        assert manifest.engine == self.registry().get(self.engine).name
        assert manifest.entry in manifest.files
        assert all((artifact.folder / name).stat().st_size == facts.size for name, facts in manifest.files.items())
        assert manifest.target
        assert all(isinstance(value, str) and value for value in manifest.target.values())
        assert open_artifact(artifact.folder).manifest == manifest
        known = {node.name for node in manifest.model.nodes}
        assert {name for names in manifest.node_map.values() for name in names} <= known
        assert [path.name for path in tmp_path.iterdir() if path.suffix in (".new", ".part", ".old")] == []

    def test_the_same_twice(self, tmp_path: Path) -> None:
        """Two compilations of one model are tied to the same."""
        first = self.compile(models.mlp(batch=2), tmp_path, "first.xrt")
        second = self.compile(models.mlp(batch=2), tmp_path, "second.xrt")
        assert first.manifest.target == second.manifest.target
        assert first.manifest.node_map == second.manifest.node_map

    def test_what_is_there_is_not_replaced_unasked(self, tmp_path: Path) -> None:
        """A folder that exists is kept unless the caller says otherwise."""
        self.compile(models.mlp(batch=2), tmp_path)
        with pytest.raises(xrt.InputError, match="is there already"):
            self.compile(models.mlp(batch=2), tmp_path)
        assert self.compile(models.mlp(batch=4), tmp_path, overwrite=True).manifest.model.inputs[0].shape == (4, 64)

    def test_damage_is_refused(self, tmp_path: Path) -> None:
        """Each file, cut off or changed, makes the whole unusable, and the message names it."""
        for position in ("cut", "changed"):
            artifact = self.compile(models.mlp(batch=2), tmp_path, f"{position}.xrt")
            for name in artifact.manifest.files:
                path = artifact.folder / name
                data = path.read_bytes()
                path.write_bytes(data[: len(data) // 2] if position == "cut" else data[:-1] + bytes([data[-1] ^ 1]))
                with pytest.raises(xrt.ModelError, match=name):
                    open_artifact(artifact.folder)
                path.write_bytes(data)
            assert open_artifact(artifact.folder).manifest == artifact.manifest

    def test_several_builders_build_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Those who come while one builds take what it made."""
        engine = self.registry().get(self.engine)
        plain, count = type(engine).compile, []

        def counted(self: Any, *args: Any) -> Any:
            count.append(1)
            return plain(self, *args)

        monkeypatch.setattr(type(engine), "compile", counted)
        path = models.save(models.conv(batch=2), tmp_path)
        texts: list[Any] = []
        start = threading.Barrier(_THREADS)

        def work() -> None:
            start.wait()
            try:
                texts.append(
                    xrt.compile_model(
                        path,
                        tmp_path / "m.xrt",
                        device=self.device,
                        engine=self.engine,
                        policy={"execution": self.execution},
                        registry=self.registry(),
                    ).manifest
                )
            except xrt.InputError as error:  # it was there before this one looked
                texts.append(str(error))

        threads = [threading.Thread(target=work) for _ in range(_THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(texts) == _THREADS
        assert len(count) == 1
        manifests = [outcome for outcome in texts if not isinstance(outcome, str)]
        assert all(manifest == manifests[0] for manifest in manifests)
        assert all("is there already" in outcome for outcome in texts if isinstance(outcome, str))

    def test_weights_beside_the_model(self, tmp_path: Path) -> None:
        """External data goes into the artifact."""
        artifact = self.compile(models.mlp(batch=2), tmp_path, external=True)
        total = sum(facts.size for facts in artifact.manifest.files.values())
        (tmp_path / "model.onnx.data").unlink()
        assert total > 2 * 64 * 64
        assert open_artifact(artifact.folder).manifest == artifact.manifest

    def test_nodes_without_names(self, tmp_path: Path) -> None:
        """Nodes get names before the engine sees them."""
        model = models.mlp(batch=2)
        for node in model.graph.node:
            node.name = ""
        artifact = self.compile(model, tmp_path)
        assert len({node.name for node in artifact.manifest.model.nodes}) == 3

    def test_options_that_are_none(self, tmp_path: Path) -> None:
        """A misspelt option is refused before anything is compiled, and leaves nothing."""
        options = dict(self.execution.get("provider_options", {}))
        options[self.engine] = {**options.get(self.engine, {}), "no_such_option": 1}
        with pytest.raises(xrt.PolicyError, match="no_such_option"):
            self.compile(models.mlp(batch=2), tmp_path, execution={"provider_options": options})
        assert not (tmp_path / "m.xrt").exists()

    def test_what_fails_leaves_nothing(self, tmp_path: Path) -> None:
        """A model that the engine refuses is an xpuruntime error that names what is wrong, and no folder."""
        if self.unsupported_op is None:
            pytest.skip(f"{self.engine} declares that it compiles every operator")
        from onnx import TensorProto, helper

        node = helper.make_node(self.unsupported_op, ["x"], ["y"], name="odd")
        tensors = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]) for name in "xy"]
        graph = helper.make_graph([node], "odd", tensors[:1], tensors[1:])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)
        with pytest.raises(xrt.XpuRuntimeError, match="odd"):
            self.compile(model, tmp_path)
        assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == ["model.onnx"]
