# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Guards before products on CUDA: what is known to be native is PyTorch's to the bit, and results are its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.pytorch import build_addon
from xpuruntime.pytorch.dispatch import fast_path
from xpuruntime.pytorch.dispatch.overrides import matmul

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("no_policy_is_left")

ELSEWHERE = [{"match": {"op": "matmul", "m": 100_000}, "use": "cublas.cublasLt"}]
FORMS = ("mm", "mm.out", "bmm", "bmm.out", "addmm", "addmm.out", "baddbmm", "baddbmm.out")


def call(form: str, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    packet, _, into = form.partition(".")
    batch = (2,) if packet in ("bmm", "baddbmm") else ()
    a = torch.randn(*batch, 32, 48, device="cuda").to(dtype)
    b = torch.randn(*batch, 64, 48, device="cuda").to(dtype).mT
    operands = (a, b) if packet in ("mm", "bmm") else (torch.randn(64, device="cuda").to(dtype), a, b)
    more = {"out": torch.empty(*batch, 32, 64, device="cuda", dtype=dtype)} if into else {}
    return lambda: getattr(torch, packet)(*operands, **more)


@pytest.fixture(autouse=True, scope="module")
def addon() -> Iterator[None]:
    """The addon is built, and in use."""
    build_addon.build()
    fast_path.load_addon.cache_clear()
    fast_path.why_no_addon.cache_clear()
    before = fast_path.fast_path().route
    assert fast_path.choose("addon").route == "addon"
    yield
    fast_path.choose(before)


@pytest.mark.parametrize("form", FORMS)
def test_pytorch_calls_the_guard_itself_before_its_own_kernels_for_cuda(form: str) -> None:
    def top() -> str:
        table: str = torch._C._dispatch_dump_table(f"aten::{form}")
        return next(line for line in table.splitlines() if line.startswith("CUDA: "))

    before = top()
    if "RegisterCUDA" not in before:
        pytest.skip(f"this PyTorch has no kernel of its own there, but {before}")
    with xt.kernel_policy(rules=ELSEWHERE):
        assert "registered by xpuruntime" in top()
    assert top() == before


@pytest.mark.parametrize("form", ["mm", "addmm"])
def test_errors_of_known_calls_are_pytorchs_own(form: str) -> None:
    a, c = torch.ones(8, 8, device="cuda", dtype=torch.bfloat16), torch.ones(8, device="cuda", dtype=torch.bfloat16)
    run = {"mm": lambda b: torch.mm(a, b), "addmm": lambda b: torch.addmm(c, a, b)}[form]

    def words() -> str:
        with pytest.raises(RuntimeError) as caught:
            run(a[:3])
        return str(caught.value)

    expected = words()
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(3):
            run(a)
            assert words() == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_known_to_be_native_is_pytorchs_own(form: str, dtype: torch.dtype, monkeypatch: Any) -> None:
    names: list[str] = []
    real = matmul._run

    def count(native: Any, *args: Any) -> Any:
        names.append(native.name)
        return real(native, *args)

    monkeypatch.setattr(matmul, "_run", count)
    run = call(form, dtype)
    expected = run().clone()
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(4):
            found = run()
            assert torch.equal(found, expected)
            assert (found.device, found.dtype, found.stride()) == (expected.device, dtype, expected.stride())
    assert len(names) == 1


@pytest.mark.parametrize("form", FORMS)
def test_ours_serve_each_call(form: str) -> None:
    run = call(form, torch.bfloat16)
    expected = run().clone()
    with xt.kernel_policy(matmul=["cublas.cublasLt", "cublas.cublas"]):
        for _ in range(4):
            torch.testing.assert_close(run(), expected, rtol=2e-2, atol=2e-2)
    assert sum(decision.count for decision in xrt.decisions()) == 4


def test_a_result_of_ours_that_another_stream_reads_is_not_given_away() -> None:
    side = torch.cuda.Stream()
    a = torch.randn(2048, 2048, device="cuda", dtype=torch.bfloat16)
    with xt.kernel_policy(matmul="cublas.cublasLt"):
        made = torch.mm(a, a)
        expected = made.clone()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)  # cycles: until everything below has been asked for
            copied = made.clone()
        made.record_stream(side)
        address = made.data_ptr()
        del made
        # Nothing here may wait for the device, as loading a kernel does: then the result could go to others.
        others = [torch.empty_like(a) for _ in range(4)]
        assert not side.query()
        assert address not in [other.data_ptr() for other in others]
        torch.cuda.synchronize()
    assert torch.equal(copied, expected)


def test_a_captured_product_is_replayed() -> None:
    run = call("addmm", torch.bfloat16)
    with xt.kernel_policy(rules=ELSEWHERE):
        expected = run().clone()
        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
