# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Inductor pass that annotates calls in compiled code with their phase and module.

When compiled code runs, PyTorch no longer says either: its forward for training runs with gradients off, and of modules
the one that was called runs alone. Both are known while it is compiled. So where rules ask for them,
`InductorAnnotationPass` puts an operator ``xpuruntime::within_...`` into the graph for each one whose kernel a policy
chooses when it runs. That states both, and calls the operator that it stands for. PyTorch runs the same code for
modules that are alike: the path is that from the module that was compiled, and which one this is, is seen when the code
runs.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

import xpuruntime.pytorch.ops.norms  # noqa: F401 - which defines operators of _OPERATORS
from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.call_scope import module_paths

#: Operation of a policy to the operators that choose a kernel of it whenever compiled code runs.
_OPERATORS = {
    "matmul": (
        *(f"aten.{name}.{form}" for name in ("mm", "bmm", "addmm", "baddbmm") for form in ("default", "dtype")),
        "aten._scaled_mm.default",
    ),
    "conv": ("aten.convolution.default", "aten.convolution_backward.default"),
    "layer_norm": ("xpuruntime.layer_norm.default", "xpuruntime.layer_norm_backward.default"),
    "rms_norm": ("xpuruntime.rms_norm.default", "xpuruntime.rms_norm_backward.default"),
    "attention": ("torch_attn._varlen_attn.default", "torch_attn._varlen_attn_backward.default"),
}
#: Whose operands Inductor may lay out as it likes.
_FLEXIBLE = "matmul"
#: Where Inductor keeps the operands of an operator of a library, as they are in eager code.
_OPERANDS = "eager_input_vals"
#: Another word whenever other code comes of the same graph.
_METHOD = "xpuruntime stated calls 3"

_library = torch.library.Library("xpuruntime", "FRAGMENT")


