# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fast kernels of norms and attention under PyTorch's modes and transforms, under rules, and in many threads."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import ClassVar

import pytest

torch = pytest.importorskip("torch")

from fast_kernel_calls import ELSEWHERE, OPS, F, call, same  # noqa: E402
from many_threads import at_work  # noqa: E402

import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.dispatch.overrides import norms, registry  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.usefixtures("nothing_is_watched_afterwards", "decisions_of_this_test")]


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_torch_func_do_what_they_do_without_a_policy():
    q, x, w = torch.randn(3, 1, 2, 4, 8), torch.randn(3, 4, 8), torch.randn(8)

    def attend(q):
        return F.scaled_dot_product_attention(q, q, q).square().sum()

    def norm(x, w):
        return F.layer_norm(x, (8,), w).square().sum()

    def results():
        return (
            torch.vmap(lambda q: F.scaled_dot_product_attention(q, q, q))(q),
            torch.vmap(torch.func.grad(attend))(q),
            torch.func.grad(attend)(q[0]),
            torch.vmap(torch.func.grad(norm), in_dims=(0, None))(x, w),
            torch.func.jvp(lambda x: norm(x, w), (x,), (torch.ones_like(x),))[1],
            torch.func.hessian(norm, argnums=1)(x, w),
        )

    expected = results()
    with xt.kernel_policy(rules=ELSEWHERE):
        attend(q[0]), norm(x, w)
        for _ in range(2):
            for result, other in zip(results(), expected, strict=True):
                torch.testing.assert_close(result, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("columns", [(True, False), (False, False)])
def test_gradients_without_columns_ask_python_only_in_the_first_step(columns, monkeypatch):
    x = torch.randn(4, 8, requires_grad=True)
    weight, bias = (torch.randn(8, requires_grad=True) if column else None for column in columns)
    given = [one for one in (x, weight, bias) if one is not None]
    asked = []
    real = norms.active_policy
    monkeypatch.setattr(norms, "active_policy", lambda: (asked.append(1), real())[1])

    def gradients():
        return torch.autograd.grad(F.layer_norm(x, (8,), weight, bias).square().sum(), given)

    expected = gradients()
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(3):
            same(gradients(), expected)
        assert len(asked) == 2


def test_modes_and_subclasses_see_the_parts_of_attention():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.seen = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    q = torch.randn(1, 2, 4, 8)

    def seen():
        with Watch() as watch:
            F.scaled_dot_product_attention(q, q, q), F.layer_norm(q, (8,))
        return watch.seen

    expected = seen()
    with xt.kernel_policy(rules=ELSEWHERE):
        F.scaled_dot_product_attention(q, q, q), F.layer_norm(q, (8,))
        assert seen() == expected


def test_explain_sees_every_call_that_the_gates_knew():
    q, x = torch.randn(1, 2, 4, 8), torch.randn(4, 8)

    def step():
        (
            F.scaled_dot_product_attention(q, q, q),
            F.layer_norm(x, (8,)),
            torch.ops.aten._fused_rms_norm(x, (8,), None, None),
        )

    with xt.kernel_policy(rules=ELSEWHERE):
        step(), step()
        with xt.explain() as report:
            step()
        step()
    assert {row.op for row in report.rows} >= set(OPS)


class Mallinfo2(ctypes.Structure):
    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated():
    """What malloc has given and not got back, in bytes; free memory that it keeps does not count."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("the C library has no mallinfo2")
    mallinfo.restype = Mallinfo2
    info = mallinfo()
    return info.uordblks + info.hblkhd


@pytest.mark.parametrize("policy", [{"rules": ELSEWHERE}, {"layer_norm": "cpu.reference", "rms_norm": "cpu.reference"}])
def test_nothing_is_left_of_many_calls(policy):
    x = torch.randn(512, 256, requires_grad=True)
    q = torch.randn(1, 4, 64, 32, requires_grad=True)
    mask = torch.zeros(64, 64)

    def step():
        out = F.layer_norm(x, (256,), x[0], x[1]).sum() + torch.ops.aten._fused_rms_norm(x, [256], x[0], 0.5)[0].sum()
        (out + F.scaled_dot_product_attention(q, q, q, mask, scale=0.5).sum()).backward()
        with pytest.raises(RuntimeError):
            F.layer_norm(x, (5,))

    with xt.kernel_policy(**policy):
        for _ in range(20):
            step()
        gc.collect()
        before = allocated()
        for _ in range(100):
            step()
        gc.collect()
        assert allocated() - before < 4 << 20  # one leaked array of each step alone would be 50 MB
        argument = torch.randn(4, 8)
        result = F.layer_norm(argument, (8,))
        gone = [weakref.ref(argument), weakref.ref(result)]
        del argument, result
        gc.collect()
        assert [one() for one in gone] == [None, None]


def test_threads_work_while_one_policy_follows_another():
    runs = [call(form) for form in ("layer_norm", "layer_norm_backward", "rms_norm", "sdpa", "sdpa masked")]
    expected = [run() for run in runs]

    def work():
        for run, results in zip(runs, expected, strict=True):
            torch.testing.assert_close(run(), results, rtol=1e-4, atol=1e-5)

    # What a thread is inside of may not be taken away: what all policies here need together is there from the start.
    needed = registry.require(OPS)
    with xt.kernel_policy(rules=ELSEWHERE), at_work(work, 16):
        for _ in range(12):
            with xt.kernel_policy(layer_norm="cpu.reference", rms_norm="cpu.reference"):
                runs[0]()
            with xt.kernel_policy(rules=[{"match": {"op": "layer_norm", "phase": "train"}, "use": "cpu.reference"}]):
                runs[0]()
    registry.release(needed)
