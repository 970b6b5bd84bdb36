# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations in the order of streams: nothing waits on the host, nothing overtakes."""

from __future__ import annotations

import os
import signal
import threading

import pytest
import torch
from op_work import WORKS, assert_near, make_work
from torch_work import LONG, keep_busy, warm_up

import xpuruntime as xrt
from xpuruntime import Stream, Tensor

NAMES = list(WORKS)


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()


@pytest.mark.parametrize("name", NAMES)
def test_on_the_current_stream_of_pytorch(name: str) -> None:
    work = make_work(name)
    work()
    lead = next(iter(work.inputs.values()))
    right = lead.clone()
    work.poison()
    lead.zero_()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG)
        lead.copy_(right)
        work()
        copies = {key: value.clone() for key, value in work.into.items()}
        assert not stream.query(), "the call waited for the stream"
        lead.zero_()
    stream.synchronize()
    lead.copy_(right)
    wanted = work.want(**work.inputs)
    for key, copy in copies.items():
        assert_near(copy, wanted[key], work.dtype, f"{name}: {key}")


@pytest.mark.parametrize("name", NAMES)
def test_on_another_stream_than_that_of_pytorch(name: str) -> None:
    """The stream waits for what PyTorch's does so far, and that waits for the call."""
    work = make_work(name)
    stream = Stream("cuda:0")
    work(stream=stream)
    lead = next(iter(work.inputs.values()))
    right = lead.clone()
    work.poison()
    lead.zero_()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    lead.copy_(right)
    work(stream=stream)
    copies = {key: value.clone() for key, value in work.into.items()}
    assert not stream.query(), "the call waited, or did not wait for PyTorch's stream"
    torch.cuda.current_stream().synchronize()
    wanted = work.want(**work.inputs)
    for key, copy in copies.items():
        assert_near(copy, wanted[key], work.dtype, f"{name}: {key}")


def test_pytorch_waits_for_the_stream() -> None:
    work = make_work("matmul")
    stream = Stream("cuda:0")
    work(stream=stream)
    work.poison()
    keep_busy(stream)
    made = work.fresh(stream=stream)
    copy = made.clone()
    current = torch.cuda.current_stream()
    assert not current.query()
    current.synchronize()
    assert_near(copy, work.want(**work.inputs)["out"], work.dtype, "made on another stream")


def test_memory_that_pytorch_had_is_not_written_too_early() -> None:
    """A result that is made for another stream may lie where PyTorch's stream still reads."""
    work = make_work("matmul")
    stream = Stream("cuda:0")
    want = work.want(**work.inputs)["out"]
    work.fresh(stream=stream)
    torch.cuda.synchronize()
    before = torch.full_like(work.into["out"], 3.0)
    address = before.data_ptr()
    torch.cuda.synchronize()
    torch.cuda._sleep(LONG)
    read = before + 0.0
    del before
    made = work.fresh(stream=stream)
    same = made.data_ptr() == address
    torch.cuda.synchronize()
    assert set(read.flatten().tolist()) == {3.0}, f"overwritten while it was read (same memory: {same})"
    assert_near(made, want, work.dtype, "made")


def test_our_tensors_are_ordered_by_themselves() -> None:
    work = make_work("matmul")
    first, second = Stream("cuda:0"), Stream("cuda:0")
    ours = {key: Tensor.from_dlpack(value) for key, value in work.inputs.items()}
    work.run(**ours, stream=first)
    torch.cuda.synchronize()
    keep_busy(first)
    product = work.run(**ours, stream=first)
    normed = xrt.ops.rms_norm(product, stream=second)
    assert not second.query(), "the second call did not wait for the first, or waited on the host"
    second.synchronize()
    want = work.want(**work.inputs)["out"]
    assert_near(torch.from_dlpack(product), want, work.dtype, "first")
    exact = want * torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-6)
    assert_near(torch.from_dlpack(normed), exact, work.dtype, "second")


