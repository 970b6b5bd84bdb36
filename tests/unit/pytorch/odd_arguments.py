# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls of operators that a policy can decide, with arguments that PyTorch refuses or seldom sees."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = torch.nn.functional
_fake = FakeTensorMode(allow_non_fake_inputs=True)


class Subclass(torch.Tensor):
    """One without behavior of its own."""


def _inference(x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return x.clone()


#: What one operand, or several alike, are replaced by.
ODD: dict[str, Callable[[torch.Tensor], Any]] = {
    "one dimension more": lambda x: x.clone()[None],
    "two dimensions more": lambda x: x.clone()[None, None],
    "one dimension less": lambda x: x.clone()[0],
    "no dimensions": lambda x: torch.tensor(2.0),
    "vector": lambda x: torch.ones(4),
    "empty": lambda x: x.new_empty(0),
    "no rows": lambda x: x[:0].clone(),
    "no columns": lambda x: x[..., :0].clone(),
    "longer last": lambda x: torch.cat([x, x], -1),
    "longer first": lambda x: torch.cat([x, x], 0),
    **{
        str(dtype).removeprefix("torch."): lambda x, dtype=dtype: x.to(dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.bool, torch.complex64)
    },
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "csr": lambda x: x.to_sparse_csr(),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
    "mkldnn": lambda x: x.to_mkldnn(),
    "nested": lambda x: torch.nested.nested_tensor([x, x]),
    "conj": lambda x: torch.complex(x, x).conj(),
    "neg": lambda x: torch.complex(x, x).conj().imag,
    "zeros that are not stored": lambda x: torch._efficientzerotensor(x.shape),
    "transposed": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": lambda x: torch.stack([x, x], -1)[..., 0],
    "expanded": lambda x: x[:1].clone().expand(x.shape),
    "requires_grad": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x.clone()),
    "inference": _inference,
    "None": lambda x: None,
    "list": lambda x: x.tolist(),
    "number": lambda x: 2.5,
    "subclass": lambda x: x.clone().as_subclass(Subclass),
    "wrapper": lambda x: TwoTensor(x.clone(), x.clone()),
    "fake": lambda x: _fake.from_tensor(x),
    "functional": lambda x: torch._to_functional_tensor(x.clone()),
}


