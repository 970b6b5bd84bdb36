# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Arrays of PyTorch, CuPy and our own on a device, in and out of operations."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from op_work import WORKS, Work, assert_near, make_work, matmul_work, randn, refusal
from torch_work import LONG, warm_up

import xpuruntime as xrt
from xpuruntime import InputError, Stream, Tensor, UnsupportedOperationError, ops

NAMES = list(WORKS)


@pytest.fixture(autouse=True, scope="module")
def _warm() -> None:
    warm_up()


@pytest.mark.parametrize("name", NAMES)
def test_torch_in_and_out(name: str) -> None:
    work = make_work(name)
    made = work.fresh()
    results = made if isinstance(made, tuple) else (made,)
    for result in results:
        assert result is None or (isinstance(result, torch.Tensor) and result.is_cuda and not result.requires_grad)
    torch.cuda.synchronize()
    wanted = work.want(**work.inputs)
    for result, want in zip(results, wanted.values(), strict=False):
        assert_near(result, want, work.dtype, name)
    work.poison()
    given = work()
    first = given[0] if isinstance(given, tuple) else given
    assert first is next(iter(work.into.values())), "what was given to write to comes back itself"
    work.check()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["matmul", "layer_norm", "rms_norm", "conv"])
def test_other_dtypes(name: str, dtype: torch.dtype) -> None:
    work = make_work(name, dtype)
    work.poison()
    no = refusal(work)
    if no is None:
        work.check()
    else:  # only cuBLAS has float64
        assert name != "matmul", no
        assert dtype == torch.float64, no


@pytest.mark.parametrize("name", NAMES)
def test_our_tensors(name: str) -> None:
    work = make_work(name)
    ours = {key: Tensor.from_dlpack(value) for key, value in work.inputs.items()}
    outputs = work.run(**ours)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    for result, want in zip(results, work.want(**work.inputs).values(), strict=False):
        assert isinstance(result, Tensor)
        assert result.device == "cuda:0"
        assert_near(torch.from_dlpack(result), want, work.dtype, name)
    work.poison()
    work.run(**ours, **{key: Tensor.from_dlpack(value) for key, value in work.into.items()})
    work.check()


def to_cupy(tensor: torch.Tensor) -> Any:
    cupy = pytest.importorskip("cupy")
    return cupy.from_dlpack(tensor)


@pytest.mark.parametrize("name", NAMES)
def test_cupy(name: str) -> None:
    cupy = pytest.importorskip("cupy")
    work = make_work(name, torch.float16)  # CuPy has no bfloat16
    theirs = {key: to_cupy(value) for key, value in work.inputs.items()}
    outputs = work.run(**theirs)
    results = outputs if isinstance(outputs, tuple) else (outputs,)
    for result, want in zip(results, work.want(**work.inputs).values(), strict=False):
        assert isinstance(result, cupy.ndarray)
        assert_near(torch.from_dlpack(result), want, work.dtype, name)
    work.poison()
    work.run(**theirs, **{key: to_cupy(value) for key, value in work.into.items()})
    work.check()


def test_libraries_may_be_mixed() -> None:
    work = matmul_work(33, 40, 48, torch.float16)
    work.poison()
    out = ops.matmul(
        Tensor.from_dlpack(work.inputs["a"]),
        to_cupy(work.inputs["b"]),
        work.inputs["bias"],
        "relu",
        out=work.into["out"],
    )
    assert out is work.into["out"]
    work.check()


def test_cupy_works_on_its_own_current_stream() -> None:
    cupy = pytest.importorskip("cupy")
    work = make_work("matmul", torch.float16)
    theirs, into = {key: to_cupy(value) for key, value in work.inputs.items()}, to_cupy(work.into["out"])
    a = theirs["a"].copy()
    work.run(**theirs, out=into)
    work.poison()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        theirs["a"].fill(0)
        stream.synchronize()
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(LONG)
        theirs["a"][...] = a
        work.run(**theirs, out=into)
        copy = into.copy()
        outputs = work.run(**theirs)
        made_copy = outputs.copy()
        assert not stream.done, "the call waited for the stream"
    stream.synchronize()
    want = work.want(**work.inputs)["out"]
    assert_near(torch.from_dlpack(copy), want, work.dtype, "out=")
    assert_near(torch.from_dlpack(made_copy), want, work.dtype, "made")


