# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`xpuruntime.ops.attention` and its gradient on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from recording_kernel import Recorder

import xpuruntime as xrt
from xpuruntime import InputError, UnsupportedOperationError, ops
from xpuruntime.ops.call_context import use_advisories
from xpuruntime.policies import advisories

F32 = np.float32
DRAW = np.random.default_rng(5)


def randn(*shape: int, dtype: Any = F32) -> Any:
    return DRAW.standard_normal(shape).astype(dtype)


def exact(q: Any, k: Any, v: Any, scale: float, added: Any = 0.0) -> tuple[Any, Any]:
    """Attention by its definition in float64, and the logarithm of the sum of exponentials."""
    heads = q.shape[1] // max(k.shape[1], 1)
    k, v = (np.repeat(x.astype(np.float64), heads, 1) for x in (k, v))
    scores = scale * q.astype(np.float64) @ k.swapaxes(2, 3) + added
    with np.errstate(invalid="ignore", divide="ignore"):
        largest = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - np.where(np.isinf(largest), 0.0, largest))
        total = weights.sum(-1, keepdims=True)
        lse = np.where(total > 0, np.log(total) + largest, -np.inf)[..., 0]
        return np.where(total > 0, weights / total, 0.0) @ v, lse


@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize(("q_length", "kv_length"), [(5, 5), (1, 7), (7, 3), (4, 1)])
@pytest.mark.parametrize("causal", [False, "top_left", "bottom_right"])
def test_against_the_definition(q_length: int, kv_length: int, kv_heads: int, causal: bool | str) -> None:
    q, k, v = randn(2, 6, q_length, 8), randn(2, kv_heads, kv_length, 8), randn(2, kv_heads, kv_length, 8)
    last = np.arange(q_length)[:, None] + (kv_length - q_length if causal == "bottom_right" else 0)
    added = np.where(np.arange(kv_length) <= last, 0.0, -np.inf) if causal else 0.0
    out, lse = ops.attention(q, k, v, is_causal=causal, return_lse=True)
    want, want_lse = exact(q, k, v, 8**-0.5, added)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, F32, q.shape[:3], F32)
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(ops.attention(q, k, v, is_causal=causal), out)


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (1, 1, 3, 5), (3, 5), (5,), (1, 5), (3, 1), (2, 1, 1, 5), (4, 1, 1)])
@pytest.mark.parametrize("kind", ["bool", "float32"])
def test_masks_broadcast(shape: tuple[int, ...], kind: str, recorder: Callable[[str], Recorder]) -> None:
    q, k, v = randn(2, 4, 3, 8), randn(2, 2, 5, 8), randn(2, 2, 5, 8)
    if kind == "bool":
        mask = DRAW.random(shape) < 0.6
        added = np.where(mask, 0.0, -np.inf)
    else:
        mask = added = randn(*shape)
    want, _ = exact(q, k, v, 8**-0.5, added)
    np.testing.assert_allclose(ops.attention(q, k, v, mask=mask), want, rtol=1e-4, atol=1e-5)
    kernel = recorder("attention")
    ops.attention(q, k, v, mask=mask, kernel=kernel.id)
    assert kernel.seen["mask"][0] == (1,) * (4 - len(shape)) + shape
    assert kernel.seen["mask"][2] == mask.ctypes.data, "it is not copied"


def test_a_mask_and_causal_both_hold() -> None:
    q, k = randn(1, 2, 4, 8), randn(1, 2, 4, 8)
    mask = np.ones((4, 4), bool)
    mask[:, 0] = False
    out, lse = ops.attention(q, k, k, mask=mask, is_causal=True, return_lse=True)
    want, _ = exact(q, k, k, 8**-0.5, np.where(mask & np.tri(4, dtype=bool), 0.0, -np.inf))
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert (out[:, :, 0] == 0).all(), "the first query sees nothing"
    assert np.isneginf(lse[:, :, 0]).all()


@pytest.mark.parametrize("shape", [(0, 2, 3, 8), (2, 0, 3, 8), (2, 2, 0, 8), (2, 2, 3, 0)])
def test_nothing(shape: tuple[int, ...]) -> None:
    q = randn(*shape)
    out, lse = ops.attention(q, q, q, return_lse=True)
    assert (out.shape, lse.shape) == (shape, shape[:3])


def test_no_keys() -> None:
    q, k = randn(2, 2, 3, 8), randn(2, 1, 0, 8)
    out, lse = ops.attention(q, k, k, return_lse=True)
    assert (out == 0).all()
    assert np.isneginf(lse).all()
    grads = ops.attention_backward(q, q, k, k, out, lse)
    assert [g.shape for g in grads] == [q.shape, k.shape, k.shape]
    assert (grads[0] == 0).all()


