# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rows of a norm that autocast casts once for all linear layers that read them."""

from __future__ import annotations

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards", "own_tuning_cache")]


class Inside(torch.nn.Module):
    """An RMS norm that scales its rows before it rounds them."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(16))
        self.variance_epsilon = 1e-6

    def forward(self, x):
        rows = x.float()
        normal = rows * torch.rsqrt(rows.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.weight * normal).to(x.dtype)


def test_autocast_leaves_rows_that_it_does_not_cast_to_the_same_operator():
    def step(*, cast):
        norm, x = Inside(), torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        norm.weight.data.fill_(1.5)
        with xt.kernel_policy(xrt.KernelPolicy(rms_norm="cpu")), torch.autocast("cpu", torch.bfloat16, enabled=cast):
            out = norm(x)
        return out.grad_fn.name(), out, *torch.autograd.grad(out.sum(), (x, norm.weight))

    (name, *plain), (under_autocast, *results) = step(cast=False), step(cast=True)
    assert under_autocast == name
    assert all(map(torch.equal, results, plain))


def _projected(*, layers=3, cache=True, change=False):
    """Return the results and gradients of layers that read the rows of one norm, and where what they keep lies."""
    generator = torch.Generator().manual_seed(0)
    norm, x = Inside(), torch.randn(5, 16, generator=generator).requires_grad_()
    norm.weight.data.fill_(1.5)
    weights = [torch.nn.Linear(16, 8, bias=False) for _ in range(layers)]
    for layer in weights:
        layer.weight.data = torch.randn(8, 16, generator=generator)
    kept = []

    def pack(tensor):
        if tensor.dtype is torch.bfloat16 and tensor.shape == (5, 16):
            kept.append(tensor.untyped_storage().data_ptr())
        return tensor

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=cache),
    ):
        rows, outs = norm(x), []
        for layer in weights:
            outs.append(layer(rows))
            if change:
                rows.mul_(2)
    loss = sum((out.float() * (at + 1)).square().sum() for at, out in enumerate(outs))
    return [*outs, *torch.autograd.grad(loss, (x, norm.weight, *(layer.weight for layer in weights)))], kept


@pytest.mark.parametrize(("stated", "copies"), [({}, 1), ({"cache": False}, 3), ({"change": True}, 3)])
def test_layers_share_what_autocast_makes_of_the_rows_of_a_norm(stated, copies):
    with xt.kernel_policy(xrt.KernelPolicy(rms_norm="cpu")), xt.explain() as found:
        shared, kept = _projected(**stated)
    assert (len(kept), len(set(kept))) == (3, copies)
    assert any("once for all linear layers" in note for note in found.notes) is ("cache" not in stated)
    plain, kept = _projected(**stated)
    assert len(set(kept)) == 3
    for x, y in zip(shared, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-2, atol=1e-2)


def test_the_gradient_of_shared_rows_is_added_as_autocast_adds_it():
    def step(*, share):
        torch.manual_seed(0)
        norm, x = Inside(), torch.randn(5, 16).requires_grad_()
        layers = [torch.nn.Linear(16, 8) for _ in range(3)]
        with torch.autocast("cpu", torch.bfloat16):
            rows = norm(x)
            read = rows if share else rows + 0.0  # which nobody has offered
            out = sum((layer(read).float() * 3**at).sin().sum() for at, layer in enumerate(layers))
        return torch.autograd.grad(out, (rows, *(layer.weight for layer in layers)))

    with xt.kernel_policy(xrt.KernelPolicy(rms_norm="cpu")):
        assert all(map(torch.equal, step(share=True), step(share=False)))


class _OwnProduct(torch.Tensor):
    """A weight that computes products itself, as quantized ones do; these give the rows."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is not torch.nn.functional.linear:
            return super().__torch_function__(func, types, args, kwargs)
        return args[0]


def test_a_weight_that_computes_its_products_itself_gets_the_rows_of_the_norm():
    norm, layer, x = Inside(), torch.nn.Linear(16, 16, bias=False), torch.randn(5, 16).requires_grad_()
    layer.weight = torch.nn.Parameter(layer.weight.detach().as_subclass(_OwnProduct), requires_grad=False)
    with xt.kernel_policy(xrt.KernelPolicy(rms_norm="cpu")), torch.autocast("cpu", torch.bfloat16):
        rows = norm(x)
        assert layer(rows) is rows


def test_rows_with_other_data_are_cast_anew():
    norm, layer, x = Inside(), torch.nn.Linear(16, 8, bias=False), torch.randn(5, 16).requires_grad_()
    with xt.kernel_policy(xrt.KernelPolicy(rms_norm="cpu")), torch.autocast("cpu", torch.bfloat16):
        rows = norm(x)
        before = layer(rows)
        rows.data = rows.data * 2
        assert torch.equal(layer(rows), before * 2)


def test_a_linear_layer_can_be_scripted_under_a_policy():
    layer, x = torch.nn.Linear(4, 4), torch.randn(2, 4)
    with xt.kernel_policy(xrt.KernelPolicy(rms_norm="cpu")):
        scripted = torch.jit.script(torch.nn.Sequential(layer))
        assert torch.equal(scripted(x), layer(x))