def test_cupy_captures() -> None:
    cupy = pytest.importorskip("cupy")
    work = make_work("matmul", torch.float16)
    theirs, into = {key: to_cupy(value) for key, value in work.inputs.items()}, to_cupy(work.into["out"])
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        work.run(**theirs, out=into)
        stream.begin_capture()
        try:
            work.run(**theirs, out=into)
        finally:  # or every later test would find a capture going on
            graph = stream.end_capture()
        stream.synchronize()
        work.poison()
        graph.launch(stream=stream)
        stream.synchronize()
    work.check()


def check_strides(a: torch.Tensor, b: torch.Tensor, **options: Any) -> None:
    before = xrt.MemoryManager.instance().get_stats("cuda:0").total_allocations
    allocated = torch.cuda.memory_stats()["allocation.all.allocated"]
    out = ops.matmul(a, b, **options)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == allocated + 1, "only the result is allocated"
    assert xrt.MemoryManager.instance().get_stats("cuda:0").total_allocations - before <= 1, "nothing but scratch"
    assert_near(out, torch.matmul(a.double(), b.double()), a.dtype, f"{a.stride()} x {b.stride()}")


@pytest.mark.parametrize("m", [1, 7, 64, 65, 300])
def test_views_are_not_copied(m: int) -> None:
    """Transposed, cut out of something larger, and repeated operands."""
    k, n = 96, 120
    check_strides(randn(m, k), randn(n, k).T)
    check_strides(randn(k, m).T, randn(k, n))
    check_strides(randn(k, m).T, randn(n, k).T)
    check_strides(randn(m, k + 9)[:, 5 : 5 + k], randn(k, n + 8)[:, 3 : 3 + n])
    check_strides(randn(3, m, k), randn(n, k).T)
    check_strides(randn(3, m, k), randn(3, n, k).transpose(1, 2))
    check_strides(randn(1, m, k).expand(3, m, k), randn(3, k, n))
    check_strides(randn(m, k), randn(3, k, n))
    check_strides(randn(2, 3, m, k), randn(2, 3, k, n))


@pytest.mark.parametrize("k", [0, 1, 5])
@pytest.mark.parametrize("n", [0, 1, 3])
@pytest.mark.parametrize("m", [0, 1, 70])
def test_empty_and_tiny_products(m: int, n: int, k: int) -> None:
    work = matmul_work(m, n, k)
    work.poison()
    work()
    work.check()
    assert work.fresh().shape == (m, n)


@pytest.mark.parametrize("shape", [(0, 4, 8, 64), (2, 0, 8, 64), (2, 4, 0, 64)])
def test_attention_of_nothing(shape: tuple[int, ...]) -> None:
    out, lse = ops.attention(*(randn(*shape) for _ in range(3)), return_lse=True)
    assert out.shape == shape
    assert lse.shape == shape[:3]


def test_attention_over_no_keys_is_zero() -> None:
    q, k = randn(2, 4, 8, 64), randn(2, 4, 0, 64)
    out, lse = ops.attention(q, k, k, return_lse=True)
    torch.cuda.synchronize()
    assert torch.equal(out, torch.zeros_like(q))
    assert torch.isneginf(lse).all()


