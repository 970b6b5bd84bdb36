# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The precision that PyTorch's quantized operators multiply in, decided by PyTorch's own numbers."""

from __future__ import annotations

import warnings
from typing import Any

import pytest

import xpuruntime as xrt
from xpuruntime.engines.torch.names import multiplies_integers

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


class IntegerProduct(torch.nn.Module):
    """A product of int8 tensors, quantized by hand."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.register_buffer("weight", torch.randint(-60, 60, (64, 32), dtype=torch.int8, generator=generator))

    def forward(self, x: Any) -> Any:
        scale = x.abs().amax(-1, keepdim=True) / 127
        rounded = torch.round(x / scale).clamp(-127, 127).to(torch.int8)
        return torch._int_mm(rounded, self.weight).to(torch.float32) * scale


class Moved(torch.nn.Module):
    """int8 tensors that are moved and converted, and a product of floats."""

    def forward(self, x: Any, image: Any) -> Any:
        return x @ image.permute(1, 0).to(torch.float32), x.max(-1)


def quantized() -> Any:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 8)).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return net, torch.ao.quantization.quantize_dynamic(net, {torch.nn.Linear}, dtype=torch.qint8)


def explained(module: Any, inputs: tuple[Any, ...], precision: str) -> Any:
    policy = {"execution": {"engine": "torch", "device": "cpu", "precision": precision}}
    with xrt.InferenceSession(module, policy=policy, example_inputs=inputs) as session:
        return session.explain(runs=1)


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def test_a_product_of_integers_is_no_fp32() -> None:
    module = IntegerProduct().eval()
    exact = X.double() @ module.weight.double()
    assert (module(X) - exact).abs().max() / exact.abs().max() > 1e-3  # it rounds its activations
    report = explained(module, (X,), "fp32")
    (deviation,) = report.deviations
    assert deviation.key == "execution.precision"
    assert "aten._int_mm" in deviation.reason
    assert "_to_copy" not in deviation.reason
    assert explained(module, (X,), "model").honoured


def test_layers_that_quantize_their_inputs() -> None:
    net, module = quantized()
    assert (module(X) - net(X)).abs().max() / net(X).abs().max() > 1e-3
    report = explained(module, (X,), "fp32")
    assert [deviation.key for deviation in report.deviations] == ["execution.precision"]
    ran = {unit.op: unit.precision_run for unit in report.units if "linear" in unit.op}
    assert set(ran.values()) == {"int8"}
    assert explained(module, (X,), "model").honoured


def test_integers_that_are_only_moved_are_no_deviation() -> None:
    image = torch.randint(-8, 8, (16, 64), dtype=torch.int8)
    assert explained(Moved().eval(), (X, image), "fp32").honoured


@pytest.mark.parametrize(
    ("op", "integers"),
    [
        ("aten._int_mm", True),
        ("quantized.linear_dynamic.default", True),
        ("quantized.conv2d_relu.new", True),
        ("quantized::linear", True),
        ("onednn.qlinear_pointwise", True),
        ("aten._weight_int8pack_mm", False),
        ("aten._weight_int4pack_mm_for_cpu", False),
        ("quantized.linear_dynamic_fp16", False),
        ("quantized.linear_prepack", False),
        ("quantized.embedding_bag_byte", False),
        ("quantized_decomposed.quantize_per_tensor", False),
        ("aten.linear", False),
        ("aten.mm", False),
    ],
)
def test_operators(op: str, integers: bool) -> None:
    assert multiplies_integers(op) == integers
