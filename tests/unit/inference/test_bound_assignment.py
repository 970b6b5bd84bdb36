# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Bound buffers: nothing is run to bind, other arrays and sizes take their place, and caches are written in place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import pytest
from generation_folders import write_folder
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

IMAGES, _ = xrt.demo_images()


def write(folder: Path, nodes: Any, inputs: Any, outputs: Any, constants: Any = ()) -> Path:
    for node in nodes:
        node.name = node.output[0]
    graph = h.make_graph(nodes, "g", inputs, outputs, constants)
    opsets = [h.make_opsetid("", 17), h.make_opsetid("com.microsoft", 1)]
    onnx.save(h.make_model(graph, opset_imports=opsets, ir_version=9), folder / "model.onnx")
    return folder / "model.onnx"


def value(name: str, shape: Any, kind: int = T.FLOAT) -> Any:
    return h.make_tensor_value_info(name, kind, shape)


@pytest.fixture(params=["onnxruntime", "openvino"])
def engine(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


@pytest.fixture
def digits(engine: str) -> Iterator[xrt.InferenceSession]:
    with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", engine=engine) as session:
        yield session


def test_an_array_that_is_assigned_is_bound_also_with_other_sizes(digits: xrt.InferenceSession) -> None:
    bound = digits.bind({"image": IMAGES[:1].copy()})
    for rows in (1, 3, 2, 2):
        array = IMAGES[rows : 2 * rows].copy()
        bound.inputs["image"] = array  # type: ignore[index]
        for _ in range(2):
            bound.run()
            np.testing.assert_allclose(bound.outputs["logits"], digits.run({"image": array})["logits"], atol=1e-5)
            array[...] = IMAGES[:rows]  # the array itself is bound
    bound.inputs["image"] *= 1  # type: ignore[index]
    bound.inputs = {"image": IMAGES[:1].copy()}
    out = np.zeros((1, 10), np.float32)
    bound.run()
    bound.outputs["logits"] = out  # type: ignore[index]
    bound.run()
    assert bound.outputs["logits"] is out
    np.testing.assert_allclose(out, digits.run({"image": IMAGES[:1]})["logits"], atol=1e-5)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda b: b.inputs.__setitem__("image", IMAGES[:1].astype(np.float64)), "has dtype float64"),
        (lambda b: b.inputs.__setitem__("image", IMAGES[:1, 0]), "rank 3"),
        (lambda b: b.inputs.__setitem__("image", IMAGES[:, :, ::2]), "axis 2 must be 8|not C-contiguous"),
        (lambda b: b.inputs.__setitem__("image", (1, 1, 8, 8)), r"Fix: binding\.inputs\['image'\]\[\.\.\.\]"),
        (lambda b: b.inputs.__setitem__("picture", IMAGES), "no input 'picture'. Fix: .*image"),
        (lambda b: b.inputs["picture"], "no input 'picture'"),
        (lambda b: b.inputs.pop("image"), "cannot be taken out"),
        (lambda b: setattr(b.inputs, "image", IMAGES), r"Fix: binding\.inputs\['image'\] = array"),
        (lambda b: b.outputs.__setitem__("logits", np.zeros((1, 9), np.float32)), r"got float32 \[1, 9\]"),
    ],
)
def test_misuse_is_refused(digits: xrt.InferenceSession, misuse: Any, message: str) -> None:
    bound = digits.bind({"image": IMAGES[:1].copy()})
    with pytest.raises(xrt.InputError, match=message):
        misuse(bound)
    bound.run()
    np.testing.assert_allclose(bound.outputs["logits"], digits.run({"image": IMAGES[:1]})["logits"], atol=1e-5)


def test_values_of_zero_are_never_run(engine: str, tmp_path: Path) -> None:
    """A size of zero is refused by the operator, so that a run on empty buffers would fail."""
    path = write(
        tmp_path,
        [h.make_node("Resize", ["x", "", "", "size"], ["y"], mode="linear")],
        [value("x", [1, 2, "h", "w"]), value("size", [4], T.INT64)],
        [value("y", [1, 2, "h2", "w2"])],
    )
    with xrt.InferenceSession(path, device="cpu", engine=engine) as session:
        bound = session.bind({"x": (1, 2, 4, 4)})
        bound.inputs["x"][...] = np.arange(32).reshape(1, 2, 4, 4)
        earlier = []
        for size in (8, 6, 9):
            bound.inputs["size"][...] = [1, 2, size, size]
            bound.run()
            want = session.run(dict(bound.inputs))["y"]
            earlier.append((bound.outputs["y"], want))
            for got, kept in earlier:  # results of another size are left alone
                np.testing.assert_allclose(got, kept, atol=1e-5)
        assert session._open().conversions() == ()


def test_a_growing_state_is_handed_on_without_a_copy(engine: str, tmp_path: Path) -> None:
    path = write(
        tmp_path,
        [h.make_node("Concat", ["past", "x"], ["present"], axis=0)],
        [value("past", ["p", 4]), value("x", [1, 4])],
        [value("present", ["t", 4])],
    )
    with xrt.InferenceSession(path, device="cpu", engine=engine) as session:
        bound = session.bind({"past": (0, 4)})
        for step in range(5):
            bound.inputs["x"][...] = step
            bound.run()
            bound.inputs["past"] = bound.outputs["present"]  # type: ignore[index]
        np.testing.assert_array_equal(bound.inputs["past"][:, 0], np.arange(5))
        assert session._open().conversions() == ()


