# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`autocast`: what it casts to, whom it asks, and whom it contradicts."""

from __future__ import annotations

import copy
import pickle
import threading
import warnings

import pytest

from xpuruntime.errors import InputError, PolicyError, XpuRuntimeWarning
from xpuruntime.policies import ExecutionPolicy, Policy

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import xpuruntime.pytorch as xrt_torch  # noqa: E402 - needs torch
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy  # noqa: E402
from xpuruntime.pytorch.dispatch.context import thread_policy  # noqa: E402

A = torch.ones(4, 4)


def product() -> torch.dtype:
    return torch.mm(A, A).dtype


def policy(precision: str, mode: str = "prefer") -> thread_policy:
    return thread_policy(CompiledPolicy(Policy(mode=mode, execution=ExecutionPolicy(precision=precision))))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, torch.float16),
        ({"dtype": torch.float16}, torch.float16),
        ({"dtype": torch.bfloat16}, torch.bfloat16),
        ({"dtype": "bf16"}, torch.bfloat16),
        ({"dtype": "fp16"}, torch.float16),
        ({"fp16": True}, torch.float16),
        ({"fp16": True, "dtype": "fp16"}, torch.float16),
        ({"enabled": False}, torch.float32),
    ],
    ids=str,
)
def test_type_of_a_product(given, wanted):
    with xrt_torch.autocast(device_type="cpu", **given):
        assert product() is wanted
    assert product() is torch.float32


def test_the_device_is_that_which_is_there():
    with xrt_torch.autocast("bf16"):
        if torch.cuda.is_available():
            assert torch.is_autocast_enabled("cuda")
        else:
            assert product() is torch.bfloat16


def test_cache_is_handed_on():
    with xrt_torch.autocast("bf16", cache_enabled=False, device_type="cpu"):
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("wrong", [torch.float32, torch.int8, "fp32", "half"], ids=str)
def test_other_types_are_refused(wrong):
    with pytest.raises(InputError, match=r"none of torch\.float16"):
        xrt_torch.autocast(wrong)


def test_arguments_that_contradict_each_other():
    with pytest.raises(InputError, match="contradict each other"):
        xrt_torch.autocast("bf16", fp16=True)
    with pytest.raises(InputError, match="does not autocast on device_type='tpus'"):
        xrt_torch.autocast(device_type="tpus")


def test_the_policy_says_the_precision():
    with policy("bf16"), xrt_torch.autocast(device_type="cpu"):
        assert product() is torch.bfloat16
    with policy("fp16", "strict"), xrt_torch.autocast(device_type="cpu"):
        assert product() is torch.float16
    with policy("model", "strict"), xrt_torch.autocast("bf16", device_type="cpu"):
        assert product() is torch.bfloat16


@pytest.mark.parametrize("stated", ["fp32", "tf32", "int8", "fp16"])
def test_contradicting_a_policy(stated):
    cast = xrt_torch.autocast("bf16", device_type="cpu")
    with (
        policy(stated, "strict"),
        pytest.raises(PolicyError, match=f"asks for bf16.*active policy is {stated}"),
        cast,
    ):
        pass
    assert not torch.is_autocast_enabled("cpu"), "a refused block left autocasting on"
    with policy(stated), pytest.warns(XpuRuntimeWarning, match=f"active policy is {stated}.*Autocasting to bf16"), cast:
        assert product() is torch.bfloat16


def test_a_policy_for_fp32_and_no_type_given():
    with policy("fp32", "strict"), pytest.raises(PolicyError, match="asks for fp16"), xrt_torch.autocast():
        pass
    with policy("fp32", "strict"), xrt_torch.autocast(enabled=False, device_type="cpu"):
        assert product() is torch.float32