@pytest.mark.parametrize("columns", [8, 768, 4096, 20_000, 70_001])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rms", [False, True])
def test_norms_write_over_what_they_read(rms: bool, dtype: torch.dtype, columns: int) -> None:
    function = ops.rms_norm if rms else ops.layer_norm
    x, residual = randn(9, columns, dtype=dtype), randn(9, columns, dtype=dtype)
    weight = randn(columns, dtype=dtype)
    out, total = function(x, weight, residual=residual, return_sum=True)
    for out_is, sum_is in (("x", "residual"), ("residual", "x"), ("x", None), (None, "x"), ("residual", None)):
        given = {"x": x.clone(), "residual": residual.clone(), None: None}
        got, got_sum = function(
            given["x"],
            weight,
            residual=given["residual"],
            return_sum=True,
            out=given[out_is],
            sum_out=given[sum_is],
        )
        assert torch.equal(got, out), f"out is {out_is}, sum_out is {sum_is}"
        assert torch.equal(got_sum, total), f"out is {out_is}, sum_out is {sum_is}"
        assert out_is is None or got is given[out_is]
    alone = function(x, weight)
    assert torch.equal(function(x, weight, out=x), alone)


@pytest.mark.parametrize("columns", [8, 768, 5000, 20_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gradients_of_norms_write_over_what_they_read(dtype: torch.dtype, columns: int) -> None:
    grad_out, x, grad_sum = (randn(40, columns, dtype=dtype) for _ in range(3))
    weight = randn(columns, dtype=dtype)
    _, mean, rstd = ops.layer_norm(x, weight, weight, return_stats=True)
    want = ops.layer_norm_backward(grad_out, x, mean, rstd, weight, has_bias=True, grad_sum=grad_sum)
    for name in ("grad_out", "x", "grad_sum"):
        given = {"grad_out": grad_out.clone(), "x": x.clone(), "grad_sum": grad_sum.clone()}
        got = ops.layer_norm_backward(
            given["grad_out"],
            given["x"],
            mean,
            rstd,
            weight,
            has_bias=True,
            grad_sum=given["grad_sum"],
            grad_x=given[name],
        )
        for one, other in zip(got, want, strict=True):
            assert torch.equal(one, other), f"grad_x is {name}"


def fp8(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.float8_e4m3fn)


@pytest.mark.parametrize("out_dtype", [None, "float32", "float16"])
def test_float8_with_scales(out_dtype: str | None) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        work = [fp8(randn(16, 16)) for _ in range(2)]
        with pytest.raises(UnsupportedOperationError, match=r"8\.9"):
            ops.matmul(work[0], work[1].T)
        return
    a, b = fp8(randn(64, 128)), fp8(randn(96, 128)).T
    scale_a, scale_b = torch.tensor([0.5], device="cuda"), torch.tensor(4.0, device="cuda")
    want = 2.0 * (a.double() @ b.double())
    out = ops.matmul(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=out_dtype)
    assert out.dtype == {None: torch.bfloat16, "float32": torch.float32, "float16": torch.float16}[out_dtype]
    assert_near(out, want, torch.bfloat16, "scaled")
    assert_near(ops.matmul(a, b), want / 2, torch.bfloat16, "without scales")
    ops.matmul(a, b, scale_a=scale_a, out=out, out_dtype=out_dtype)
    assert_near(out, want / 4, torch.bfloat16, "one scale")


def test_tf32_only_where_a_policy_allows_it() -> None:
    a, b = randn(512, 2048, dtype=torch.float32), randn(2048, 512, dtype=torch.float32)
    exact = a.double() @ b.double()
    policy = xrt.Policy(execution=xrt.ExecutionPolicy(tf32=True))
    plain = (ops.matmul(a, b).double() - exact).abs().max().item()
    short = (ops.matmul(a, b, policy=policy).double() - exact).abs().max().item()
    assert plain < 1e-3 < short < 0.5
    assert "tf32" in xrt.decisions()[-1].description


def test_dropout_is_the_same_again_and_about_right() -> None:
    q, k, v = randn(2, 4, 256, 64), randn(2, 4, 256, 64), torch.ones(2, 4, 256, 64, device="cuda").bfloat16()
    rng = torch.tensor([1234, 5], device="cuda", dtype=torch.int64)
    kernel = "cuda_raw.flash_attention_v2"
    first = ops.attention(q, k, v, dropout_p=0.25, rng=rng, kernel=kernel)
    assert torch.equal(first, ops.attention(q, k, v, dropout_p=0.25, rng=rng, kernel=kernel))
    other = ops.attention(q, k, v, dropout_p=0.25, rng=rng + 1, kernel=kernel)
    assert not torch.equal(first, other)
    assert first.float().mean().item() == pytest.approx(1.0, abs=0.02)


def test_gradients_are_not_lost_silently() -> None:
    a, b = randn(4, 8).requires_grad_(), randn(8, 4)
    with pytest.raises(UnsupportedOperationError, match=r"'a' requires a gradient.*torch\.no_grad\(\)"):
        ops.matmul(a, b)
    with torch.no_grad():
        ops.matmul(a, b)
    with pytest.raises(UnsupportedOperationError, match="'out' requires a gradient"):
        ops.matmul(b.T, b, out=torch.empty(4, 4, device="cuda").bfloat16().requires_grad_())


def refused(message: str, call: Any) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_bad_calls_name_the_argument() -> None:
    a, b = randn(4, 8), randn(8, 4)
    refused(r"'b' \[8, 4\] bfloat16 on cpu is on another device than 'a'", lambda: ops.matmul(a, b.cpu()))
    refused("'bias'.*another device", lambda: ops.matmul(a, b, torch.ones(4).bfloat16()))
    refused(r"'b'.*has another dtype than 'a'", lambda: ops.matmul(a, b.half()))
    refused(r"the last dimension of 'a' \(8\) must be the last but one of 'b' \(4\)", lambda: ops.matmul(a, b.T))
    refused("'out'.*wrong shape", lambda: ops.matmul(a, b, out=torch.empty(4, 5, device="cuda").bfloat16()))
    refused("'out'.*wrong dtype", lambda: ops.matmul(a, b, out=torch.empty(4, 4, device="cuda")))
    refused("'out'.*another device", lambda: ops.matmul(a, b, out=torch.empty(4, 4).bfloat16()))
    refused("'out'.*share memory", lambda: ops.matmul(a, b, out=randn(4, 1).expand(4, 4)))
    square = randn(4, 4)
    refused("'out'.*shares memory with", lambda: ops.matmul(square, square, out=square))
    refused("'b'", lambda: ops.matmul(a, np.ones((8, 4), np.float32)))
    refused("'a' cannot be shared", lambda: ops.matmul(a.float().to_sparse(), b.float()))
    refused("stream", lambda: ops.matmul(a, b, stream="fast"))
    refused("'rng'", lambda: ops.attention(*(randn(1, 1, 4, 64) for _ in range(3)), dropout_p=0.5))
    refused("int64", lambda: ops.attention(*(randn(1, 1, 4, 64) for _ in range(3)), dropout_p=0.5, rng=randn(2)))
    x = randn(4, 8)
    refused("'weight'.*one for each column", lambda: ops.layer_norm(x, randn(4)))
    refused("'rstd'.*float32", lambda: ops.rms_norm_backward(x, x, randn(4)))
    refused("'mask'.*does not broadcast", lambda: ops.attention(*(randn(1, 1, 4, 64) for _ in range(3)), mask=randn(3)))
    # All of it left nothing behind.
    work: Work = make_work("matmul")
    work()
    work.check()


def test_what_no_kernel_can_read_names_every_candidate() -> None:
    a, b = randn(70, 64)[:, ::2], randn(32, 24)
    with pytest.raises(UnsupportedOperationError) as caught:
        ops.matmul(a, b, kernel="cublas.cublasLt")
    text = str(caught.value)
    assert "cublas.cublasLt" in text
    assert "'a'" in text
    q = randn(1, 1, 4, 64, dtype=torch.float32)
    with pytest.raises(UnsupportedOperationError) as caught:
        ops.attention(q, q, q)
    for kernel in xrt.ops.kernels("attention"):
        assert kernel.id in str(caught.value)


def test_our_stream_and_theirs_are_named() -> None:
    work = make_work("layer_norm")
    stream = Stream("cuda:0")
    for given in (stream, stream.handle, torch.cuda.Stream()):
        work.poison()
        work(stream=given)
        work.check()