def _rand(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


_M, _N, _B, _C = _rand(3, 4), _rand(4, 5), _rand(2, 3, 4), _rand(2, 4, 5)
_Q, _K = _rand(1, 2, 3, 4), _rand(1, 2, 5, 4)
_IMAGE, _WEIGHT = _rand(1, 3, 6, 6), _rand(4, 3, 3, 3)
_FP8 = (_rand(16, 32).to(torch.float8_e4m3fn), _rand(48, 32).to(torch.float8_e4m3fn).t())
_SCALE = torch.tensor(1.0)

#: Operator to how it is called, and its operands.
CALLS: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "mm": (torch.mm, (_M, _N)),
    "mm out": (lambda a, b, out: torch.mm(a, b, out=out), (_M, _N, _rand(3, 5))),
    "bmm": (torch.bmm, (_B, _C)),
    "bmm out": (lambda a, b, out: torch.bmm(a, b, out=out), (_B, _C, _rand(2, 3, 5))),
    "addmm": (torch.addmm, (_rand(5), _M, _N)),
    "addmm out": (lambda c, a, b, out: torch.addmm(c, a, b, out=out), (_rand(5), _M, _N, _rand(3, 5))),
    "addmm_": (lambda c, a, b: c.addmm_(a, b), (_rand(3, 5), _M, _N)),
    "baddbmm": (torch.baddbmm, (_rand(2, 3, 5), _B, _C)),
    "addbmm": (torch.addbmm, (_rand(3, 5), _B, _C)),
    "matmul": (torch.matmul, (_B, _N)),
    "linear": (F.linear, (_B, _rand(5, 4), _rand(5))),
    "_addmm_activation": (torch._addmm_activation, (_rand(5), _M, _N)),
    "_scaled_mm": (
        lambda bias, a, s: torch._scaled_mm(a, _FP8[1], s, _SCALE, bias, out_dtype=torch.bfloat16),
        (_rand(48).bfloat16(), _FP8[0], _SCALE),
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (4,), w, b), (_B, _rand(4), _rand(4))),
    "rms_norm": (lambda x, w: F.rms_norm(x, (4,), w), (_B, _rand(4))),
    "sdpa": (F.scaled_dot_product_attention, (_Q, _K, _K)),
    "sdpa of three dimensions": (F.scaled_dot_product_attention, (_Q[0], _K[0], _K[0])),
    "sdpa with a mask": (F.scaled_dot_product_attention, (_Q, _K, _K, _rand(3, 5))),
    "conv1d": (F.conv1d, (_rand(2, 3, 6), _rand(4, 3, 3), _rand(4))),
    "conv2d": (F.conv2d, (_IMAGE, _WEIGHT, _rand(4))),
    "conv3d": (F.conv3d, (_rand(1, 2, 4, 4, 4), _rand(3, 2, 3, 3, 3), _rand(3))),
    "conv_transpose2d": (F.conv_transpose2d, (_IMAGE, _rand(3, 2, 3, 3), _rand(2))),
    "convolution": (
        lambda x, w, b: torch.convolution(x, w, b, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        (_IMAGE, _WEIGHT, _rand(4)),
    ),
    "gru_cell": (torch.gru_cell, (_rand(2, 4), _rand(2, 3), _rand(9, 4), _rand(9, 3), _rand(9), _rand(9))),
}
#: With operands of other sizes PyTorch itself may write past the end of memory.
_SAFE = {"gru_cell": ("requires_grad", "parameter", "subclass", "float64", "transposed", "with gaps", "wrapper")}
#: Calls in which PyTorch's own result is not that of its arguments: it reads the memory of a tensor that has none.
_UNDEFINED = re.compile("meta|sdpa.*zeros that are not stored")

_NUMBERS = (2, 2.5, True, 1j, None, "1", torch.tensor(2.0), torch.tensor([1.0, 2.0]), float("inf"), 2**70, 0, 1e40)


def operand_calls(name: str) -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Yield the calls of one operator: with what is odd, the call, and whether its values are defined."""
    function, operands = CALLS[name]
    places = [(i,) for i in range(len(operands))]
    places += [(i, i + 1) for i in range(len(operands) - 1)] + [tuple(range(len(operands)))]
    for changed in dict.fromkeys(places):
        for odd, change in ODD.items():
            if odd not in _SAFE.get(name, (odd,)):
                continue

            def call(changed: tuple[int, ...] = changed, change: Callable[[torch.Tensor], Any] = change) -> Any:
                return function(*(change(x) if i in changed else x.clone() for i, x in enumerate(operands)))

            yield f"{name} with {odd} at {changed}", call, not _UNDEFINED.search(f"{name} {odd}")


def number_calls() -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Yield calls with odd numbers in place of factors, sizes and options."""
    for value in _NUMBERS:
        for name in ("beta", "alpha"):
            yield f"addmm {name}={value}", lambda n=name, v=value: torch.addmm(_rand(5), _M, _N, **{n: v}), True
            yield f"addmm_ {name}={value}", lambda n=name, v=value: _rand(3, 5).addmm_(_M, _N, **{n: v}), True
            half = (_rand(3, 5).half(), _M.half(), _N.half())
            yield f"addmm of halves {name}={value}", lambda n=name, v=value, h=half: torch.addmm(*h, **{n: v}), True
        yield f"layer_norm eps={value}", lambda v=value: F.layer_norm(_B, (4,), eps=v), True
        yield f"rms_norm eps={value}", lambda v=value: F.rms_norm(_B, (4,), eps=v), True
        for name in ("scale", "is_causal", "enable_gqa"):
            yield (
                f"sdpa {name}={value}",
                lambda n=name, v=value: F.scaled_dot_product_attention(_Q, _Q, _Q, **{n: v}),
                True,
            )
    for sizes in (-1, (1,), (1, 1), (1, 1, 1), (), "same", "x", (-1, 1), (1.5, 1), 100, 0):
        for name in ("stride", "padding", "dilation", "groups"):
            yield f"conv2d {name}={sizes}", lambda n=name, v=sizes: F.conv2d(_IMAGE, _WEIGHT, **{n: v}), True
        yield f"layer_norm of {sizes}", lambda v=sizes: F.layer_norm(_B, v), True
        yield f"rms_norm of {sizes}", lambda v=sizes: F.rms_norm(_B, v), True


