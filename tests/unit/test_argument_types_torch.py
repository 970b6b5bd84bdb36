# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Functions for PyTorch with arguments of a wrong type: the error is ours, and nothing is left half done."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")

from wrong_arguments import bare_errors  # noqa: E402

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.ops import fused_attention, fused_layernorm, fused_rms_norm  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.torch

X, Q = torch.ones(2, 4), torch.ones(1, 2, 3, 4)
NET = torch.nn.Linear(4, 1).eval()
SGD = torch.optim.SGD(NET.parameters(), 0.1)


def _loss(x: Any) -> Any:
    return NET(x).square().mean()


def _refused(x: Any) -> Any:
    raise xrt.UnsupportedOperationError("arguments were taken")


class _Decoder(torch.nn.Linear):  # type: ignore[misc,name-defined,unused-ignore]
    """What `capture_decode` asks of a model before it generates."""

    config = SimpleNamespace()

    def generate(self) -> None: ...

    prepare_inputs_for_generation = generate


_STEP = {"fn": _loss, "sample_inputs": (X,), "optimizer": SGD}
#: Each function with arguments that are right; one at a time is wrong.
FUNCTIONS: dict[str, tuple[Any, dict[str, Any]]] = {
    "allocator_stats": (xt.allocator_stats, {}),
    "autocast": (xt.autocast, {"device_type": "cpu"}),
    "capture_decode": (xt.capture_decode, {"model": _Decoder(2, 2).eval(), "max_length": 8}),
    "capture_graph": (xt.capture_graph, _STEP),
    "coverage_gaps": (xt.coverage_gaps, {}),
    "explain": (xt.explain, {}),
    "export": (xt.export, {"model": NET, "example_inputs": (X,), "path": "net.pt2"}),
    "fused_attention": (fused_attention, {"query": Q, "key": Q, "value": Q}),
    "fused_layernorm": (fused_layernorm, {"input": X, "normalized_shape": [4]}),
    "fused_rms_norm": (fused_rms_norm, {"input": X, "normalized_shape": [4]}),
    "kernel_policy": (xt.kernel_policy, {}),
    "lock": (xt.lock, {"path": None}),
    "logprobs_of": (xt.logprobs_of, {"model": NET}),
    "memory_report": (xt.memory_report, {}),
    "parity": (xt.parity, {"model": NET, "inputs": X}),
    "profile": (xt.profile, {"activities": None}),
    "quantize": (
        xt.quantize,
        {"model": _Decoder(2, 2).eval(), "policy": {"execution": {"weights": {"storage": "int8"}}}},
    ),
    "register_flash_attention": (xt.register_flash_attention, {}),
    "set_allocator": (xt.set_allocator, {}),
    "set_kernel_policy": (xt.set_kernel_policy, {}),
    "tune": (xt.tune, {**_STEP, "fn": _refused}),
}
#: What fails in the code of the caller, who gave it: samples of another type, and a function that takes more.
_CALLED = ("sample_inputs", "inputs", "before_step", "fn")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    weights, grad_mode = [parameter.detach().clone() for parameter in NET.parameters()], torch.is_grad_enabled()
    yield
    assert xt.get_kernel_policy() is None
    assert torch.is_grad_enabled() == grad_mode
    assert not torch.is_autocast_enabled("cpu")
    assert not torch._C._autograd._profiler_enabled()
    assert all(map(torch.equal, NET.parameters(), weights))


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.filterwarnings("ignore")
def test_wrong_types_are_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    function, right = FUNCTIONS[name]
    if name == "lock":
        with xt.kernel_policy(matmul="cpu.blas"), xt.explain() as report:
            _loss(X)
        right = {**right, "found": report}
    elif name == "parity":
        right = {**right, "session": xrt.InferenceSession(NET, example_inputs=(X,), device="cpu")}

    def finish(made: Any) -> None:
        if isinstance(made, (xt.explain, xt.profile, xt.kernel_policy)):
            with made:
                pass

    numbers: tuple[Any, ...] = (float("nan"), -1, 10**30, "", [])
    if not name.startswith("fused"):  # PyTorch says what does not fit together there
        numbers += (torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta"))
    bare = [
        error for error in bare_errors(function, right, finish=finish, more=numbers) if not error.startswith(_CALLED)
    ]
    with contextlib.suppress(KeyError):
        right["session"].close()
    assert not bare, "\n".join(bare)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: xt.capture_graph(_loss, X, strict="no"), "strict is True or False, got 'no' of type str"),
        (lambda: xt.capture_graph(_loss, X, warmup=1.5), "warmup is a whole number, got 1.5 of type float"),
        (lambda: xt.tune(_loss, X, cancel=3), "cancel is a function, got 3 of type int"),
        (lambda: xt.profile(with_stack="no"), "with_stack is True or False, got 'no' of type str"),
        (lambda: xt.profile(activities=["cpu"]), "activities has 'cpu': give a list of torch.profiler"),
        (lambda: xt.autocast(enabled="no", device_type="cpu"), "enabled is True or False, got 'no' of type str"),
        (lambda: xt.export(NET, X, "n.onnx", training="no"), "training is True or False, got 'no' of type str"),
    ],
)
def test_words_are_no_flags_and_no_numbers(call: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        call()


def test_every_public_function_is_tried() -> None:
    functions = {
        name for name in xt.__all__ if callable(getattr(xt, name)) and (name.islower()) and name not in FUNCTIONS
    }
    assert functions == {"clear_kernel_policy", "get_kernel_policy", "reset_allocator"}
