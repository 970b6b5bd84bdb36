# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`parity`: a module against the session that serves it, layer by layer, and the layer that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
from torch_models import batch, convnet, language  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both models in both formats."""
    pytest.importorskip("onnxscript", reason="export to ONNX needs onnxscript, which comes with xpuruntime[torch]")
    folder = tmp_path_factory.mktemp("exported")
    model, ids = language()
    xt.export(model, ids, folder / "language.onnx", dynamic_shapes=({0: batch()},))
    xt.export(model, ids, folder / "language.pt2", dynamic_shapes=({0: batch()},))
    model, images = convnet()
    xt.export(model, images, folder / "convnet.onnx")
    return folder


def modules(found: Any) -> list[str]:
    return [layer.module for layer in found.layers]


@pytest.mark.parametrize("name", ["language.onnx", "language.pt2"])
def test_every_layer_of_a_transformer(exported: Path, name: str) -> None:
    model, _ = language()
    ids = torch.arange(40).reshape(5, 8)
    with xrt.InferenceSession(exported / name, device="cpu") as session:
        parity = xt.parity(model, session, ids)
    assert parity.agreed, str(parity)
    assert parity.skipped == {}
    assert parity.first_diverging is None
    paths = [path for path, _ in model.named_modules() if path and path != "layers"]
    assert set(modules(parity)) == {*paths, ""}
    order = modules(parity)
    assert order.index("layers.0.attn.qkv") < order.index("layers.0.attn") < order.index("layers.0")
    assert order[-1] == ""
    assert parity.layers[0].shape == (5, 8, 32)


def test_a_convnet_with_a_folded_norm_and_a_module_called_twice(exported: Path) -> None:
    model, images = convnet()
    with xrt.InferenceSession(exported / "convnet.onnx", device="cpu") as session:
        parity = xt.parity(model, session, images)
    assert parity.agreed, str(parity)
    assert [(layer.module, layer.call) for layer in parity.layers] == [
        ("bn", 0), ("again", 0), ("again", 1), ("pool", 0), ("head", 0), ("", 0)
    ]  # fmt: skip
    assert set(parity.skipped) == {"stem", "drop"}
    assert "folded away" in parity.skipped["stem"]
    assert "again call 1" in str(parity)


@pytest.mark.parametrize("layer", ["layers.1.attn.proj", "layers.0.mlp.2", "head"])
def test_the_layer_with_another_weight_is_found(exported: Path, tmp_path: Path, layer: str) -> None:
    import onnx

    model, ids = language()
    proto = onnx.load(exported / "language.onnx")
    node = next(node for node in proto.graph.node if node.name == f"{layer}/MatMul")
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == node.input[1])
    values = onnx.numpy_helper.to_array(weight).copy()
    values.flat[7] += 0.5
    weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
    onnx.save(proto, tmp_path / "other.onnx")
    with pytest.warns(xrt.XpuRuntimeWarning, match="other weights"):
        session = xrt.InferenceSession(tmp_path / "other.onnx", device="cpu", policy={})
    with session:
        parity = xt.parity(model, session, ids)
    assert not parity.agreed
    assert parity.first_diverging is not None
    assert parity.first_diverging.module == layer
    assert f"first diverging layer: {layer} (Linear): largest difference" in str(parity)
    plain = json.loads(json.dumps(parity.to_dict()))
    assert plain["first_diverging"] == layer
    assert plain["agreed"] is False
    assert len(plain["layers"]) == len(parity.layers)


class TestModules:
    """Sessions of a module itself: no export is needed."""

    def test_the_module_itself(self) -> None:
        model, ids = language()
        with xrt.InferenceSession(model, device="cpu", example_inputs=(ids,)) as session:
            parity = xt.parity(model, session, {"ids": ids})
        assert parity.agreed
        assert parity.skipped == {}, "statistics of norms are no results"
        assert all(layer.max_abs == 0 for layer in parity.layers)

    def test_a_lower_precision_has_its_own_tolerance(self) -> None:
        model, ids = language()
        with xrt.InferenceSession(model, device="cpu", example_inputs=(ids,), precision="bf16") as session:
            parity = xt.parity(model, session, ids)
            exact = xt.parity(model, session, ids, rtol=1e-4, atol=1e-5)
        assert (parity.rtol, parity.cosine) == (4e-2, 0.995)
        assert parity.agreed, str(parity)
        assert exact.first_diverging is not None
        assert exact.first_diverging.module == "tokens"
        assert exact.cosine == 0.995

    def test_another_module(self) -> None:
        model, ids = language()
        other, _ = language(seed=1)
        other.load_state_dict({**model.state_dict(), "layers.1.ln2.bias": torch.ones(32)})
        with xrt.InferenceSession(other, device="cpu", example_inputs=(ids,)) as session:
            parity = xt.parity(model, session, ids)
        assert parity.first_diverging is not None
        assert parity.first_diverging.module == "layers.1.ln2"

    def test_several_results(self) -> None:
        class Two(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return x + 1, x.argmax(-1)

        class Around(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.two = Two()

            def forward(self, x: Any) -> Any:
                a, b = self.two(x)
                return {"sum": a * 2, "best": b + 0}

        model, x = Around().eval(), torch.randn(3, 4)
        with xrt.InferenceSession(model, device="cpu", example_inputs=(x,)) as session:
            parity = xt.parity(model, session, x)
        assert parity.agreed
        assert [layer.name for layer in parity.layers] == ["two", "two [1]", "(results)", "(results) [1]"]

    def test_hooks_are_taken_away(self) -> None:
        model, ids = language()
        with xrt.InferenceSession(model, device="cpu", example_inputs=(ids,)) as session:
            xt.parity(model, session, ids)
        assert not any(part._forward_hooks for part in model.modules())

    def test_what_does_not_fit_is_refused(self) -> None:
        model, ids = language()
        with xrt.InferenceSession(model, device="cpu", example_inputs=(ids,)) as session:
            with pytest.raises(xrt.InputError, match="2 inputs are given, and the session takes ids"):
                xt.parity(model, session, (ids, ids))
            with pytest.raises(xrt.InputError, match="inputs x are given"):
                xt.parity(model, session, {"x": ids})
            with pytest.raises(xrt.ModelError, match="training mode"):
                xt.parity(language()[0].train(), session, ids)


class Many(torch.nn.Module):
    """Takes a list, a number and a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, xs: Any, times: int = 1, *, more: Any = None) -> Any:
        out = self.first(xs[0]) - times * self.second(xs[1])
        return {"out": out if more is None else out + 3 * more, "pair": (out, None)}


