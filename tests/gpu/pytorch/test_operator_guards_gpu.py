# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Guards before norms and attention on CUDA: PyTorch's own C++ functions serve what is known, ours what is quick."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch

import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.pytorch import build_addon
from xpuruntime.pytorch.dispatch import fast_path
from xpuruntime.pytorch.dispatch.overrides import attention, norms

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.usefixtures("no_policy_is_left")

F = torch.nn.functional
ELSEWHERE = [
    {"match": {"op": op, "dtype": "fp8"}, "use": "cpu.reference"} for op in ("layer_norm", "rms_norm", "attention")
]
FORMS = ("layer_norm", "rms_norm", "attention", "attention masked", "attention causal")


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


@pytest.fixture
def asked(monkeypatch: Any) -> list[int]:
    """Calls that came to Python."""
    seen: list[int] = []

    def count(real: Callable[[], Any]) -> Callable[[], Any]:
        def current() -> Any:
            seen.append(1)
            return real()

        return current

    for module in (norms, attention):
        monkeypatch.setattr(module, "active_policy", count(module.active_policy))
    return seen


def step(form: str, dtype: torch.dtype) -> Callable[[], tuple[torch.Tensor, ...]]:
    """Return a forward and backward, which gives the result and the gradients."""
    torch.manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda").to(dtype).requires_grad_()

    packet, _, how = form.partition(" ")
    operands: tuple[torch.Tensor, ...]
    if packet == "attention":
        operands = (leaf(2, 4, 128, 64), leaf(2, 4, 128, 64), leaf(2, 4, 128, 64))
        mask = torch.randn(128, 128, device="cuda").to(dtype) if how == "masked" else None

        def run() -> torch.Tensor:
            return F.scaled_dot_product_attention(*operands, attn_mask=mask, is_causal=how == "causal")
    elif packet == "layer_norm":
        operands = (leaf(32, 768), leaf(768), leaf(768))

        def run() -> torch.Tensor:
            return F.layer_norm(operands[0], (768,), *operands[1:])
    else:
        operands = (leaf(32, 768), leaf(768))

        def run() -> torch.Tensor:
            return F.rms_norm(operands[0], (768,), operands[1])

    def whole() -> tuple[torch.Tensor, ...]:
        out = run()
        return out.detach(), *torch.autograd.grad(out, operands, torch.ones_like(out))

    return whole


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
def test_what_is_known_to_be_native_is_pytorchs_own(form: str, dtype: torch.dtype, asked: list[int]) -> None:
    run = step(form, dtype)
    expected = run()
    with xt.kernel_policy(rules=ELSEWHERE):
        run()
        first = len(asked)
        for _ in range(4):
            for one, other in zip(run(), expected, strict=True):
                assert (one.dtype, one.stride(), one.device) == (other.dtype, other.stride(), other.device)
                torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)  # gradients may be summed in any order
    assert first > 0
    assert len(asked) == first


@pytest.mark.parametrize("form", ["layer_norm", "rms_norm"])
def test_ours_serve_each_call_without_python(form: str, asked: list[int]) -> None:
    run = step(form, torch.bfloat16)
    expected = run()
    with xt.kernel_policy(layer_norm="cuda_raw", rms_norm="cuda_raw"):
        for _ in range(4):
            for one, other in zip(run(), expected, strict=True):
                torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-1)
    assert len(asked) == 2
    assert sum(decision.count for decision in xrt.decisions()) == 8


def test_a_captured_norm_and_attention_are_replayed() -> None:
    runs = [step(form, torch.bfloat16) for form in ("layer_norm", "attention")]
    with xt.kernel_policy(rules=ELSEWHERE):
        expected = [[one.clone() for one in run()] for run in runs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for run in runs:
                run()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [run() for run in runs]
        graph.replay()
        torch.cuda.synchronize()
    for results, others in zip(found, expected, strict=True):
        for one, other in zip(results, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_a_norm_that_was_never_called_before_a_capture_is_captured_all_the_same() -> None:
    x = torch.randn(32, 768, device="cuda")
    expected = F.layer_norm(x, (768,))
    torch.cuda.synchronize()
    with xt.kernel_policy(rules=ELSEWHERE):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = F.layer_norm(x, (768,))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(found, expected)


def test_running_out_of_memory_is_said_by_pytorch() -> None:
    x = torch.empty(1, device="cuda").expand(1 << 32, 768)  # 12 TB, once it is made contiguous
    with xt.kernel_policy(rules=ELSEWHERE):
        for _ in range(3):
            with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
                F.layer_norm(x, (768,))
