# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operations of rows that ``torch.compile`` makes one kernel of, forward and backward apart, for eager calls.

The backward computes what it needs from the inputs anew, so that nothing else is kept for it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from importlib.util import find_spec
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.ops.torch_kernels import TorchKernel
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import thread_policy
from xpuruntime.pytorch.providers.chunked import is_loss_of_rows, loss_in_parts, scaled_gradients, unsaved_gradients
from xpuruntime.pytorch.providers.operations import geglu, laid_out, rope, swiglu

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor

    from xpuruntime.ops.torch_kernels import Saved, TorchCall

__all__ = ["KERNELS"]

_TYPES = ("float32", "float16", "bfloat16")
#: The compiler that Inductor takes where ``CXX`` names none.
_COMPILER = "clang++" if sys.platform == "darwin" else "g++"


#: Layouts of one function that get code of their own, for any number of rows; others share code for any sizes.
_MOST_LAYOUTS = 8
#: Layouts whose code is kept; with one more, all are looked for again.
_MOST_KEPT = 4096
#: Largest index that code for 32 bits reaches.
_MOST_INDEX = (1 << 31) - 1
_code: dict[Any, Callable[..., Any]] = {}
#: By the identity of a call and the strides of its gradients: the call, which keeps its identity from another, the
#: switches, and its code.
_by_call: dict[tuple[Any, ...], tuple[Any, Any, Callable[..., Any]]] = {}
_layouts: dict[Any, set[Any]] = {}


