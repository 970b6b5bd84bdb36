# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Attention of compiled code whose mask is a constant: left out where it says nothing, or what ``is_causal`` says."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from torch.nn import functional  # noqa: E402

import xpuruntime.pytorch as xrt_torch  # noqa: E402
from xpuruntime.ops import plugins  # noqa: E402
from xpuruntime.ops.torch_kernels import forget_torch_kernels  # noqa: E402
from xpuruntime.policies import KernelPolicy, Policy  # noqa: E402
from xpuruntime.pytorch.attention.call import added_mask  # noqa: E402
from xpuruntime.pytorch.compiler.constant_masks import simplify_masks  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_policy_is_left", "own_tuning_cache")

_LENGTH = 12


def lower() -> torch.Tensor:
    return torch.ones(_LENGTH, _LENGTH, dtype=torch.bool).tril()


def by_positions() -> torch.Tensor:
    positions = torch.arange(_LENGTH)
    return (positions[None, :] <= positions[:, None])[None, None].expand(2, 1, -1, -1)


def windowed() -> torch.Tensor:
    return lower() & ~lower().tril(-4)


def written_later() -> torch.Tensor:
    mask = torch.ones(_LENGTH, _LENGTH, dtype=torch.bool)
    mask[:, 3:] = False
    return mask


def drawn() -> torch.Tensor:
    return torch.rand(_LENGTH, _LENGTH) < 2


def operands(heads: int = 4, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, n, _LENGTH, 8, generator=generator).to(dtype) for n in (4, heads, heads)]


def simplified(function, *args):
    """Return how many masks were left out, the arguments of the call, and whether the result stayed."""
    seen = {}

    def backend(graph, inputs):
        seen["count"] = simplify_masks(graph.graph)
        seen["call"] = next(
            node for node in graph.graph.nodes if node.target is functional.scaled_dot_product_attention
        )
        return graph

    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(function, backend=backend)(*args), function(*args))
    return seen["count"], seen["call"].kwargs


@pytest.mark.parametrize(
    ("make", "causal"), [(lower, True), (by_positions, True), (lambda: ~(lower() & ~lower()), False)]
)
def test_a_mask_of_sizes_alone_is_left_out(make, causal):
    count, stated = simplified(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=make()), *operands()
    )
    assert (count, stated["attn_mask"], stated["is_causal"]) == (1, None, causal)


@pytest.mark.parametrize("make", [windowed, written_later, drawn])
def test_another_mask_stays(make):
    count, stated = simplified(
        lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=make()), *operands()
    )
    assert count == 0
    assert stated["attn_mask"] is not None


def test_a_mask_that_an_input_changes_stays():
    def attend(q, k, v, seen):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=lower() & seen[:, None, None, :])

    count, _ = simplified(attend, *operands(), torch.ones(2, _LENGTH, dtype=torch.bool))
    assert count == 0


def written_by_a_view(mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    mask[:, 1:].logical_and_(seen[:, 1:])
    return mask


def written_by_an_operator(mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    before = mask
    mask &= seen
    return before


@torch.library.custom_op("xpuruntime_tests::hide_keys", mutates_args=("mask",))
def hide_keys(mask: torch.Tensor, seen: torch.Tensor) -> None:
    mask.logical_and_(seen)


def written_by_a_package(mask: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    torch.ops.xpuruntime_tests.hide_keys(mask, seen)
    return mask


@pytest.mark.parametrize("write", [written_by_a_view, written_by_an_operator, written_by_a_package])
def test_a_mask_that_an_input_is_written_to_stays(write):
    def attend(q, k, v, seen):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=write(lower(), seen))

    count, _ = simplified(attend, *operands(), ~lower().tril(-4))
    assert count == 0


def test_a_mask_of_the_first_key_alone_stays():
    def attend(q, k, v):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(_LENGTH)[None, :] < 1)

    assert simplified(attend, *operands())[0] == 0


def test_keys_that_were_repeated_for_a_batch_stay():
    def attend(q, k, v):
        keys, values = (x[0][None].expand(2, -1, -1, -1).reshape(2, 4, _LENGTH, 8) for x in (k, v))
        return functional.scaled_dot_product_attention(q, keys, values, attn_mask=lower())

    count, stated = simplified(attend, *operands(dtype=torch.bfloat16))
    assert count == 1
    assert "enable_gqa" not in stated


def test_heads_that_were_repeated_for_the_mask_are_shared():
    def repeated(x):
        return x[:, :, None, :, :].expand(2, 2, 2, _LENGTH, 8).reshape(2, 4, _LENGTH, 8)

    def attend(q, k, v):
        return functional.scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=lower())

    assert simplified(attend, *operands(2, torch.bfloat16))[1]["enable_gqa"]
    assert "enable_gqa" not in simplified(attend, *operands(2))[1]