class InductorAnnotationPass(_private_api.inductor_pass()):  # type: ignore[misc] # PyTorch leaves its type open
    """A pass over each graph that Inductor makes of one of Dynamo's: of a forward, of its backward, or of inference."""

    def __init__(self, flags_by_op: Mapping[str, tuple[bool, bool]], graph: Any, earlier: Any) -> None:
        self._asked = {name: flags for op, flags in flags_by_op.items() for name in _OPERATORS.get(op, ())}
        for name in self._asked:
            if _operator(name) is not None:
                _within(name)  # code that is taken from a cache needs it, too
        self._earlier = () if earlier is None else tuple(earlier) if isinstance(earlier, (list, tuple)) else (earlier,)
        self._modules: dict[str, str] = {}
        self._recorded: dict[str, bool] = {}
        self._records = records = torch.is_grad_enabled()
        # Nothing else that keys of Inductor's caches are made of has the modules in it.
        parts = [_METHOD, repr(sorted(self._asked.items())), str(records)]
        for node in graph.graph.nodes:
            if node.target is _private_api.set_grad_enabled:
                records = bool(node.args[0])
            if node.op == "call_function":
                self._recorded[node.name] = records
            stack = node.meta.get("nn_module_stack")
            if stack:
                path = self._modules[_last(stack)] = module_paths.from_running(stack)
                parts.append(f"{node.name}: {path}")
        self._uuid = hashlib.sha256("\n".join(parts).encode()).hexdigest()

    def uuid(self) -> Any:
        """Return what this pass adds to keys of caches; nothing where an earlier one keeps code out of these."""
        earlier = [
            inner_pass.uuid() if isinstance(inner_pass, _private_api.inductor_pass()) else None
            for inner_pass in self._earlier
        ]
        return None if None in earlier else (self._uuid, *earlier)

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Have the calls of a graph state what they are part of."""
        kind = _kind_of_graph()
        for inner_pass in self._earlier:
            _apply(inner_pass, graph, kind)
        for node in list(graph.nodes):
            flags = self._asked.get(str(node.target)) if node.op == "call_function" else None
            if flags is None:
                continue
            by_phase, by_module = flags
            phase = self._phase(kind, node) if by_phase else ""
            module = self._module(node) if by_module else None
            if phase or module is not None:
                _replace(graph, node, phase, module, kind)

    def _phase(self, kind: str, node: torch.fx.Node) -> str:
        """Return the phase of a call where PyTorch will not say it: all but a backward runs with gradients off."""
        if kind == "backward" and node.meta.get("partitioner_tag") != "is_forward":
            return ""
        names = [name for name in _origins(node.meta.get("from_node")) if name in self._recorded]
        if self._recorded[names[-1]] if names else self._records:
            return "train"
        return "" if kind == "inference" else "infer"

    def _module(self, node: torch.fx.Node) -> str:
        # Of what the backward computes, PyTorch notes the modules of the forward that it is of.
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        return self._modules.get(_last(stack), "") if stack else ""


def _origins(sources: Any) -> Iterator[str]:
    for source in sources or ():
        yield source.name
        yield from _origins(source.from_node)


def _last(stack: Mapping[str, Any]) -> str:
    return str(next(reversed(list(stack))))


def _kind_of_graph() -> str:
    name: str = _private_api.compiled_graph()()  # such as "model__0_forward_1"
    return name.rstrip("0123456789").rstrip("_").rpartition("_")[2]


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, phase: str, module: str | None, kind: str) -> None:
    stated = (phase, module, kind)
    with graph.inserting_before(node):
        other = graph.call_function(_within(str(node.target)), (*stated, *node.args), node.kwargs)
    other.meta.update(node.meta)
    # Inductor gives operands the strides that they have here.
    known = node.meta.get(_OPERANDS)
    if known is None and all("val" in input_node.meta for input_node in node.all_input_nodes):
        known = torch.fx.map_arg((node.args, node.kwargs), lambda input_node: input_node.meta["val"])
    if known is not None:
        other.meta[_OPERANDS] = ((*stated, *known[0]), known[1])
    node.replace_all_uses_with(other)
    graph.erase_node(node)


def _apply(graph_pass: Callable[..., Any], graph: torch.fx.Graph, kind: str) -> None:
    aware = getattr(_private_api.inductor_passes(), "CustomInferenceAwareGraphPass", None)  # not in PyTorch 2.11
    if aware is not None and isinstance(graph_pass, aware):
        graph_pass(graph, is_inference=kind == "inference")
    else:
        graph_pass(graph)


def _operator(name: str) -> Any:
    namespace, packet, overload = name.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet, None), overload, None)


@functools.cache
def _within(name: str) -> Any:
    """Return the operator that calls another one, by its name, and first takes what `_core.enter_call` does."""
    operator = _operator(name)
    _, packet, overload = name.split(".")
    wrapper = f"within_{packet.lstrip('_')}" + ("" if overload == "default" else f"_{overload}")
    _, bracket, after = str(_private_api.operator_schema(operator)).partition("(")
    tags = (torch.Tag.flexible_layout,) if name in _OPERATORS[_FLEXIBLE] else ()
    _library.define(f"{wrapper}{bracket}str of_phase, str? of_module, str of_graph, {after}", tags=tags)

    def call(phase: str, module: str | None, graph: str, *args: Any, **kwargs: Any) -> Any:
        _core.enter_call(phase, module, graph)
        try:
            with _private_api.without_autocast():  # which casts what is compiled before that
                return _given(operator(*args, **kwargs), args)
        finally:
            _core.leave_call()

    def fake(phase: str, module: str | None, graph: str, *args: Any, **kwargs: Any) -> Any:
        del phase, module, graph
        return _given(operator(*args, **kwargs), args)

    _library.impl(wrapper, call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"xpuruntime::{wrapper}", fake, lib=_library)
    return getattr(torch.ops.xpuruntime, wrapper).default


def _given(result: Any, args: tuple[Any, ...]) -> Any:
    """Return results with an empty tensor for what was not asked for: an operator of a library returns tensors."""
    if not isinstance(result, tuple) or all(tensor is not None for tensor in result):
        return result
    return tuple(args[0].new_empty(0) if tensor is None else tensor for tensor in result)