def test_our_tensors_on_no_stream_use_the_default_one() -> None:
    work = make_work("layer_norm")
    ours = {key: Tensor.from_dlpack(value) for key, value in work.inputs.items()}
    into = {key: Tensor.from_dlpack(value) for key, value in work.into.items()}
    work.poison()
    torch.cuda._sleep(LONG)  # the legacy default stream is PyTorch's
    work.run(**ours, **into)
    assert not torch.cuda.current_stream().query()
    work.check()


def test_a_result_that_is_dropped_at_once_is_written_in_order() -> None:
    """The memory of a result of ours is not given to others before the work on it is done."""
    work = make_work("matmul")
    ours = {key: Tensor.from_dlpack(value) for key, value in work.inputs.items()}
    stream = Stream("cuda:0")
    want = work.want(**work.inputs)["out"]
    work.run(**ours, stream=stream)
    keep_busy(stream)
    for _ in range(20):
        work.run(**ours, stream=stream)
    kept = [work.run(**ours, stream=stream) for _ in range(4)]
    stream.synchronize()
    for one in kept:
        assert_near(torch.from_dlpack(one), want, work.dtype, "kept")


def test_sixteen_threads_on_their_own_streams() -> None:
    failures: list[str] = []
    works = [make_work(NAMES[number % len(NAMES)]) for number in range(16)]
    for work in works:
        work.poison()
    start = threading.Barrier(16)

    def run(number: int) -> None:
        stream = torch.cuda.Stream()
        try:
            start.wait()
            with torch.cuda.stream(stream):
                for _ in range(30):
                    works[number]()
                stream.synchronize()
        except Exception as error:
            failures.append(f"{works[number].name}: {error}")

    threads = [threading.Thread(target=run, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    for work in works:
        work.check()


def test_policies_of_threads_are_their_own() -> None:
    kernels = ["cublas.cublas", "cublas.cublasLt"]
    wrong: list[str] = []
    start = threading.Barrier(8)

    def run(number: int) -> None:
        kernel = kernels[number % 2]
        work = make_work("product")
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()), xrt.use_policy(xrt.KernelPolicy(matmul=kernel)):
            for _ in range(20):
                work()
                if xrt.ops.current_policy().kernels.preferences["matmul"] != kernel:
                    wrong.append(kernel)
            torch.cuda.current_stream().synchronize()
        work.check()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert {decision.chosen for decision in xrt.decisions() if decision.asked_by == "kernels.matmul"} == set(kernels)


def test_ctrl_c_leaves_all_in_order() -> None:
    def interrupt(signum: int, frame: object) -> None:
        raise KeyboardInterrupt

    works = [make_work(name) for name in NAMES]
    for work in works:
        work()
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        for delay in (0.001, 0.01, 0.05, 0.1):
            timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGUSR1))
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - until it comes
                timer.start()
                while True:
                    for work in works:
                        work.fresh()
                        work()
            timer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)
    torch.cuda.synchronize()
    for work in works:
        work.poison()
        work()
        work.check()


def test_a_stream_of_another_device_is_refused() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    work = make_work("matmul")
    with pytest.raises(xrt.InputError, match="cuda:1"):
        work(stream=Stream("cuda:1"))
    with pytest.raises(xrt.InputError, match=r"'b'.*cuda:1 is on another device than 'a'"):
        xrt.ops.matmul(work.inputs["a"], work.inputs["b"].to("cuda:1"))
    with pytest.raises(xrt.InputError, match=r"'out'.*cuda:1"):
        xrt.ops.matmul(work.inputs["a"], work.inputs["b"], out=work.into["out"].to("cuda:1"))


def test_on_the_second_device() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    for name in NAMES:
        work = make_work(name)
        work.inputs = {key: value.to("cuda:1") for key, value in work.inputs.items()}
        work.into = {key: value.to("cuda:1") for key, value in work.into.items()}
        work.poison()
        work()
        torch.cuda.synchronize(1)
        work.check()
    assert torch.cuda.current_device() == 0