def _own(function: FunctionType) -> Any:
    """Return a function once more: PyTorch counts what it compiles of one code object, and gives up after a few."""
    own = FunctionType(function.__code__.replace(co_name=function.__name__), function.__globals__, function.__name__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


@functools.lru_cache(maxsize=256)
def _of_any_sizes(function: FunctionType, kind: Any) -> Callable[..., Any]:
    del kind
    return _apart(torch.compile(_own(function), dynamic=True, fullgraph=True))


def _apart(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Call code through Dynamo, which tells modes apart, as inside of an operator."""

    def run(*tensors: Tensor, **options: Any) -> Any:
        with _inside(tensors[0].device.type):
            return compiled(*[x.detach() for x in tensors], **options)

    return run


@contextlib.contextmanager
def _inside(device: str) -> Iterator[None]:
    """Let code be compiled as inside of an operator: without autograd, autocast and a policy."""
    casts = device in ("cpu", "cuda") and torch.is_autocast_enabled(device)
    cast = torch.autocast(device, enabled=False) if casts else contextlib.nullcontext()
    with thread_policy(None), torch.no_grad(), _private_api.below_autograd(), cast:
        yield


def _run(
    call: TorchCall | None, function: Any, *tensors: Tensor, grads: Sequence[Tensor] = (), rows: bool = False,
    **options: Any,
) -> Any:  # fmt: skip
    """Run a function compiled for tensors of these layouts, the number of rows apart, which is that of dimension 0.

    `rows` says that it computes each row alone, so that one code serves dense tensors whatever their dimensions.
    """
    # For one `call`, whose tensors lie alike each time, the code is looked up once. Behind them it takes its `grads`,
    # which may lie in another way than before.
    switches = _switches(tensors[0])
    key = (id(call), *[grad.stride() for grad in grads])
    tensors = (*tensors, *grads)
    known = _by_call.get(key)
    if known is not None and known[1] == switches:
        return known[2](*tensors, **options)
    code = _by_rows(function, tensors, options, switches) if rows else _find(function, tensors, options, switches)
    if call is not None:
        if len(_by_call) >= _MOST_KEPT:
            _by_call.clear()
        _by_call[key] = call, switches, code
    return code(*tensors, **options)


def _find(function: Any, tensors: Sequence[Tensor], options: dict[str, Any], switches: Any) -> Callable[..., Any]:
    layouts = (function, tensors[0].device, *switches, *options.values(), *map(_layout, tensors))
    code = _code.get(layouts)
    if code is None:
        with _inside(tensors[0].device.type):
            code = _code_for(layouts, function, [x.detach() for x in tensors], options)
    return code


def _by_rows(function: Any, tensors: Sequence[Tensor], options: dict[str, Any], switches: Any) -> Callable[..., Any]:
    shape = tensors[0].shape
    if len(shape) < 3 or not all(x.is_contiguous() and x.shape == shape for x in tensors):
        return _find(function, tensors, options, switches)
    flat = (shape[:-1].numel(), shape[-1])
    code = _find(function, [x.view(flat) for x in tensors], options, switches)

    def run(*tensors: Tensor, **options: Any) -> Any:
        results = code(*[x.view(flat) for x in tensors], **options)
        return results.view(shape) if isinstance(results, torch.Tensor) else [x.view(shape) for x in results]

    return run


def _switches(like: Tensor) -> tuple[Any, ...]:
    """Return what Inductor's code holds for beside tensors, which Dynamo would guard."""
    threads = torch.get_num_threads() if like.device.type == "cpu" else 0
    return threads, torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()


def _layout(x: Tensor) -> tuple[Any, ...]:
    """Return what the code for a tensor depends on: how it lies, whether rows are none or one, or beyond 32 bits."""
    shape, strides = x.shape, x.stride()
    if not shape:
        return (x.dtype,)
    return x.dtype, shape[1:], strides, min(shape[0], 2), max(x.numel(), shape[0] * strides[0]) > _MOST_INDEX


def _code_for(layouts: Any, function: Any, tensors: list[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    known = _layouts.setdefault(function, set())
    if len(_code) >= _MOST_KEPT:
        _code.clear()
    if len(known) < _MOST_LAYOUTS:
        known.add(layouts)
        code = _of_layout(function, tensors, options)
    else:
        order = tuple(
            (x.dtype, tuple(sorted(range(x.dim()), key=x.stride)), tuple(min(size, 2) for size in x.shape))
            for x in tensors
        )
        code = _of_any_sizes(function, (order, tuple(options.items())))
    _code[layouts] = code
    return code


def _of_layout(function: Any, tensors: list[Tensor], options: dict[str, Any]) -> Callable[..., Any]:
    # Return the code that Inductor makes for tensors that lie like these: without Dynamo, as the layout is its guards.
    # With Dynamo where its graph is no function of the tensors alone.
    graphs: list[list[tuple[bool, int]] | None] = []
    inner: list[Callable[[list[Any]], Sequence[Tensor]]] = []

    def inductor(graph: Any, examples: Any) -> Callable[..., Any]:
        graphs.append(_arguments(graph, function))
        code: Callable[..., Any] = _private_api.compile_by_inductor(graph, examples, inner.append)
        return code

    marked = [x.detach() for x in tensors]  # a mark is an attribute, which the program's own tensors are not to get
    for x in marked:
        if x.dim() and len(x) > 1:
            _private_api.mark_dynamic(x, 0)
    compiled: Callable[..., Any] = torch.compile(_own(function), backend=inductor, dynamic=False, fullgraph=True)
    expected = compiled(*marked, **options)
    arguments = graphs[0] if len(graphs) == len(inner) == 1 else None
    if arguments is None:
        return _apart(compiled)
    code, single = _private_api.code_alone(inner[0]), isinstance(expected, torch.Tensor)

    def run(*tensors: Tensor, **_: Any) -> Any:
        outputs = code([tensors[at].shape[0] if rows else tensors[at] for rows, at in arguments])
        return outputs[0] if single else outputs

    outputs = run(*tensors)
    pairs = [(outputs, expected)] if single else zip(outputs, expected, strict=True)
    return run if all(torch.equal(x, y) for x, y in pairs) else _apart(compiled)


def _arguments(graph: Any, function: Any) -> list[tuple[bool, int]] | None:
    """Return what a graph of Dynamo's is called with: each a tensor by its number, or the number of rows of one."""
    # ``None`` where it takes anything else.
    names = [f"l_{name}_" for name in function.__code__.co_varnames[: function.__code__.co_argcount]]
    taken = {node.name: node.meta.get("example_value") for node in graph.graph.nodes if node.op == "placeholder"}
    rows = {
        str(value.shape[0]): names.index(name)
        for name, value in taken.items()
        if name in names and isinstance(value, torch.Tensor) and value.dim()
    }
    arguments: list[tuple[bool, int]] = []
    for name, value in taken.items():
        if name in names:
            arguments.append((False, names.index(name)))
        elif isinstance(value, torch.SymInt) and str(value) in rows:
            arguments.append((True, rows[str(value)]))
        else:
            return None
    return arguments


def _uncompiled() -> str:
    for variable in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE"):
        if os.environ.get(variable) == "1":
            return f"{variable}=1 keeps torch.compile from compiling it. Fix: unset {variable}"
    if _private_api.dynamo_disabled():
        return "torch._dynamo.config.disable keeps it from being compiled. Fix: torch._dynamo.config.disable = False"
    if _private_api.compile_stance() != ("default", None):
        why = "the stance of torch.compile keeps it from being compiled"
        return f'{why}. Fix: torch.compiler.set_stance("default")'
    return ""


class _CompiledKernel(TorchKernel):
    alone = True
    limits = "fp32, fp16 and bf16; on CUDA with Triton, on the CPU with a C++ compiler"
    environment = ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_*", "TORCHINDUCTOR_*", "TRITON_*")
    by_kind = True
    automatic = "cuda"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        if call.phase != "backward" and (why := _uncompiled()):  # a gradient goes with its forward
            return False, why
        if call.device.startswith("cuda"):
            if find_spec("triton") is None:
                return False, "it is compiled by Triton, which is not installed. Fix: pip install triton"
        elif not shutil.which(compiler := os.environ.get("CXX", _COMPILER)):
            fix = f"install {_COMPILER}, or set CXX to the path of a C++ compiler"
            return False, f"it is compiled by the C++ compiler {compiler!r}, which does not exist. Fix: {fix}"
        for name, operand in call.operands.items():
            if operand.dtype not in _TYPES and name != "target":
                return False, f"it computes {', '.join(_TYPES)}, and {name} is {operand.dtype}"
        return True, ""


class _Unit(_CompiledKernel):
    def _options(self, call: TorchCall) -> dict[str, Any]:
        return {} if self.op == "swiglu" else {"approximate": call.attributes["approximate"]}

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        return (_run(call, _FORWARD[self.op], *tensors, rows=True, **self._options(call)),), ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        options = self._options(call)
        return _run(call, _BACKWARD[self.op], *saved.inputs, grads=grads, rows=True, **options)  # type: ignore[no-any-return]


class _SwiGlu(_Unit):
    id = "compiled.swiglu"
    op = "swiglu"
    description = "a gated SiLU, compiled by Inductor"


class _GeGlu(_Unit):
    id = "compiled.geglu"
    op = "geglu"
    description = "a gated GELU, compiled by Inductor"


class _Rope(_CompiledKernel):
    id = "compiled.rope"
    op = "rope"
    description = "the rotation of queries and keys, compiled by Inductor"

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        return _run(call, _forward_of_rope, *tensors), ()

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        q, k, cos, sin = saved.inputs
        types = {"of_q": q.dtype, "of_k": k.dtype}
        return *_run(call, _backward_of_rope, cos, sin, grads=grads, **types), None, None


class _CrossEntropy(_CompiledKernel):
    id = "compiled.cross_entropy"
    op = "cross_entropy"
    description = "a cross entropy, compiled by Inductor"
    limits = f"{_CompiledKernel.limits}; rows of logits with one class index each"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        logits, target = call.operands["logits"], call.operands["target"]
        if len(logits.shape) != 2 or len(target.shape) != 1 or target.dtype != "int64":
            return False, "it takes rows of logits and one class index, int64, for each"
        return super().supports(call)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        stated = {name: call.attributes[name] for name in ("ignore_index", "reduction", "upcast")}
        loss, sums = _run(call, _forward_of_loss, *tensors, **stated)
        return (loss,), (sums,)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        stated = {name: call.attributes[name] for name in ("ignore_index", "reduction")}
        return _run(call, _backward_of_loss, *saved.inputs, *saved.extra, grads=grads, **stated), None

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        del call
        return (tensors[0].new_empty(tensors[0].shape[:1], dtype=torch.float32),)


class _LinearCrossEntropy(_CompiledKernel):
    alone = False
    id = "compiled.linear_cross_entropy"
    op = "linear_cross_entropy"
    description = "the logits of some rows at a time, their loss compiled by Inductor, and the gradient in the forward"
    limits = f"{_CompiledKernel.limits}; rows with one class index each; a mean or a sum"

    def supports(self, call: TorchCall) -> tuple[bool, str]:
        fits, why = is_loss_of_rows(call, reduced=True)
        return super().supports(call) if fits else (fits, why)

    def forward(self, call: TorchCall, *tensors: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        stated = {"ignore_index": call.attributes["ignore_index"], "reduction": "none"}

        def losses_of(logits: Tensor, target: Tensor, factors: Tensor | None) -> tuple[Tensor, Tensor | None]:
            losses, sums = _run(None, _forward_of_loss, logits, target, **stated, upcast=True)
            if factors is None:
                return losses, None
            return losses, _run(None, _backward_of_loss, logits, target, sums, factors, **stated)

        return loss_in_parts(call, tensors, losses_of, held=2)

    def backward(self, call: TorchCall, saved: Saved, grads: Sequence[Any]) -> Sequence[Any]:
        return scaled_gradients(call, saved, grads[0])

    def saved_like(self, call: TorchCall, *tensors: Any) -> Sequence[Any]:
        return unsaved_gradients(call, tensors)


# --- what is compiled; results are dense, or as `laid_out` has them


def _forward_of_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(gate, up).contiguous()


def _backward_of_swiglu(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    x, grads = gate.float(), grad.float()
    part = torch.sigmoid(x)
    of_gate = grads * up.float() * part * (1 + x * (1 - part))
    return of_gate.to(gate.dtype).contiguous(), (grads * x * part).to(up.dtype).contiguous()


def _forward_of_geglu(gate: Tensor, up: Tensor, *, approximate: str) -> Tensor:
    return geglu(gate, up, approximate=approximate).contiguous()


def _backward_of_geglu(gate: Tensor, up: Tensor, grad: Tensor, *, approximate: str) -> tuple[Tensor, Tensor]:
    x, grads = gate.float(), grad.float()
    if approximate == "tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        slope = torch.tanh(inner)
        value = 0.5 * (1 + slope)
        of_x = value + 0.5 * x * (1 - slope * slope) * 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
    else:
        value = 0.5 * (1 + torch.erf(x * 0.7071067811865476))
        of_x = value + x * torch.exp(-0.5 * x * x) * 0.3989422804014327
    return (grads * up.float() * of_x).to(gate.dtype).contiguous(), (grads * x * value).to(up.dtype).contiguous()


def _forward_of_rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    of_q, of_k = rope(q, k, cos, sin)
    return laid_out(of_q, q), laid_out(of_k, k)


def _backward_of_rope(
    cos: Tensor, sin: Tensor, q: Tensor, k: Tensor, *, of_q: torch.dtype, of_k: torch.dtype
) -> tuple[Tensor, Tensor]:
    return laid_out(_turned_back(q, cos, sin).to(of_q), q), laid_out(_turned_back(k, cos, sin).to(of_k), k)


def _turned_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    wide, half = grad.float(), grad.shape[-1] // 2
    turned = wide * sin
    return wide * cos + torch.cat((turned[..., half:], -turned[..., :half]), dim=-1)


def _forward_of_loss(
    logits: Tensor, target: Tensor, *, ignore_index: int, reduction: str, upcast: bool
) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    seen = target != ignore_index
    sums = torch.logsumexp(wide, -1)
    of_class = wide.gather(-1, torch.where(seen, target, 0)[:, None]).squeeze(-1)
    losses = torch.where(seen, sums - of_class, 0.0)
    if reduction != "none":
        losses = losses.sum() / seen.sum() if reduction == "mean" else losses.sum()
    return losses if upcast else losses.to(logits.dtype), sums


def _backward_of_loss(
    logits: Tensor, target: Tensor, sums: Tensor, grad: Tensor, *, ignore_index: int, reduction: str
) -> Tensor:
    seen = target != ignore_index
    factor = grad.float() / seen.sum() if reduction == "mean" else grad.float()
    shares = torch.exp(logits.float() - sums[:, None])
    hits = torch.arange(logits.shape[-1], device=logits.device) == target[:, None]
    return (
        (torch.where(hits, shares - 1, shares) * torch.where(seen, factor, 0.0)[:, None]).to(logits.dtype).contiguous()
    )


_FORWARD = {"swiglu": _forward_of_swiglu, "geglu": _forward_of_geglu}
_BACKWARD = {"swiglu": _backward_of_swiglu, "geglu": _backward_of_geglu}

KERNELS: tuple[TorchKernel, ...] = (_SwiGlu(), _GeGlu(), _Rope(), _CrossEntropy(), _LinearCrossEntropy())