def test_the_process_wide_policy_counts():
    xrt_torch.set_kernel_policy(Policy(execution=ExecutionPolicy(precision="bf16")))
    try:
        with xrt_torch.autocast(device_type="cpu"):
            assert product() is torch.bfloat16
    finally:
        xrt_torch.clear_kernel_policy()
    with xrt_torch.autocast(device_type="cpu"):
        assert product() is torch.float16


def test_decorator_follows_the_policy_of_each_call():
    @xrt_torch.autocast(device_type="cpu")
    def work() -> torch.dtype:
        """Say what a product is."""
        return product()

    assert work.__doc__ == "Say what a product is."
    assert work() is torch.float16
    with policy("bf16"):
        assert work() is torch.bfloat16
    assert work() is torch.float16


def test_functions_that_suspend_themselves_are_refused():
    def numbers():
        yield product()

    async def later():
        return product()

    for function in (numbers, later):
        with pytest.raises(InputError, match="suspends itself"):
            xrt_torch.autocast("bf16")(function)


def test_one_object_entered_twice_and_by_many_threads():
    cast = xrt_torch.autocast("bf16", device_type="cpu")
    with cast:
        with cast:
            assert product() is torch.bfloat16
        assert product() is torch.bfloat16
    barrier = threading.Barrier(4)
    found: list[tuple[torch.dtype, ...]] = []

    def work() -> None:
        before = product()
        with cast:
            barrier.wait()
            inside = product()
            barrier.wait()
        found.append((before, inside, product()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(torch.float32, torch.bfloat16, torch.float32)] * 4


def test_inside_of_compiled_functions():
    def called(a: torch.Tensor) -> torch.Tensor:
        with xrt_torch.autocast("bf16", device_type="cpu"):
            return a @ a

    @xrt_torch.autocast("bf16", device_type="cpu")
    def decorated(a: torch.Tensor) -> torch.Tensor:
        return a @ a

    made = xrt_torch.autocast("bf16", device_type="cpu")

    def entered(a: torch.Tensor) -> torch.Tensor:
        with made:
            return a @ a

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        for function in (called, decorated):
            assert torch.compile(function, backend="eager", fullgraph=True)(A).dtype is torch.bfloat16
        if torch.__version__ >= (2, 15):  # it leaves such a function to Python
            assert torch.compile(entered, backend="eager")(A).dtype is torch.bfloat16
        else:
            # PyTorch 2.11 cannot trace the raising of it, and shows the line instead.
            with pytest.raises(
                Exception, match=r"call autocast\(\.\.\.\) in the compiled function|raise InputError\(_MADE"
            ):
                torch.compile(entered, backend="eager")(A)
    torch.compiler.reset()
    assert product() is torch.float32


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_a_module_that_keeps_one_can_be_copied(copied):
    net = torch.nn.Linear(4, 4)
    net.cast = xrt_torch.autocast("bf16", cache_enabled=False, device_type="cpu")
    with net.cast:
        other = copied(net)
    assert repr(other.cast) == repr(net.cast)
    with other.cast:
        assert product() is torch.bfloat16
    assert product() is torch.float32


def test_one_that_is_not_entered_cannot_be_left():
    with pytest.raises(InputError, match="not entered in this thread"):
        xrt_torch.autocast(device_type="cpu").__exit__(None, None, None)


def dtype_of_a_product() -> torch.dtype:
    return (torch.ones(2, 8) @ torch.ones(8, 2)).dtype


def test_fp16_false_does_not_compute_in_fp16():
    with xrt_torch.autocast(fp16=False, device_type="cpu"):
        assert dtype_of_a_product() == torch.float32
    with xrt_torch.autocast("bf16", fp16=False, device_type="cpu"):
        assert dtype_of_a_product() == torch.bfloat16
    with xrt_torch.autocast("bf16", device_type="cpu"), xrt_torch.autocast(fp16=False, device_type="cpu"):
        assert dtype_of_a_product() == torch.float32
    with pytest.raises(InputError, match="fp16=False and dtype='fp16' contradict"):
        xrt_torch.autocast("fp16", fp16=False)
