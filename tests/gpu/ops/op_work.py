# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""One call of every operation on PyTorch tensors, with what it should give by PyTorch in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from xpuruntime import UnsupportedOperationError, ops

DEVICE = "cuda"
#: Largest error allowed, as a part of the largest result.
TOLERANCE = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-13, torch.float64: 1e-9}


@dataclass
class Work:
    """One call: `run` takes the tensors of `into` by name, to write to them; `want` says what they should hold."""

    name: str
    op: str
    run: Callable[..., Any]
    inputs: dict[str, torch.Tensor]
    into: dict[str, torch.Tensor]
    want: Callable[..., dict[str, torch.Tensor]]
    dtype: torch.dtype = field(default=torch.bfloat16)

    def __call__(self, **options: Any) -> Any:
        return self.run(**self.inputs, **self.into, **options)

    def fresh(self, **options: Any) -> Any:
        """Call it so that it makes its results itself."""
        return self.run(**self.inputs, **options)

    def poison(self) -> None:
        """Overwrite what was written before."""
        for tensor in self.into.values():
            tensor.fill_(float("nan"))
        synchronize()

    def check(self) -> None:
        """Compare what was written with the expected, after all work on the device."""
        synchronize()
        wanted = self.want(**self.inputs)
        for name, tensor in self.into.items():
            assert_near(tensor, wanted[name], self.dtype, f"{self.name}: {name}")


