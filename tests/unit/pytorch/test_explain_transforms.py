# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rows of `explain` under the transforms of ``torch.func``: each product that ran is one, and nothing else is."""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap  # noqa: E402 - it needs PyTorch
from torch.nn import functional as F  # noqa: E402, N812 - it needs PyTorch
from torch.utils import _pytree  # noqa: E402 - it needs PyTorch

import xpuruntime.pytorch as xt  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

#: Operators that compute a product, and those that a policy can speak of besides.
_PRODUCTS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
_KNOWN = (*_PRODUCTS, "aten::dot", "aten::mv", "aten::convolution", "aten::native_layer_norm")


def _cases() -> dict[str, Callable[[], Any]]:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 8))
    weights = dict(net.named_parameters())
    x, w, pile = torch.randn(5, 8), torch.randn(8, 8), torch.randn(4, 5, 8)

    def loss(p: Any, x: torch.Tensor) -> torch.Tensor:
        return functional_call(net, p, (x,)).square().sum()

    def many(p: Any, x: torch.Tensor) -> Any:
        return functional_call(net, p, (x,))

    return {
        "functional_call": lambda: functional_call(net, weights, (x,)),
        "grad": lambda: grad(loss)(weights, x),
        "gradients of each sample": lambda: vmap(grad(loss), (None, 0))(weights, x),
        "grad of grad": lambda: grad(lambda x: grad(lambda y: net(y).square().sum())(x).sum())(x),
        "jvp": lambda: jvp(net, (x,), (torch.ones_like(x),)),
        "vjp": lambda: vjp(net, x)[1](torch.ones(5, 8)),
        "jacrev": lambda: jacrev(net)(x[0]),
        "jacfwd": lambda: jacfwd(net)(x[0]),
        "hessian": lambda: hessian(lambda x: net(x).sum())(x[0]),
        "vmap": lambda: vmap(lambda a: a @ w)(pile),
        "vmap of both": lambda: vmap(torch.mm)(pile, torch.randn(4, 8, 5)),
        "vmap of vmap": lambda: vmap(vmap(lambda v: v @ w))(pile),
        "vmap of bmm": lambda: vmap(torch.bmm)(torch.randn(2, 4, 5, 8), torch.randn(2, 4, 8, 5)),
        "vmap of addmm": lambda: vmap(lambda a: torch.addmm(torch.ones(8), a, w))(pile),
        "vmap of mv": lambda: vmap(lambda v: w @ v)(x),
        "vmap of dot": lambda: vmap(torch.dot)(x, x),
        "vmap in chunks": lambda: vmap(lambda a: a @ w, chunk_size=2)(pile),
        "an ensemble": lambda: vmap(many, (0, None))({k: torch.stack([v, v]) for k, v in weights.items()}, x),
        "functionalize": lambda: torch.func.functionalize(net)(x),
        "vmap of a convolution": lambda: vmap(lambda q: F.conv2d(q, torch.ones(3, 2, 3, 3)))(torch.ones(3, 1, 2, 8, 8)),
        "grad of a norm": lambda: grad(lambda q: F.layer_norm(q, (8,)).square().sum())(x),
        "vmap of a norm": lambda: vmap(lambda q: F.layer_norm(q, (8,)))(pile),
    }


_CASES = _cases()


def _ran(call: Callable[[], Any]) -> Counter[str]:
    """Return the products that PyTorch's own kernels compute: the innermost operators, as its profiler has them."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as prof:
        call()
    events = [event for event in prof.events() if event.name in _PRODUCTS]
    return Counter(event.name for event in events if not _leads(event))


def _leads(event: Any) -> bool:
    return any(child.name in _PRODUCTS or _leads(child) for child in event.cpu_children)


@pytest.mark.parametrize("case", _CASES)
def test_each_product_that_ran_is_a_row(case: str) -> None:
    call = _CASES[case]
    torch.manual_seed(1)
    want = _pytree.tree_leaves(call())
    ran = _ran(call)
    with xt.explain() as plain:
        call()
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain() as report:
        torch.manual_seed(1)
        got = _pytree.tree_leaves(call())
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    for explained, state in ((plain, ("torch.mm", "default")), (report, ("cpu.blas", "honoured"))):
        rows = [row for row in explained.rows if row.op == "matmul"]
        counts: Counter[str] = Counter()
        for row in rows:
            counts[row.operator] += row.count
        assert counts == ran
        assert {(row.resolved, row.status) for row in rows} <= {state}
        assert not [row for row in explained.rows if row.status == "other" and row.operator in _KNOWN]
        assert not re.search(r"aten::(mm|addmm|bmm|dot)\b", str(explained).partition("no policy can affect")[2])