class TestCaches:
    """`GroupQueryAttention` writes its cache in place where past and present are one buffer."""

    HEADS, WIDTH, FULL = 2, 16, 32

    def model(self, folder: Path, *, read_twice: bool = False) -> Path:
        heads, width = self.HEADS, self.HEADS * self.WIDTH
        names = ["q", "k", "v", "pk", "pv", "lens", "total"]
        node = h.make_node(
            "GroupQueryAttention", names, ["y", "nk", "nv"], domain="com.microsoft", num_heads=heads, kv_num_heads=heads
        )
        nodes = [node, *([h.make_node("Neg", ["pk"], ["z"])] if read_twice else [])]
        rows, cache = ["b", 1, width], ["b", heads, "p", self.WIDTH]
        present = ["b", heads, "t", self.WIDTH]
        inputs = [value(n, rows) for n in "qkv"] + [value("pk", cache), value("pv", cache)]
        inputs.append(value("lens", ["b"], T.INT32))
        outputs = [value("y", rows), value("nk", present), value("nv", present)]
        total = numpy_helper.from_array(np.int32(9), "total")
        return write(folder, nodes, inputs, [*outputs, *([value("z", cache)] if read_twice else [])], [total])

    def feeds(self) -> dict[str, Any]:
        random = np.random.default_rng(0)
        rows = {n: random.standard_normal((1, 1, self.HEADS * self.WIDTH)).astype(np.float32) for n in "qkv"}
        cache = {n: np.zeros((1, self.HEADS, self.FULL, self.WIDTH), np.float32) for n in ("pk", "pv")}
        return {**rows, **cache, "lens": np.array([8], np.int32)}

    def test_one_buffer_of_past_and_present_is_not_copied(self, tmp_path: Path) -> None:
        feeds = self.feeds()
        policy = {"mode": "strict", "execution": {"engine": "onnxruntime", "device": "cpu"}}
        with xrt.InferenceSession(self.model(tmp_path), policy=policy) as session:
            want = session.run({name: array.copy() for name, array in feeds.items()})
            bound = session.bind(feeds, {"nk": feeds["pk"], "nv": feeds["pv"]})
            bound.run()
            np.testing.assert_allclose(bound.outputs["y"], want["y"], atol=1e-6)
            np.testing.assert_array_equal(feeds["pk"][:, :, 8], feeds["k"].reshape(1, self.HEADS, self.WIDTH))
            assert bound.outputs["nk"] is feeds["pk"]
            assert session._open().conversions() == ()

    @pytest.mark.parametrize("level", [None, 4])
    def test_a_decoder_keeps_its_state_between_steps(self, level: int | None, tmp_path: Path) -> None:
        """Prompt and steps write one cache, whose length the file states as that of the mask."""
        write_folder(tmp_path / "llm", level=level)
        policy = {"mode": "strict", "execution": {"engine": "onnxruntime", "device": "cpu"}}
        with xrt.InferenceSession(tmp_path / "llm" / "model.onnx", policy=policy) as session:
            past = [info.name for info in session.inputs if info.name.startswith("past")]

            def caches(length: int) -> dict[str, Any]:
                return {name: np.zeros((1, 1, length, 16), np.float32) for name in past}

            def whole(tokens: list[int]) -> Any:
                ids, mask = np.array([tokens]), np.ones((1, len(tokens)), np.int64)
                return session.run({"input_ids": ids, "attention_mask": mask, **caches(0)})["logits"][0, -1]

            tokens, state = [1, 2, 3, 4], caches(24)
            feeds = {"input_ids": np.array([tokens]), "attention_mask": np.ones((1, 4), np.int64), **state}
            present = {name.replace("past_key_values", "present"): array for name, array in state.items()}
            bound = session.bind(feeds, present)
            for _ in range(20):
                bound.run()
                logits = bound.outputs["logits"][0, -1]
                np.testing.assert_allclose(logits, whole(tokens), atol=1e-3)
                tokens.append(int(logits.argmax()))
                bound.inputs["input_ids"] = np.array([tokens[-1:]])  # type: ignore[index]
                bound.inputs["attention_mask"] = np.ones((1, len(tokens)), np.int64)  # type: ignore[index]
            assert all(bound.outputs[name] is array for name, array in present.items())
            assert session._open().conversions() == ()
            bound.run()  # the cache is full now
            bound.inputs["attention_mask"] = np.ones((1, 25), np.int64)  # type: ignore[index]
            with pytest.raises(xrt.XpuRuntimeError, match="present"):
                bound.run()

    @pytest.mark.parametrize("strict", [False, True])
    def test_a_cache_that_others_read_too_is_copied_or_refused(self, strict: bool, tmp_path: Path) -> None:
        feeds = self.feeds()
        policy = {"mode": "strict" if strict else "prefer", "execution": {"engine": "onnxruntime", "device": "cpu"}}
        with xrt.InferenceSession(self.model(tmp_path, read_twice=True), policy=policy) as session:
            outputs = {"nk": feeds["pk"], "nv": feeds["pv"]}
            if strict:
                with pytest.raises(xrt.InputError, match="'nk' shares memory with input 'pk'"):
                    session.bind(feeds, outputs)
                return
            session.bind(feeds, outputs).run()
            assert [conversion.what for conversion in session._open().conversions()] == [
                "output 'nk' copied after each bound run"
            ]
