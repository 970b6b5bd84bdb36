# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exported programs in 16 bits on the torch engine: the same results as the module has."""

from __future__ import annotations

import warnings

import pytest

import xpuruntime as xrt

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


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("name", MODELS)
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