@pytest.mark.parametrize("ending", ["onnx", "pt2"])
@pytest.mark.parametrize("by_name", [False, True])
def test_inputs_as_export_takes_them(tmp_path: Path, ending: str, by_name: bool) -> None:
    if ending == "onnx":
        pytest.importorskip("onnxscript", reason="export to ONNX needs onnxscript, which comes with xpuruntime[torch]")
    model = Many().eval()
    xs = [torch.randn(2, 4), torch.randn(2, 4)]
    inputs = {"more": torch.randn(2, 4), "times": 2, "xs": xs} if by_name else (xs, 3)
    xt.export(model, inputs, tmp_path / f"model.{ending}")
    with xrt.InferenceSession(tmp_path / f"model.{ending}", device="cpu") as session:
        assert len(session.inputs) == 2 + by_name
        parity = xt.parity(model, session, inputs)
        assert parity.agreed, str(parity)
        assert {"first", "second", ""} <= set(modules(parity))
        with pytest.raises(xrt.InputError, match="1 inputs are given, and the session takes"):
            xt.parity(model, session, (xs[:1], 2))


def test_inputs_of_another_kind(exported: Path) -> None:
    model, ids = language()
    with xrt.InferenceSession(exported / "language.pt2", device="cpu") as session:
        assert xt.parity(model, session, ids.numpy()).agreed
        with pytest.raises(xrt.InputError, match=r"inputs is a NoneType\. Fix: pass a tensor"):
            xt.parity(model, session, None)
        with pytest.raises(xrt.InputError, match="takes an InferenceSession, got a str"):
            xt.parity(model, "language.pt2", ids)  # type: ignore[arg-type]


def test_types_that_numpy_lacks(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="export to ONNX needs onnxscript, which comes with xpuruntime[torch]")
    pytest.importorskip("openvino", reason="it takes bfloat16 on the CPU: `make engines`")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2)).bfloat16().eval()
    x = torch.randn(3, 4, dtype=torch.bfloat16)
    xt.export(model, x, tmp_path / "model.onnx")
    with xrt.InferenceSession(tmp_path / "model.onnx", device="cpu", engine="openvino") as session:
        parity = xt.parity(model, session, x)
    assert parity.agreed, str(parity)
    assert modules(parity) == ["0", "1", "2", ""]
    assert parity.rtol == 4e-2


def test_values_that_are_not_finite() -> None:
    class Odd(torch.nn.Module):
        def __init__(self, last: float) -> None:
            super().__init__()
            self.register_buffer("c", torch.tensor([float("inf"), float("nan"), 1.0, last]))

        def forward(self, x: Any) -> Any:
            return self.c + x * 0

    x = torch.zeros(4)
    with xrt.InferenceSession(Odd(2.0).eval(), device="cpu", example_inputs=(x,)) as session:
        assert xt.parity(Odd(2.0).eval(), session, x).agreed
        worse = xt.parity(Odd(float("nan")).eval(), session, x)
    assert "1 elements are finite that are not in the reference" in worse.layers[-1].reason
    assert np.isfinite(worse.layers[-1].max_abs)


@pytest.mark.parametrize("limit", [{"rtol": -1}, {"rtol": "1e-3"}, {"atol": float("nan")}, {"cosine": True}])
def test_limits_are_numbers(limit):
    net, x = torch.nn.Linear(4, 2).eval(), torch.ones(3, 4)
    opened = xrt.InferenceSession(net, device="cpu", example_inputs=(x,))
    with opened as session, pytest.raises(xrt.InputError, match=f"{next(iter(limit))} is "):
        xt.parity(net, session, x, **limit)