def refusal(call: Callable[[], Any]) -> str | None:
    """Return why a call is refused, or ``None`` when it was served."""
    try:
        call()
    except UnsupportedOperationError as refused:
        return str(refused)
    return None


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def assert_near(got: torch.Tensor, want: torch.Tensor, dtype: torch.dtype, what: str) -> None:
    """Fail unless every element is near enough; NaN never is."""
    assert tuple(got.shape) == tuple(want.shape), what
    if want.numel() == 0:
        return
    error = (got.double() - want).abs()
    bound = TOLERANCE[dtype] * max(want.abs().max().item(), 1e-3)
    assert bool((error <= bound).all()), f"{what}: off by {error.nan_to_num(math.inf).max().item():g}, bound {bound:g}"


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def matmul_work(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16, name: str = "matmul") -> Work:
    def want(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": functional.relu(a.double() @ b.double() + bias.double())}

    return Work(
        name=name,
        op="matmul",
        run=lambda **given: ops.matmul(activation="relu", **given),
        inputs={"a": randn(m, k, dtype=dtype), "b": randn(k, n, dtype=dtype), "bias": randn(n, dtype=dtype)},
        into={"out": torch.empty(m, n, device=DEVICE, dtype=dtype)},
        want=want,
        dtype=dtype,
    )


def product_work(m: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> Work:
    """Return a matmul without bias and activation, which every kernel of matmul has."""

    def want(a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": a.double() @ b.double()}

    return Work(
        name="product",
        op="matmul",
        run=ops.matmul,
        inputs={"a": randn(m, k, dtype=dtype), "b": randn(k, n, dtype=dtype)},
        into={"out": torch.empty(m, n, device=DEVICE, dtype=dtype)},
        want=want,
        dtype=dtype,
    )


def exact_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in float64, and the logarithm of the sum of exponentials."""
    heads = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads, 1), v.repeat_interleave(heads, 1)
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    return torch.softmax(scores, -1) @ v, torch.logsumexp(scores, -1)


def attention_inputs(length: int, head_dim: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    # As models have them: [batch, length, heads, head_dim] in memory.
    shapes = {"q": (2, length, 4, head_dim), "k": (2, length, 2, head_dim), "v": (2, length, 2, head_dim)}
    return {name: randn(*shape, dtype=dtype).transpose(1, 2) for name, shape in shapes.items()}


def attention_work(length: int = 200, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Work:
    def want(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": exact_attention(q.double(), k.double(), v.double())[0]}

    inputs = attention_inputs(length, head_dim, dtype)
    return Work(
        name="attention",
        op="attention",
        run=lambda **given: ops.attention(is_causal=True, **given),
        inputs=inputs,
        into={"out": torch.empty_like(inputs["q"])},
        want=want,
        dtype=dtype,
    )


def attention_backward_work(length: int = 200, head_dim: int = 64, dtype: torch.dtype = torch.bfloat16) -> Work:
    inputs = attention_inputs(length, head_dim, dtype)
    out, lse = exact_attention(*(x.double() for x in inputs.values()))
    inputs |= {"out": out.to(dtype), "lse": lse.float(), "grad_out": randn(*out.shape, dtype=dtype)}

    def want(grad_out: torch.Tensor, q: Any, k: Any, v: Any, **_: Any) -> dict[str, torch.Tensor]:
        leaves = [x.double().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            result, _ = exact_attention(*leaves)
            gradients = torch.autograd.grad(result, leaves, grad_out.double())
        return dict(zip(("grad_q", "grad_k", "grad_v"), gradients, strict=True))

    return Work(
        name="attention_backward",
        op="attention_backward",
        run=lambda **given: ops.attention_backward(is_causal=True, **given),
        inputs=inputs,
        into={f"grad_{name}": torch.empty_like(inputs[name]) for name in ("q", "k", "v")},
        want=want,
        dtype=dtype,
    )


def exact_norm(rms: bool, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    if rms:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight
    return functional.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def norm_work(rms: bool, rows: int = 130, columns: int = 768, dtype: torch.dtype = torch.bfloat16) -> Work:
    shape = (2, rows // 2, columns)

    def want(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: Any = None
    ) -> dict[str, torch.Tensor]:
        total = x.double() + residual.double()
        out = exact_norm(rms, total.to(dtype).double(), weight.double(), None if bias is None else bias.double())
        return {"out": out, "sum_out": total}

    inputs = {
        "x": randn(*shape, dtype=dtype),
        "residual": randn(*shape, dtype=dtype),
        "weight": randn(columns, dtype=dtype),
    }
    if not rms:
        inputs["bias"] = randn(columns, dtype=dtype)
    op = "rms_norm" if rms else "layer_norm"
    return Work(
        name=op,
        op=op,
        run=lambda **given: getattr(ops, op)(return_sum=True, **given),
        inputs=inputs,
        into={name: torch.empty(shape, device=DEVICE, dtype=dtype) for name in ("out", "sum_out")},
        want=want,
        dtype=dtype,
    )


def norm_backward_work(rms: bool, rows: int = 130, columns: int = 768, dtype: torch.dtype = torch.bfloat16) -> Work:
    x = randn(rows, columns, dtype=dtype)
    exact = x.double()
    inputs = {"grad_out": randn(rows, columns, dtype=dtype), "x": x, "weight": randn(columns, dtype=dtype)}
    if rms:
        inputs["rstd"] = torch.rsqrt(exact.square().mean(-1) + 1e-6).float()
    else:
        inputs["mean"] = exact.mean(-1).float()
        inputs["rstd"] = torch.rsqrt(exact.var(-1, unbiased=False) + 1e-5).float()

    def want(grad_out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, **_: Any) -> dict[str, torch.Tensor]:
        leaf = x.double().requires_grad_()
        with torch.enable_grad():
            (gradient,) = torch.autograd.grad(exact_norm(rms, leaf, weight.double(), None), leaf, grad_out.double())
        return {"grad_x": gradient}

    op = "rms_norm_backward" if rms else "layer_norm_backward"
    return Work(
        name=op,
        op=op,
        run=lambda **given: getattr(ops, op)(**given),
        inputs=inputs,
        into={"grad_x": torch.empty_like(x)},
        want=want,
        dtype=dtype,
    )


def conv_work(dtype: torch.dtype = torch.bfloat16, channels_last: bool = True) -> Work:
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def want(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": functional.conv2d(x.double(), weight.double(), bias.double(), stride=2, padding=1)}

    inputs = {
        "x": randn(2, 32, 17, 19, dtype=dtype).contiguous(memory_format=layout),
        "weight": randn(64, 32, 3, 3, dtype=dtype).contiguous(memory_format=layout),
        "bias": randn(64, dtype=dtype),
    }
    return Work(
        name="conv",
        op="conv",
        run=lambda **given: ops.conv2d(stride=2, padding=1, **given),
        inputs=inputs,
        into={"out": torch.empty(2, 64, 9, 10, device=DEVICE, dtype=dtype).contiguous(memory_format=layout)},
        want=want,
        dtype=dtype,
    )


def depthwise_work(
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, int, int, int] = (2, 32, 17, 19),
    window: tuple[int, int] = (3, 3),
    channels_last: bool = True,
    **options: Any,
) -> Work:
    """Return a convolution of each channel by itself."""
    options = {"stride": 2, "padding": 1} | options
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def want(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"out": functional.conv2d(x.double(), weight.double(), bias.double(), groups=shape[1], **options)}

    inputs = {
        "x": randn(*shape, dtype=dtype).contiguous(memory_format=layout),
        "weight": randn(shape[1], 1, *window, dtype=dtype),
        "bias": randn(shape[1], dtype=dtype),
    }
    meta = {name: torch.empty_like(tensor, device="meta") for name, tensor in inputs.items()}
    size = functional.conv2d(meta["x"], meta["weight"], groups=shape[1], **options).shape
    return Work(
        name="depthwise",
        op="conv",
        run=lambda **given: ops.conv2d(groups=shape[1], **options, **given),
        inputs=inputs,
        into={"out": torch.empty(size, device=DEVICE, dtype=dtype).contiguous(memory_format=layout)},
        want=want,
        dtype=dtype,
    )


def conv_gradient_work(of: str, dtype: torch.dtype = torch.bfloat16) -> Work:
    def want(grad_out: torch.Tensor, **other: torch.Tensor) -> dict[str, torch.Tensor]:
        x = torch.zeros(2, 32, 17, 19, device=grad_out.device, dtype=torch.float64)
        weight = torch.zeros(64, 32, 3, 3, device=grad_out.device, dtype=torch.float64)
        leaves = [other.get("x", x).double().requires_grad_(), other.get("weight", weight).double().requires_grad_()]
        out = functional.conv2d(*leaves, stride=2, padding=1)
        grad_x, grad_weight = torch.autograd.grad(out, leaves, grad_out.double())
        return {"grad_x": grad_x} if of == "input" else {"grad_weight": grad_weight}

    def lying(*shape: int) -> torch.Tensor:
        return randn(*shape, dtype=dtype).contiguous(memory_format=torch.channels_last)

    grad_out, x, weight = lying(2, 64, 9, 10), lying(2, 32, 17, 19), lying(64, 32, 3, 3)
    if of == "input":
        inputs, into = {"grad_out": grad_out, "weight": weight}, {"grad_x": torch.empty_like(x)}
    else:
        inputs, into = {"grad_out": grad_out, "x": x}, {"grad_weight": torch.empty_like(weight)}

    def run(**given: Any) -> Any:
        if of == "input":
            return ops.conv2d_input_gradient(input_size=(17, 19), stride=2, padding=1, **given)
        return ops.conv2d_weight_gradient(kernel_size=3, stride=2, padding=1, **given)

    return Work(
        name=f"conv_{of}_gradient", op=f"conv_{of}_gradient", run=run, inputs=inputs, into=into, want=want, dtype=dtype
    )


#: One work for every operation.
WORKS: dict[str, Callable[[torch.dtype], Work]] = {
    "matmul": lambda dtype: matmul_work(200, 264, 192, dtype),
    "skinny": lambda dtype: matmul_work(8, 512, 1024, dtype, "skinny"),
    "attention": lambda dtype: attention_work(dtype=dtype),
    "attention_backward": lambda dtype: attention_backward_work(dtype=dtype),
    "layer_norm": lambda dtype: norm_work(False, dtype=dtype),
    "rms_norm": lambda dtype: norm_work(True, dtype=dtype),
    "layer_norm_backward": lambda dtype: norm_backward_work(False, dtype=dtype),
    "rms_norm_backward": lambda dtype: norm_backward_work(True, dtype=dtype),
    "conv": lambda dtype: conv_work(dtype),
    "depthwise": lambda dtype: depthwise_work(dtype),
    "conv_input_gradient": lambda dtype: conv_gradient_work("input", dtype),
    "conv_weight_gradient": lambda dtype: conv_gradient_work("weight", dtype),
}


def make_work(name: str, dtype: torch.dtype = torch.bfloat16) -> Work:
    """Return one of `WORKS`, or ``"product"``, with its inputs there."""
    work = product_work(200, 264, 192, dtype) if name == "product" else WORKS[name](dtype)
    synchronize()
    return work