#: What is given to write into.
INTO: dict[str, Callable[[], Any]] = {
    "of the size": lambda: torch.empty(3, 5),
    "of another size": lambda: torch.empty(2, 2),
    "of float64": lambda: torch.empty(3, 5, dtype=torch.float64),
    "of integers": lambda: torch.empty(3, 5, dtype=torch.int64),
    "on meta": lambda: torch.empty(3, 5, device="meta"),
    "requires_grad": lambda: torch.empty(3, 5, requires_grad=True),
    "expanded": lambda: torch.empty(1, 5).expand(3, 5),
    "transposed": lambda: torch.empty(5, 3).t(),
    "with gaps": lambda: torch.empty(3, 10)[:, ::2],
    "sparse": lambda: torch.empty(3, 5).to_sparse(),
    "list": lambda: [1],
    "of three dimensions": lambda: torch.empty(1, 3, 5),
    "conj": lambda: torch.empty(3, 5, dtype=torch.complex64).conj(),
    "neg": lambda: torch.empty(3, 5, dtype=torch.complex64).conj().imag,
}


def out_calls() -> Iterator[tuple[str, Callable[[], Any], bool]]:
    """Yield calls that write into what does not fit, with operands that need a gradient and others."""
    for odd, make in INTO.items():
        for grad in (False, True):
            a = _M.clone().requires_grad_(grad)
            forms: dict[str, Callable[..., Any]] = {
                "mm": lambda out, a=a: torch.mm(a, _N, out=out),
                "matmul": lambda out, a=a: torch.matmul(a, _N, out=out),
                "addmm": lambda out, a=a: torch.addmm(_rand(5), a, _N, beta=2, out=out),
                "addbmm": lambda out, a=a: torch.addbmm(_rand(3, 5), a[None], _N[None], out=out),
            }
            for name, form in forms.items():
                yield f"{name} into one {odd}, gradient {grad}", lambda f=form, m=make: f(m()), odd != "on meta"


def outcome(call: Callable[[], Any]) -> tuple[str, list[torch.Tensor]]:
    """Return what a call gives in words, or how it is refused, and its values."""
    try:
        result = call()
    except Exception as error:
        return f"refused: {type(error).__name__}: {str(error).partition(chr(10))[0]}", []
    parts = result if isinstance(result, (tuple, list)) else (result,)
    return ", ".join(map(_looks, parts)), [value for part in parts for value in _values(part)]


def _looks(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return repr(x)
    shape = "" if x.is_nested else tuple(x.shape)
    dense = x.layout is torch.strided and not x.is_nested
    rest = (x.dtype, x.device, x.layout, x.stride() if dense else None, x.requires_grad)
    return f"{type(x).__name__} {shape} {rest}"


def _values(x: Any) -> list[torch.Tensor]:
    if not isinstance(x, torch.Tensor) or x.device.type == "meta" or isinstance(x, torch._subclasses.FakeTensor):
        return []
    if torch._is_functional_tensor(x):
        x = torch._from_functional_tensor(x)
    if x.is_nested:
        return [value for part in x.unbind() for value in _values(part)]
    x = x.detach()
    if x.is_quantized:
        x = x.dequantize()
    if x.layout != torch.strided:
        x = x.to_dense()
    x = x.resolve_conj().resolve_neg()
    return [x.to(torch.complex128 if x.is_complex() else torch.float64).clone()]