def test_views_are_not_copied(recorder: Callable[[str], Recorder]) -> None:
    """Heads within rows, as models have them, and all three in one packed array."""
    packed = randn(2, 7, 4 + 2 + 2, 8)
    q, k, v = (packed[:, :, at].transpose(0, 2, 1, 3) for at in (slice(0, 4), slice(4, 6), slice(6, 8)))
    out = np.zeros((2, 7, 4, 8), F32).transpose(0, 2, 1, 3)
    assert ops.attention(q, k, v, out=out) is out
    np.testing.assert_allclose(out, exact(q, k, v, 8**-0.5)[0], rtol=1e-4, atol=1e-5)
    kernel = recorder("attention")
    ops.attention(q, k, v, out=out, kernel=kernel.id)
    strides = (7 * 64, 8, 64, 1)
    assert {name: found[1:] for name, found in kernel.seen.items()} == {
        "q": (strides, q.ctypes.data),
        "k": (strides, k.ctypes.data),
        "v": (strides, v.ctypes.data),
        "out": ((7 * 32, 8, 32, 1), out.ctypes.data),
    }


def numeric(function: Callable[[Any], Any], x: Any, weights: Any) -> Any:
    """The gradient of ``sum(weights * function(x))`` by differences, in float64."""
    gradient = np.zeros_like(x)
    for at in np.ndindex(x.shape):
        values = []
        for step in (1e-5, -1e-5):
            moved = x.copy()
            moved[at] += step
            values.append((weights * function(moved)).sum())
        gradient[at] = (values[0] - values[1]) / 2e-5
    return gradient


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_by_differences(causal: bool) -> None:
    q, k, v = (randn(1, n, m, 4, dtype=np.float64) for n, m in ((2, 3), (1, 4), (1, 4)))
    weights = randn(1, 2, 3, 4, dtype=np.float64)
    mask = randn(3, 4, dtype=np.float64)
    options: dict[str, Any] = {"is_causal": causal, "mask": mask, "scale": 0.7}
    out, lse = ops.attention(q, k, v, return_lse=True, **options)
    grads = ops.attention_backward(weights, q, k, v, out, lse, **options)
    wanted = (
        numeric(lambda x: ops.attention(x, k, v, **options), q, weights),
        numeric(lambda x: ops.attention(q, x, v, **options), k, weights),
        numeric(lambda x: ops.attention(q, k, x, **options), v, weights),
    )
    for got, want in zip(grads, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_gradients_into_parts_of_one_array() -> None:
    q, k, v = randn(2, 4, 7, 8), randn(2, 2, 7, 8), randn(2, 2, 7, 8)
    out, lse = ops.attention(q, k, v, return_lse=True)
    want = ops.attention_backward(out, q, k, v, out, lse)
    packed = np.zeros((2, 7, 8, 8), F32)
    parts = [packed[:, :, at].transpose(0, 2, 1, 3) for at in (slice(0, 4), slice(4, 6), slice(6, 8))]
    got = ops.attention_backward(out, q, k, v, out, lse, grad_q=parts[0], grad_k=parts[1], grad_v=parts[2])
    for one, part, other in zip(got, parts, want, strict=True):
        assert one is part
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match=r"'grad_v'.*shares memory with the result 'grad_k'"):
        ops.attention_backward(out, q, k, v, out, lse, grad_k=parts[1], grad_v=parts[1])
    with pytest.raises(InputError, match=r"'grad_q'.*shares memory with 'grad_out'"):
        ops.attention_backward(out, q, k, v, out.copy(), lse, grad_q=out)


def test_dropout_is_the_same_again() -> None:
    q, k, v = randn(1, 2, 16, 8), randn(1, 2, 16, 8), np.ones((1, 2, 16, 8), F32)
    first = ops.attention(q, k, v, dropout_p=0.5, rng=np.array([1, 0]))
    np.testing.assert_array_equal(first, ops.attention(q, k, v, dropout_p=0.5, rng=np.array([1, 0])))
    assert not np.array_equal(first, ops.attention(q, k, v, dropout_p=0.5, rng=np.array([2, 0])))
    assert first.mean() == pytest.approx(1.0, abs=0.2)
    np.testing.assert_array_equal(ops.attention(q, k, v, rng=np.array([1, 0])), ops.attention(q, k, v))


Q, K = randn(2, 4, 5, 8), randn(2, 2, 7, 8)
OUT, LSE = ops.attention(Q, K, K, return_lse=True)


