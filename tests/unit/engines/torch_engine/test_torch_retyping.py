# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exported programs in 16 bits on the torch engine: the same results as the module has, and in quantized ones."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from sampled import part

import xpuruntime as xrt
from xpuruntime.engines.torch.names import multiplies_integers

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.torch


class Wide(torch.nn.Module):
    """A norm that computes in float32 and goes back to the type of its input."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = torch.nn.Parameter(torch.rand(16)), torch.nn.Linear(16, 8)

    def forward(self, x):
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.out(self.weight * wide.to(x.dtype))


class Softmax(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(x)
        return torch.softmax(q @ q.mT, -1, dtype=torch.float32).to(q.dtype) @ x


class Mask(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(16, 16)

    def forward(self, x):
        q = self.q(x)
        mask = torch.full((x.shape[-2], x.shape[-2]), -1e4, dtype=x.dtype).triu(1)
        return torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)


class Embedded(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.position = torch.nn.Embedding(11, 16), torch.nn.Embedding(9, 16)
        self.out = torch.nn.Linear(16, 4)

    def forward(self, x):
        return self.out(self.table(x) + self.position(torch.arange(x.shape[-1])))


class First(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *x):
        return self.layer(*x)[0]


n = torch.nn
MODELS = {
    "lstm": (lambda: First(n.LSTM(16, 12)), (5, 2, 16)),
    "lstm of two layers, both ways": (
        lambda: First(n.LSTM(16, 12, 2, bidirectional=True, batch_first=True)),
        (2, 5, 16),
    ),
    "gru": (lambda: First(n.GRU(16, 12)), (5, 2, 16)),
    "rnn": (lambda: First(n.RNN(16, 12)), (5, 2, 16)),
    "conv1d": (lambda: n.Sequential(n.Conv1d(4, 8, 3), n.BatchNorm1d(8), n.ReLU()), (2, 4, 16)),
    "conv2d": (lambda: n.Sequential(n.Conv2d(3, 8, 3), n.BatchNorm2d(8), n.GELU()), (1, 3, 9, 9)),
    "conv_transpose2d": (lambda: n.ConvTranspose2d(3, 4, 3), (1, 3, 6, 6)),
    "layer_norm": (lambda: n.Sequential(n.LayerNorm(16), n.Linear(16, 8)), (3, 16)),
    "rms_norm": (lambda: n.Sequential(n.RMSNorm(16), n.Linear(16, 8)), (3, 16)),
    "group_norm": (lambda: n.Sequential(n.GroupNorm(2, 4), n.Conv1d(4, 4, 1)), (2, 4, 16)),
    "a norm in float32": (Wide, (3, 16)),
    "a softmax in float32": (Softmax, (5, 16)),
    "a mask": (Mask, (1, 2, 5, 16)),
    "encoder layer": (lambda: n.TransformerEncoderLayer(16, 2, 32, batch_first=True), (2, 5, 16)),
    "embedding": (Embedded, "integers"),
}


@pytest.mark.parametrize(
    ("name", "precision"), part([(name, precision) for name in MODELS for precision in ("bf16", "fp16")], 3)
)
def test_a_program_gives_what_its_module_gives(name, precision, tmp_path):
    make, shape = MODELS[name]
    torch.manual_seed(0)
    module = make().eval()
    x = torch.randint(0, 11, (2, 7)) if shape == "integers" else torch.randn(shape)
    path = tmp_path / "model.pt2"
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.export.save(torch.export.export(module, (x,)), path)
        with xrt.InferenceSession(module, device="cpu", precision=precision, example_inputs=(x,)) as session:
            expected = next(iter(session.run({session.inputs[0].name: x}).values()))
        with xrt.InferenceSession(path, device="cpu", precision=precision) as session:
            value = next(iter(session.run({session.inputs[0].name: x}).values()))
        exact = module(x)
    assert value.dtype == expected.dtype
    torch.testing.assert_close(value, expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(value, exact, rtol=5e-2, atol=5e-2)
    assert not torch.equal(value, exact)  # it was computed in 16 bits


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