class Attention(plugins.TorchKernel):
    """A kernel of another package that takes no mask."""

    id = "maskless.attention"
    op = "attention"
    distributions = ()

    def supports(self, call):
        return "mask" not in call.operands, "it takes no mask"

    def forward(self, call, q, k, v):
        with torch.no_grad():
            scores = q @ k.mT * q.shape[-1] ** -0.5
            if call.attributes["causal"]:
                scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf)
            return (scores.softmax(-1) @ v,), (scores.logsumexp(-1).float(),)

    def backward(self, call, saved, grads):
        raise NotImplementedError


class Adding(plugins.TorchKernel):
    """A kernel of another package that adds its mask, and keeps those that it gets."""

    id = "adding.attention"
    op = "attention"
    distributions = ()
    adds_masks = True

    def __init__(self):
        self.masks = []

    def supports(self, call):
        return "mask" in call.operands, "it is for calls with a mask"

    def weights(self, q, k, mask):
        self.masks.append(mask)
        scores = q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT * q.shape[-1] ** -0.5
        scores = scores + (added_mask(mask, q) if mask.dtype == torch.bool else mask)
        return torch.nan_to_num(scores.softmax(-1)), scores.logsumexp(-1).float()

    def forward(self, call, q, k, v, mask):
        weights, lse = self.weights(q, k, mask)
        return (weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1),), (lse,)

    def backward(self, call, saved, grads):
        q, k, v, mask = saved.inputs
        groups = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(groups, 1) for x in (k, v))
        weights, _ = self.weights(q, k, mask)
        delta = (grads[0] * saved.outputs[0]).sum(-1, keepdim=True)
        of_scores = weights * (grads[0] @ values.mT - delta) * q.shape[-1] ** -0.5
        shared = (x.unflatten(1, (-1, groups)).sum(2) for x in (of_scores.mT @ q, weights.mT @ grads[0]))
        return of_scores @ keys, *shared, None


class OfOperators(plugins.TorchKernel):
    """A kernel whose forward calls an operator of PyTorch's that has the gradient."""

    id = "adding.attention"
    op = "attention"
    distributions = ()
    operators = ("*_scaled_dot_product_flash_attention_for_cpu*",)
    adds_masks = traceable = True

    def __init__(self):
        self.masks = []

    def supports(self, call):
        return "mask" in call.operands, "it is for calls with a mask"

    def forward(self, call, q, k, v, mask):
        self.masks.append(mask)
        added = added_mask(mask, q) if mask.dtype == torch.bool else mask
        by_torch = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        out, lse = by_torch(q, k, v, attn_mask=added, scale=call.attributes["scale"])
        return (out,), (lse,)

    def backward(self, call, saved, grads):
        raise NotImplementedError


@pytest.fixture
def maskless(monkeypatch, tmp_path):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    plugins.register(plugins.KernelBackend("maskless", "cpu", version="1.0"), Attention())
    yield
    forget_torch_kernels("maskless")
    plugins._sources.pop("maskless", None)


@pytest.fixture(params=[Adding])
def adding(monkeypatch, tmp_path, request):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    kernel = request.param()
    plugins.register(plugins.KernelBackend("adding", "cpu", version="1.0"), kernel)
    yield kernel
    forget_torch_kernels("adding")
    plugins._sources.pop("adding", None)


def rows_of(function, *args):
    with xrt_torch.explain() as report, torch.no_grad():
        function(*args)
    return [row for row in report.rows if row.op == "attention"]


def test_a_kernel_without_masks_serves_the_calls_of_compiled_code(maskless):
    compiled = torch.compile(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=lower()))
    with xrt_torch.kernel_policy(Policy(mode="strict", kernels={"attention": "maskless.attention"})):
        with torch.no_grad():
            compiled(*operands())
        assert [(row.resolved, row.status) for row in rows_of(compiled, *operands())] == [
            ("maskless.attention", "honoured")
        ]


def test_code_on_disk_is_that_of_the_kernels_that_were_measured(maskless):
    def tag():
        with xrt_torch.kernel_policy(KernelPolicy(attention="auto", auto_strategy="best_performance")):
            return torch.compiler.config.cache_key_tag

    before = tag()
    assert before == tag()
    forget_torch_kernels("maskless")
    assert before != tag()


