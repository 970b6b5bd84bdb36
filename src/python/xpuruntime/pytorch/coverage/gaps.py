# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Coverage gaps: calls that a policy does not reach, and reports of them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from xpuruntime.errors import InputError, PolicyError, warn
from xpuruntime.policies.call_facts import UNKNOWN
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention.call import WITH_WEIGHTS
from xpuruntime.pytorch.call_scope import module_names, module_paths
from xpuruntime.pytorch.coverage.operation_table import computed_by_operators
from xpuruntime.pytorch.coverage.unserved import MULTI_HEAD, UNSERVED
from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy, coerce_policy
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.dispatch.route import facts_of_call
from xpuruntime.pytorch.explanation.requested import requests_other_kernel

if TYPE_CHECKING:
    from xpuruntime.policies import KernelPolicy, Policy


class CoverageGap(NamedTuple):
    """Something that a policy does not reach.

    Attributes
    ----------
    op : str
        Operation of a `KernelPolicy`.
    what : str
        The module, or the setting of the compiler.
    reason : str
    fix : str
    """

    op: str
    what: str
    reason: str
    fix: str


_NO_OPTIONS = "this PyTorch puts the options of flex_attention together where no policy can reach them"
_STATIC = "code in C++ calls PyTorch's own kernel directly, past its dispatcher"
#: What code in C++ may call so, each in words.
_STATIC_OPS = {"matmul": "matrix products", "conv": "convolutions"}
_NO_KERNEL = (torch.nn.Conv3d, torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d)
_NO_CONVOLUTION = "this library has no kernel for convolutions of three dimensions and for transposed ones"
#: Types that oneDNN has an LSTM for, each with what says whether this processor does.
_IN_ONEDNN: dict[torch.dtype, Callable[[], bool]] = {
    torch.float32: lambda: True,
    torch.bfloat16: lambda: bool(torch.ops.mkldnn._is_mkldnn_bf16_supported()),
    torch.float16: lambda: bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()),
}
#: Recurrent layers as Dynamo calls them.
_LAYERS = frozenset(("lstm", "gru", "rnn_tanh", "rnn_relu"))
_RECURRENT = "its products are inside kernels of its own, which no policy reaches"
#: Where the function that computes attention of ``nn.MultiheadAttention`` says whether to return the weights.
_FLAG = "need_weights"
_NEED_WEIGHTS_AT = list(inspect.signature(torch.nn.functional.multi_head_attention_forward).parameters).index(_FLAG)
_SOFTMAX = "with need_weights=True, nn.MultiheadAttention multiplies and takes a softmax instead of calling attention"
_NO_WEIGHTS = "state need_weights=False, or add a rule for this module with use: torch"
_SHARED = (
    "which kernel serves is built into compiled code, and PyTorch runs the code of one module for others of its class,"
    " whose path is another"
)
_WHOLE = "compile the model around it instead, or let the rule ask for no module"
_REGION = "its code is one for all the modules that it is called for, so that none of these can have a path"
_UNMARKED = "leave torch.compiler.nested_compile_region out, or let the rules ask for no module"
#: Functions of attention as Dynamo calls them, whose kernel is built into compiled code.
_ATTENTION = frozenset(("scaled_dot_product_attention", "flex_attention"))
_FAST_PATH = "in eval mode without gradients its fast path calls an attention of its own"