def backward(**changes: Any) -> Any:
    given = {"grad_out": OUT, "q": Q, "k": K, "v": K, "out": OUT, "lse": LSE} | changes
    return ops.attention_backward(**given)


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "rank": (lambda: ops.attention(Q[0], K, K), r"'q' \[4, 5, 8\].*expected \[batch, heads, length, head_dim\]"),
    "dtype": (lambda: ops.attention(Q, K, K.astype(np.float64)), "'v'.*another dtype than 'q'"),
    "batch": (lambda: ops.attention(Q, K[:1], K), r"'k' \[1, 2, 7, 8\].*dimension 0 must be 2, the batch of 'q'"),
    "heads": (lambda: ops.attention(Q[:, :3], K, K), "'q'.* has 3 heads, which is no multiple of the 2 heads of 'k'"),
    "no heads": (lambda: ops.attention(Q, K[:, :0], K[:, :0]), "no multiple of the 0 heads of 'k'"),
    "head_dim": (lambda: ops.attention(Q, K[..., :4], K), "'k'.*must be 8, the head_dim of 'q'"),
    "mask": (lambda: ops.attention(Q, K, K, mask=np.ones((5, 6), bool)), r"'mask'.*does not broadcast to \[2, 4, 5, 7"),
    "mask dtype": (lambda: ops.attention(Q, K, K, mask=np.ones((5, 7), int)), r"'mask'.*int64.*must be bool \(true"),
    "causal": (lambda: ops.attention(Q, K, K, is_causal="left"), "is_causal is 'left'; expected True or 'top_left'"),
    "scale": (lambda: ops.attention(Q, K, K, scale=float("inf")), "scale is inf; expected a finite number"),
    "dropout": (lambda: ops.attention(Q, K, K, dropout_p=0.1), "dropout_p is given without 'rng'"),
    "all dropped": (lambda: ops.attention(Q, K, K, dropout_p=1), "dropout_p is 1.0.*expected 0 <= dropout_p < 1"),
    "rng": (lambda: ops.attention(Q, K, K, dropout_p=0.1, rng=np.ones(2)), r"'rng'.*must be contiguous int64 \[2\]"),
    "out": (lambda: ops.attention(Q, K, K, out=np.zeros_like(K)), r"'out'.*the result is \[2, 4, 5, 8\]"),
    "out is q": (lambda: ops.attention(Q, K, K, out=Q), "'out'.*shares memory with 'q'"),
    "grad_out": (lambda: backward(grad_out=OUT[:, :, :4]), "'grad_out'.*dimension 2 must be 5"),
    "lse": (lambda: backward(lse=LSE.astype(np.float64)), "'lse'.*must be float32"),
    "lse rank": (lambda: backward(lse=LSE[0]), r"'lse'.*expected \[batch, heads, q_length\]"),
    "no lse": (lambda: backward(lse=None), "the argument 'lse' is missing"),
    "out shape": (lambda: backward(out=K), "'out'.*must be"),
    "gradient": (lambda: backward(grad_k=np.zeros_like(Q)), r"'grad_k'.*the result is \[2, 2, 7, 8\]"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_calls_name_the_argument(what: str) -> None:
    call, said = BAD[what]
    with pytest.raises(InputError, match=said):
        call()


@pytest.fixture
def gradients_of_the_reference_are_wrong(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    row = advisories.Advisory(
        kernels=("cpu.reference",), wrong="it is off", reference="https://tracker/1", gradient=True, keys=(4, 3)
    )
    with monkeypatch.context() as stated:
        stated.setattr(advisories, "ADVISORIES", (row,))
        use_advisories()
        yield
    use_advisories()


@pytest.mark.usefixtures("gradients_of_the_reference_are_wrong")
def test_a_kernel_that_is_known_to_be_wrong_serves_no_such_call() -> None:
    q, k = randn(1, 2, 3, 8), randn(1, 2, 11, 8)
    out, lse = ops.attention(q, k, k, return_lse=True, kernel="cpu.reference")
    policy = xrt.Policy(kernels={"attention": "cpu.reference"}, mode="strict")
    for more in ({"kernel": "cpu.reference"}, {"policy": policy}, {}):
        with pytest.raises(UnsupportedOperationError, match=r"it is off \(https://tracker/1\)"):
            ops.attention_backward(out, q, k, k, out, lse, **more)
    k = k[:, :, 1:].copy()
    out, lse = ops.attention(q, k, k, return_lse=True)
    ops.attention_backward(out, q, k, k, out, lse, kernel="cpu.reference")