def test_auto_measures_attention_while_code_is_compiled(maskless):
    policy = KernelPolicy(attention="auto", auto_strategy="best_performance", tuning={"budget": "50ms"})
    compiled = torch.compile(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=lower()))
    before = torch.get_rng_state()
    with xrt_torch.kernel_policy(policy), torch.no_grad():
        compiled(*operands())
        times = xrt_torch.dispatch.context.CONTEXT.times
    kernels = {
        candidate.kernel for (op, *_), found in times.items() if op == "attention" for candidate in found.candidates
    }
    assert "maskless.attention" in kernels
    assert torch.equal(before, torch.get_rng_state())


def padded(length: int = _LENGTH) -> torch.Tensor:
    mask = torch.rand(2, 1, 1, length, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[0, ..., 0], mask[1] = True, False  # no query of the second sequence sees a key
    return mask


def cut(length: int = _LENGTH) -> torch.Tensor:
    mask = torch.rand(2, 4, length, length, generator=torch.Generator().manual_seed(2)) < 0.5
    mask[:, :, 1] = False
    return mask


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: cut(), (2, 4, _LENGTH, _LENGTH)),
        (lambda: cut(16)[:, :, :_LENGTH, :_LENGTH], (2, 4, _LENGTH, _LENGTH)),
        (lambda: padded().expand(2, 4, _LENGTH, _LENGTH), (2, 1, 1, _LENGTH)),
        (lambda: cut()[0, 0], (_LENGTH, _LENGTH)),
    ],
)
def test_compiled_layers_and_gradients_share_one_converted_mask(adding, make, shape, dynamic):
    def layers(q, k, v, mask):
        for _ in range(2):
            q = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return q

    leaves, mask = [x.requires_grad_() for x in operands(2)], make()
    wanted = layers(*leaves, mask)
    gradients = torch.autograd.grad(wanted.sum(), leaves)
    with xrt_torch.kernel_policy(Policy(mode="strict", kernels={"attention": "adding.attention"})):
        out = torch.compile(layers, dynamic=dynamic)(*leaves, mask)
        forward = list(adding.masks)
        found = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close((out, *found), (wanted, *gradients))
    assert {(tuple(x.shape), x.dtype) for x in adding.masks} == {(shape, torch.float32)}
    for masks in (forward, adding.masks[len(forward) :]):
        assert len(masks) == 2
        assert masks[0].data_ptr() == masks[1].data_ptr()


def test_an_eager_call_keeps_no_other_copy_of_its_mask(adding):
    leaves, mask = [x.requires_grad_() for x in operands(2)], padded()
    wanted = functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
    with xrt_torch.kernel_policy(Policy(mode="strict", kernels={"attention": "adding.attention"})):
        out = functional.scaled_dot_product_attention(*leaves, attn_mask=mask, enable_gqa=True)
        found = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close((out, *found), (wanted, *torch.autograd.grad(wanted.sum(), leaves)))
    assert all(x.data_ptr() == mask.data_ptr() for x in adding.masks)


def test_a_boolean_mask_without_dense_rows_is_left_to_the_kernel(adding):
    mask = padded().expand(2, 1, _LENGTH, _LENGTH).mT.contiguous().mT
    compiled = torch.compile(lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, attn_mask=mask))
    with xrt_torch.kernel_policy(Policy(mode="strict", kernels={"attention": "adding.attention"})), torch.no_grad():
        adding.masks.clear()
        compiled(*operands())
    assert {given.dtype for given in adding.masks} == {torch.bool}


@pytest.mark.parametrize("adding", [OfOperators], indirect=True)
@pytest.mark.parametrize(
    ("make", "dynamic"), [(padded, True), (lambda: cut(16)[..., :_LENGTH].mT.contiguous().mT[..., :_LENGTH, :], False)]
)
def test_compiled_code_has_the_operators_of_a_kernel_themselves(adding, make, dynamic):
    def attend(q, k, v, mask):
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    leaves, mask = [x.requires_grad_() for x in operands()], make()
    wanted = attend(*leaves, mask)
    gradients = torch.autograd.grad(wanted.sum(), leaves)
    compiled = torch.compile(attend, dynamic=dynamic)
    with xrt_torch.kernel_policy(Policy(mode="strict", kernels={"attention": "adding.attention"})):
        out = compiled(*leaves, mask)
        adding.masks.clear()
        with xrt_torch.explain() as report:
            out = compiled(*leaves, mask)
            found = torch.autograd.grad(out.sum(), leaves)
    torch.testing.assert_close((out, *found), (wanted, *gradients))
    assert adding.masks == []
    rows = [row for row in report.rows if row.op == "attention"]
    assert {(row.resolved, row.status) for row in rows} == {("adding.attention", "honoured")}
    assert {row.operator for row in rows} == {
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    }