def coverage_gaps(
    policy: Policy | KernelPolicy | str | None = None,
    *,
    module: torch.nn.Module | None = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[CoverageGap, ...]:
    """Say what a policy does not reach.

    Parameters
    ----------
    policy : Policy, KernelPolicy, path or dict, optional
        Default: the one active.
    module : torch.nn.Module, optional
        The model; its modules are looked at, and the calls of a traced graph, as ``torch.export.export(…).module()``.
    options : dict, optional
        As given to ``torch.compile(options=...)``; together with Inductor's settings as they are. With
        ``"aot_inductor": True`` for what AOTInductor compiles. Without it, code that is compiled is not looked at.

    Returns
    -------
    tuple of CoverageGap
        Empty where the policy reaches everything, or there is none.

    Notes
    -----
    Not listed, since nothing is multiplied there by a kernel: Inductor computes products with k = 1, and on the CPU
    those of one row by one column, inside its own loops.

    Examples
    --------
    >>> import torch, xpuruntime.pytorch as xrt_torch
    >>> [one.what for one in xrt_torch.coverage_gaps(xrt.KernelPolicy(matmul="cpu.blas"), module=torch.nn.LSTM(4, 4))]
    ['LSTM']
    """
    if module is not None and not isinstance(module, torch.nn.Module):
        raise InputError(f"coverage_gaps: module is a {type(module).__name__}, not a torch.nn.Module")
    if options is not None and not isinstance(options, Mapping):
        raise InputError(f"coverage_gaps: options is a {type(options).__name__}, not a dict as torch.compile takes")
    active = active_policy() if policy is None else CompiledPolicy(coerce_policy(policy))
    if active is None:
        return ()
    gaps = [CoverageGap(*rule) for rule in active.impossible_rules(module)]
    if module is not None:
        gaps += gaps_in_modules(active, module)
    if options is not None:
        gaps += gaps_in_settings(active, options)
    return tuple(dict.fromkeys(gaps))


def gaps_in_modules(active: CompiledPolicy, module: torch.nn.Module) -> list[CoverageGap]:
    """Return what is not reached of a model whether it is compiled or not."""
    modules: list[CoverageGap] = []
    for part, path, _ in module_names.walk(module):
        name = path or type(part).__name__
        own = computed_by_operators(part)
        if own is not None and any(
            requests_other_kernel(own.op, kernel_names)
            for kernel_names in _asked(active, own.op, path, next(part.parameters(), None))
        ):
            modules.append(CoverageGap(own.op, name, own.reason, own.fix))
        if isinstance(part, torch.fx.GraphModule):
            modules += _gaps_in_calls(active, part.graph.nodes)
        if isinstance(part, torch.nn.RNNBase) and _asks(active, "matmul", path, part):
            weight = next(part.parameters(), None)
            if _is_one_kernel(part.mode.lower(), weight, projects=part.proj_size > 0):
                modules.append(_recurrent(name))
        if isinstance(part, _NO_KERNEL) and _asks(active, "conv", path, part):
            modules.append(CoverageGap("conv", name, _NO_CONVOLUTION, "add a rule for this module with use: torch"))
        if (
            isinstance(part, (torch.nn.TransformerEncoderLayer, torch.nn.MultiheadAttention))
            and _asks(active, "attention", path, part)
            and torch.backends.mha.get_fastpath_enabled()
        ):
            modules.append(
                CoverageGap("attention", name, _FAST_PATH, "call torch.backends.mha.set_fastpath_enabled(False) first")
            )
    return modules


def _asks(active: CompiledPolicy, op: str, path: str, part: torch.nn.Module) -> bool:
    if op not in active.ops:
        return False
    requests = _asked(active, op, path, next(part.parameters(), None))
    return any(requests_other_kernel(op, kernel_names) for kernel_names in requests)


def _asked(active: CompiledPolicy, op: str, module: str, like: torch.Tensor | None) -> list[tuple[str, ...]]:
    facts = facts_of_call(
        op,
        device=None if like is None else like.device,
        dtype=None if like is None else like.dtype,
        phase=UNKNOWN,
        module=module,
    )
    return [preference.use for preference in active.policy.kernels.compiled_rules.match(facts).preferences]


def _is_one_kernel(layer: str, like: torch.Tensor | None, *, projects: bool) -> bool:
    """Say whether a recurrent layer runs inside one kernel: of cuDNN, or on the CPU of oneDNN, which has the LSTM."""
    if like is None or like.device.type != "cpu":
        return True
    if layer != "lstm" or projects or not _private_api.mkldnn_enabled():
        return False
    return torch.backends.mkldnn.is_available() and like.dtype in _IN_ONEDNN and _IN_ONEDNN[like.dtype]()


def gaps_in_graph(active: CompiledPolicy, graph: Any) -> list[CoverageGap]:
    """Return what is not reached of a graph that Dynamo has captured."""
    gaps = _of_regions(active, graph)
    flex = "flex_options" in active.overrides and not flex_options_overridden()
    shared = active.names_modules("attention") and module_paths.has_siblings()
    for node in getattr(getattr(graph, "graph", None), "nodes", ()):
        name = _name(node)
        if flex and name == "flex_attention":
            fix = "state kernel_options={'BACKEND': …} in the call, or install a PyTorch from 2.11 to 2.13"
            gaps.append(CoverageGap("attention", str(node.name), _NO_OPTIONS, fix))
        if shared and name in _ATTENTION:
            gaps.append(CoverageGap("attention", f"attention in {module_paths.running()}", _SHARED, _WHOLE))
        gaps += _gaps_in_layers(active, name, node)
    return gaps


def _gaps_in_layers(active: CompiledPolicy, name: str, node: Any) -> list[CoverageGap]:
    if _returns_weights(name, node) and (refused := _with_weights(active, node)) is not None:
        return [refused]
    if name in _LAYERS and _hides_products(active, name, node):
        return [_recurrent(str(node.name))]
    return []


def _gaps_in_calls(active: CompiledPolicy, nodes: Any) -> list[CoverageGap]:
    """Return what is not reached of the calls in a graph that was traced, as by ``torch.export``."""
    calls: list[CoverageGap] = []
    for node in nodes:
        name, module = _name(node), _module_of(node)
        calls += [gap._replace(what=module or gap.what) for gap in _gaps_in_layers(active, name, node)]
        for unserved in UNSERVED:
            if unserved.name.rpartition("::")[2] != name or unserved.group not in active.overrides:
                continue
            requests = _asked(active, unserved.entry.op, module, _result(node))
            if any(all(map(unserved.entry.rejection, kernel_names)) for kernel_names in requests):
                fix = "add a rule for these calls with use: torch"
                calls.append(
                    CoverageGap(unserved.entry.op, module or str(node.name), unserved.entry.no_xrt_kernel, fix)
                )
    return calls


def _result(node: Any) -> torch.Tensor | None:
    value = node.meta.get("example_value", node.meta.get("val"))
    first = value[0] if isinstance(value, (tuple, list)) and value else value
    return first if isinstance(first, torch.Tensor) else None


def _of_regions(active: CompiledPolicy, graph: Any) -> list[CoverageGap]:
    nodes = [node for node in getattr(getattr(graph, "graph", None), "nodes", ()) if _name(node) == "invoke_subgraph"]
    regions = [node.args[1] for node in nodes if len(node.args) > 1]
    if len(set(regions)) == len(regions):
        return []
    ops = (op for op in sorted(active.ops) if active.names_modules(op))
    return [CoverageGap(op, f"{op} in a region of nested_compile_region", _REGION, _UNMARKED) for op in ops]


def _name(node: Any) -> str:
    return str(getattr(node.target, "__name__", node.target)).partition(".")[0]


def _hides_products(active: CompiledPolicy, layer: str, node: Any) -> bool:
    """Say whether a recurrent layer of a graph is one kernel, of whose products a policy asks for more."""
    if "matmul" not in active.ops:
        return False
    results = node.meta.get("example_value", node.meta.get("val"))
    like, *states = results if isinstance(results, tuple) else (results,)
    requests = _asked(active, "matmul", _module_of(node), like)
    # The output of an LSTM is as wide as its cells, unless it projects.
    projects = layer == "lstm" and len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    return any(requests_other_kernel("matmul", kernel_names) for kernel_names in requests) and _is_one_kernel(
        layer, like, projects=projects
    )


def _returns_weights(name: str, node: Any) -> bool:
    # Say whether this is attention of ``nn.MultiheadAttention`` that returns its weights, as a whole or its softmax.
    # Dynamo keeps the function as a whole where it has seen it before any policy came, and else looks inside.
    if name == "softmax":  # Dynamo keeps of each operation which functions called it, torch.export the first of them
        exported = str(node.meta.get("torch_fn", ("", ""))[1])
        return f"in {MULTI_HEAD}" in (node.stack_trace or "") or exported.endswith(MULTI_HEAD)
    position = _NEED_WEIGHTS_AT
    return name == MULTI_HEAD and bool(
        node.args[position] if len(node.args) > position else node.kwargs.get(_FLAG, True)
    )


def _with_weights(active: CompiledPolicy, node: Any) -> CoverageGap | None:
    if "multi_head_attention" not in active.overrides:
        return None
    module = _module_of(node)
    for kernel_names in _asked(active, "attention", module, _result(node)):
        if all(WITH_WEIGHTS.rejection(kernel_name) for kernel_name in kernel_names):
            return CoverageGap("attention", module or str(node.name), _SOFTMAX, _NO_WEIGHTS)
    return None


def _module_of(node: Any) -> str:
    stack = node.meta.get("nn_module_stack")
    return module_paths.of_stack(stack) if stack else module_paths.running()


def flex_options_overridden() -> bool:
    """Say whether a policy gives calls of flex_attention that are being compiled their option for the kernel."""
    return any(
        option.override.name == "_apply_kernel_options"
        for option in CONTEXT.placed.get("flex_options", ())
        if option.title
    )


def gaps_in_settings(active: CompiledPolicy, options: Mapping[str, Any]) -> list[CoverageGap]:
    """Return what is not reached for the settings of Inductor: `options`, and its own where they say nothing."""

    def setting(name: str, default: Any = None) -> Any:
        option = options.get(name, options.get(name.replace("_", "-")))
        return getattr(_private_api.inductor_config(), name, default) if option is None else option

    settings: list[CoverageGap] = []
    if options.get("aot_inductor"):
        settings += gaps_in_package(active)
    elif setting("cpp_wrapper"):
        shown = ((op, name) for op, name in _STATIC_OPS.items() if op in active.ops)
        settings += [
            CoverageGap(op, f"{name} under cpp_wrapper", _STATIC, "set cpp_wrapper=False") for op, name in shown
        ]
    if "matmul" in active.ops:
        settings += _products(setting)
    if "conv" in active.ops and setting("max_autotune"):
        settings += _tuned("conv", "convolutions", setting, "max_autotune_conv_backends")
    return settings


def gaps_in_package(active: CompiledPolicy) -> list[CoverageGap]:
    """Return what is not reached in a package of AOTInductor, as far as it has such operations."""
    fix = "run the exported program itself, or compile it by torch.compile"
    return [
        CoverageGap(op, f"{shown} in a package of AOTInductor", _STATIC, fix)
        for op, shown in _STATIC_OPS.items()
        if op in active.ops
    ]


def _products(setting: Any) -> list[CoverageGap]:
    products = []
    if setting("max_autotune") or setting("max_autotune_gemm"):
        products += _tuned("matmul", "matrix products", setting, "max_autotune_gemm_backends")
    if setting("freezing"):
        reason = "on the CPU, Inductor may pack weights for oneDNN, whose product is an operator of its own"
        products.append(CoverageGap("matmul", "matrix products under freezing", reason, "set freezing=False"))
    if setting("coordinate_descent_tuning") and torch.backends.cuda.is_built():
        reason = "Inductor computes products of one row or one column inside its own kernels on CUDA"
        fix = "set coordinate_descent_tuning=False"
        products.append(CoverageGap("matmul", "vectors under coordinate_descent_tuning", reason, fix))
    return products


def _tuned(op: str, shown: str, setting: Any, backends: str) -> list[CoverageGap]:
    """Return the escape to what Inductor may choose by measuring, where `backends` names more than PyTorch's own."""
    kernel_names = (part.strip().upper() for part in setting(backends, "").split(","))
    others = ", ".join(kernel_name for kernel_name in kernel_names if kernel_name not in ("ATEN", ""))
    if not others:
        return []
    reason = f"Inductor may take a kernel of {others}"
    return [CoverageGap(op, f"{shown} under max_autotune", reason, f"set {backends}='ATEN'")]


def _recurrent(name: str) -> CoverageGap:
    return CoverageGap(
        "matmul", name, _RECURRENT, "write the cell with torch.nn.Linear, or add a rule for it with use: torch"
    )


def report_gaps(gaps: list[CoverageGap], active: CompiledPolicy) -> None:
    """Warn of what a policy does not reach, once for each policy, or refuse it where the policy is strict."""
    fresh = [gap for gap in dict.fromkeys(gaps) if (active.number, gap) not in CONTEXT.reported_gaps]
    if active.strict and gaps:
        shown = "; ".join(f"{gap.what}: {gap.reason}. Fix: {gap.fix}" for gap in dict.fromkeys(gaps))
        msg = f"the policy is strict, and compiled code would bypass it. {shown}"
        raise PolicyError(msg)
    if not fresh:
        return
    CONTEXT.reported_gaps.update((active.number, gap) for gap in fresh)
    shown = "; ".join(f"{gap.what}: {gap.reason} ({gap.fix})" for gap in fresh)
    warn(f"compiled code bypasses the policy. {shown}")
