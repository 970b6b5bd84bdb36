# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Operators of PyTorch by the operations of a policy, and who of them a policy reaches."""

from __future__ import annotations

import re
import sys
from functools import lru_cache
from importlib import metadata
from types import FunctionType
from typing import Any, NamedTuple

import torch

from xpuruntime.policies.kernel_rules import FAMILIES
from xpuruntime.pytorch.adapters.attention_forms import eager_function, form_of
from xpuruntime.pytorch.adapters.norm_formulas import formula_of_module
from xpuruntime.pytorch.coverage.class_code import code_names
from xpuruntime.pytorch.coverage.unserved import RECURRENT


class UncoveredKernel(NamedTuple):
    """An operation that ran by a kernel that no policy chose."""

    op: str
    reason: str


_RECURRENT = "recurrent layers run by kernels of their own, inside which no product can be chosen"
_FAST_PATH = (
    "the fast path of nn.MultiheadAttention and nn.TransformerEncoderLayer runs kernels of its own; "
    "torch.backends.mha.set_fastpath_enabled(False) turns it off"
)
NOT_REACHED = "it reached PyTorch's kernel without passing an override"
_NO_OVERRIDE = "no override takes this operator"
_TRITON = "torch.compile made a kernel of its own, which PyTorch's dispatcher does not see"
_TEMPLATE = (
    "torch.compile chose a kernel of its own by max_autotune; torch._inductor.config.max_autotune_gemm_backends = "
    "'ATEN' leaves the choice to the policy"
)
FLEX = "flex_attention is compiled, and was when no policy chose its kernel"
CUTE = "FlashAttention's CuTe kernels were called directly, or by flex_attention that was compiled for them"
_DIRECT = "launched without PyTorch's dispatcher, as by cpp_wrapper, AOTInductor or a library's own code"

_NO_KERNEL = "this library has no kernel for it, and no override takes this operator"
_FOREIGN = "it is an operator of another package, which runs kernels of its own"
_FUNCTION = "an autograd function of another package runs kernels of its own, past PyTorch's dispatcher"

#: Before the namespace of operators of another package of which the table has no row.
UNKNOWN = "unknown:"
#: Products by operators that no kernel of this library stands in for; each calls no other operator for products.
_PRODUCTS = (
    "mv", "addmv", "addmv_", "_int_mm", "_scaled_mm_v2",
    "_weight_int4pack_mm", "_weight_int4pack_mm_for_cpu", "_weight_int8pack_mm", "_dyn_quant_matmul_4bit",
    "_mkl_linear", "_linear_pointwise",
)  # fmt: skip
#: Namespaces of PyTorch's own operators, and of those of this library.
_PYTORCH = frozenset((
    "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "_native", "_quantized", "_test", "aten", "autograd",
    "c10d", "c10d_functional", "cuda", "debug_mode_ops", "debugprims", "export", "fsdp", "gloo", "higher_order",
    "inductor", "inductor_prims", "mkl", "mkldnn", "mkldnn_prepacked", "nccl", "onednn", "onnx", "onnx_symbolic",
    "prim", "prims", "profiler", "quantization", "quantized", "quantized_decomposed", "rngprims", "sparse",
    "static_runtime", "streams", "symm_mem", "torch_attn", "torchaudio", "torchvision", "xpuruntime",
))  # fmt: skip
#: What an operator of another package computes: the first row that fits its name. Operations that are none of a
#: `KernelPolicy` are named, too, so that the operator is not called unknown.
_FOREIGN_ROWS = tuple(
    (re.compile(pattern), op)
    for pattern, op in (
        (r"::\w*(get_scheduler_metadata|num_splits|workspace)", "metadata"),
        (r"^_C_cache_ops::|::\w*(reshape_and_cache|cache_update)", "cache_update"),
        (r"^(_C\w*|_rocm_C|_xpu_C|_?sgl_kernel\w*|_?flashinfer\w*|vllm|torch_ipex|xformers\w*|aiter)::"
         r"\w*(attention|attn|fmha|_mla|mla_|prefill|decode)", "attention"),
        (r"^\w*(flash_?attn|flash_?mla|vllm_fa\d|xformers_flash|sage_?att\w*|natten)\w*::", "attention"),
        (r"::\w*rms_?norm(?!_rope)", "rms_norm"),
        (r"::\w*layer_?norm", "layer_norm"),
        (r"::\w*(rotary|rope)", "rope"),
        (r"::\w*(silu|swiglu)\w*", "swiglu"),
        (r"::\w*(gelu|geglu)\w*", "geglu"),
        (r"::\w*(linear_cross_entropy|lce_)", "linear_cross_entropy"),
        (r"::\w*cross_entropy", "cross_entropy"),
        (r"^quack\w*::\w*softmax", "softmax"),
        (r"::\w*(topk_softmax|grouped_topk|moe_align|moe_sum|moe_permute|moe_unpermute)", "routing"),
        (r"::\w*causal_conv1d", "conv"),
        (r"::\w*(quantize|quant_|qparams|_quant\b)", "quantize"),
        (r"^_moe_C\w*::", "grouped_matmul"),
        (r"^(_?C|_C\w*|_rocm_C|_xpu_C|_?quack\w*|torch_vendor_quack|torchao\w*|_?sgl_kernel\w*|_?flashinfer\w*|vllm"
         r"|fbgemm\w*|mslk\w*|bitsandbytes|torch_ipex|deep_?gemm\w*|cutlass\w*|gptq\w*|awq\w*|marlin\w*|machete\w*"
         r"|aiter|xformers\w*|hqq\w*|gemlite\w*)::\w*(gemm|gemv|mm\b|mm_|linear|matmul|f8f8|bf16i4|experts|fused_moe)",
         "matmul"),
    )
)  # fmt: skip
#: The same for packages that the table does not know, by what such kernels are called everywhere.
_ANY_PACKAGE_ROWS = tuple(
    (re.compile(pattern), op)
    for pattern, op in (
        (r"::(?!\w*(mask|bias|metadata|plan|pack))\w*(attention|scaled_dot_product|sdpa|fmha|mla_decode"
         r"|(?<![a-z])mha(?![a-z])|paged_kv_(decode|prefill)"
         r"|(?<![a-z])attn(_(fwd|bwd|forward|backward|func|varlen|prefill|decode))*(\.|$))", "attention"),
        (r"::(?!\w*(pack|layout|tune|plan|cross_entropy))(\w*(gemm|gemv|matmul|scaled_mm|(?<![a-z])mm(?![a-z]))"
         r"|(\w*_)?linear(_(fwd|bwd|forward|backward))*(\.|$))", "matmul"),
    )
)  # fmt: skip
#: An operator, as the profiler has it.
_OPERATOR = re.compile(r"\w+::\w+(\.\w+)?")
#: Operators of PyTorch's that take quantized tensors.
_QUANTIZED = re.compile(
    r"(?P<matmul>(_?quantized|onednn|sparse)::q?linear(?!\w*(prepack|unpack)))"
    r"|(?P<conv>(_?quantized|onednn)::q?conv(?!\w*(prepack|unpack|_stride|_padding|_dilation|_groups|_transpose\b)))"
    r"|(?P<layer_norm>quantized::layer_norm)"
)
#: What the name of an autograd function means; the first that fits.
_FUNCTION_ROWS = tuple(
    (re.compile(pattern), op)
    for pattern, op in (
        (r"(?i)flash_?att|attention|attn|fmha|(?<![a-z])mha(?![a-z])", "attention"),
        (r"(?i)rms_?norm", "rms_norm"),
        (r"(?i)layer_?norm", "layer_norm"),
        (r"(?i)(matmul|gemm|\bmm|linear)(?!.*cross_?entropy)", "matmul"),
    )
)

_RECURRENT_OPERATORS = frozenset((*(recurrent.name for recurrent in RECURRENT), "miopen_rnn"))
#: Packages whose Triton functions are PyTorch's, Triton's own or this library's.
_OWN_TRITON = frozenset(("torch", "triton", "xpuruntime"))
#: Operators by name without namespace, and how they escape where nothing else is known.
_OPERATORS: dict[str, UncoveredKernel] = {
    **{name: UncoveredKernel("matmul", _RECURRENT) for name in _RECURRENT_OPERATORS},
    "_native_multi_head_attention": UncoveredKernel("attention", _FAST_PATH),
    "_triton_multi_head_attention": UncoveredKernel("attention", _FAST_PATH),
    **{name: UncoveredKernel("matmul", NOT_REACHED) for name in ("mm", "addmm", "bmm", "baddbmm")},
    **{
        name: UncoveredKernel("attention", NOT_REACHED)
        for name in (
            "scaled_dot_product_attention", "_scaled_dot_product_flash_attention",
            "_scaled_dot_product_flash_attention_backward", "_scaled_dot_product_flash_attention_for_cpu",
            "_scaled_dot_product_flash_attention_for_cpu_backward", "_scaled_dot_product_efficient_attention",
            "_scaled_dot_product_efficient_attention_backward", "_scaled_dot_product_cudnn_attention",
            "_scaled_dot_product_cudnn_attention_backward", "_scaled_dot_product_attention_math",
        )
    },
    **{name: UncoveredKernel("layer_norm", NOT_REACHED)
       for name in ("native_layer_norm", "native_layer_norm_backward")},
    **{name: UncoveredKernel("conv", NOT_REACHED) for name in ("convolution", "convolution_backward")},
    **{name: UncoveredKernel("matmul", _NO_KERNEL) for name in _PRODUCTS},
    "_grouped_mm": UncoveredKernel("grouped_matmul", NOT_REACHED),
    **{name: UncoveredKernel("grouped_matmul", _NO_KERNEL) for name in ("_scaled_grouped_mm", "_scaled_grouped_mm_v2")},
    **{
        name: UncoveredKernel("matmul", _NO_OVERRIDE)
        for name in ("addbmm", "addbmm_", "_scaled_mm", "_addmm_activation", "mkldnn_linear")
    },
    **{
        name: UncoveredKernel("attention", _NO_OVERRIDE)
        for name in ("_flash_attention_forward", "_flash_attention_backward", "_efficient_attention_forward",
                     "_efficient_attention_backward", "_cudnn_attention_forward", "_cudnn_attention_backward")
    },
    **{
        name: UncoveredKernel("conv", _NO_OVERRIDE)
        for name in (
            "cudnn_convolution", "cudnn_convolution_transpose", "cudnn_convolution_relu",
            "cudnn_convolution_add_relu", "mkldnn_convolution", "_slow_conv2d_forward", "_slow_conv2d_backward",
            "slow_conv3d_forward", "_conv_depthwise2d", "conv_depthwise3d", "thnn_conv2d", "slow_conv_transpose2d",
            "slow_conv_dilated2d", "_convolution_pointwise", "_nnpack_spatial_convolution", "miopen_convolution",
        )
    },
    **{name: UncoveredKernel("rms_norm", _NO_OVERRIDE)
       for name in ("_fused_rms_norm", "_fused_rms_norm_backward", "rms_norm")},
    "cross_entropy_loss": UncoveredKernel("cross_entropy", NOT_REACHED),
    **{name: UncoveredKernel("softmax", NOT_REACHED)
       for name in ("softmax", "_softmax", "_safe_softmax", "_softmax_backward_data")},
}  # fmt: skip

#: What the name of a kernel means; the first that fits.
_KERNELS: tuple[tuple[re.Pattern[str], UncoveredKernel], ...] = tuple(
    (re.compile(pattern), UncoveredKernel(op, reason))
    for pattern, op, reason in (
        (r"^triton_.*flex_(attention|decod)", "attention", FLEX),
        (r"(?i)cute.*flash|flash.*cute", "attention", CUTE),
        (r"^triton_tem_.*conv", "conv", _TEMPLATE),
        (r"^(triton_tem_|triton_mm|.*_cutlass_fused)", "matmul", _TEMPLATE),
        (r"^(triton_.*|.*cpp_fused_.*)native_layer_norm", "layer_norm", _TRITON),
        (r"^(triton_.*|.*cpp_fused_.*)rms_norm", "rms_norm", _TRITON),
        (r"^(triton_|.*cpp_fused_)", "", ""),
        (r"(?i)flash_(fwd|bwd|attn|forward|backward)|fmha|sdpa|attention", "attention", _DIRECT),
        (r"flashinfer::\w*(Prefill|Decode|Attention|MLA)", "attention", _DIRECT),
        (r"(?i)swiglu|silu_and_mul|act_and_mul.*silu|silu_mul", "swiglu", _DIRECT),
        (r"(?i)geglu|gelu_and_mul|act_and_mul.*gelu|gelu_mul", "geglu", _DIRECT),
        (r"(?i)rotary|(?<![a-z])m?rope(?![a-z])", "rope", _DIRECT),
        (r"(?i)linear_?cross_?entropy", "linear_cross_entropy", _DIRECT),
        (r"(?i)cross_?entropy", "cross_entropy", _DIRECT),
        (r"(?i)reshape_and_cache", "cache_update", _DIRECT),
        (r"(?i)layer_?norm", "layer_norm", _DIRECT),
        (r"(?i)rms_?norm", "rms_norm", _DIRECT),
        (r"(?i)implicit_gemm|convolve|conv\dd|fprop|dgrad|wgrad|winograd", "conv", _DIRECT),
        (r"(?i)fused_moe", "grouped_matmul", _DIRECT),
        (r"(?i)gemm|gemv|nvjet|cutlass.*tensorop|splitKreduce", "matmul", _DIRECT),
        (r"(?i)soft_?max", "softmax", _DIRECT),
    )
)


def uncovered_operator(name: str) -> UncoveredKernel | None:
    """Return what an operator that passed no override computes; ``None`` where no policy can speak of it."""
    namespace, _, short = name.rpartition("::")
    if namespace in ("aten", "mkldnn", "mkl", "torch_attn"):
        return _overridden().get(short) or _OPERATORS.get(short)
    if (quantized := _QUANTIZED.match(name)) is not None:
        return UncoveredKernel(str(quantized.lastgroup), _NO_KERNEL)
    op = operation_of(name)
    return UncoveredKernel(op, _FOREIGN) if op in FAMILIES else None


def unserved_operator(name: str) -> str | None:
    """Return the operation of an operator that computes it, and that no kernel of this library can stand in for.

    ``None`` for all others, those that have overrides included.
    """
    operator = uncovered_operator(name)
    return operator.op if operator is not None and operator.reason in (_NO_KERNEL, _FOREIGN) else None


@lru_cache(maxsize=2)
def unserved_operators(names: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    """Return operation to those of some operators, with the names of their overloads, that are unserved for it."""
    results: dict[str, tuple[str, ...]] = {}
    for name in names:
        if (op := unserved_operator(name.partition(".")[0])) is not None:
            results[op] = (*results.get(op, ()), name)
    return results


@lru_cache(maxsize=8192)
def operation_of(name: str) -> str | None:
    """Return what an operator of another package computes; ``None`` for PyTorch's own and what is no operator."""
    namespace = name.partition("::")[0]
    if namespace in _PYTORCH or not _OPERATOR.fullmatch(name):
        return None
    rows = (*_FOREIGN_ROWS, *_ANY_PACKAGE_ROWS)
    return next((op for pattern, op in rows if pattern.search(name)), f"{UNKNOWN}{namespace}")


def of_unknown_package(name: str) -> bool:
    """Say whether what an operator computes is known by its name alone, and not by its package."""
    return operation_of(name) is not None and not any(pattern.search(name) for pattern, _ in _FOREIGN_ROWS)


def operation_of_function(kind: type[torch.autograd.Function]) -> str | None:
    """Return what an autograd function of another package computes, by its name; ``None`` for all others."""
    if kind.__module__.partition(".")[0] in ("torch", "xpuruntime"):
        return None
    return next((op for pattern, op in _FUNCTION_ROWS if pattern.search(kind.__name__)), None)


def autograd_functions() -> dict[str, UncoveredKernel]:
    """Return what the autograd functions of other packages compute that are loaded now, by their names.

    A name that two packages use for different operations has no row.
    """
    kernel_by_name: dict[str, UncoveredKernel | None] = {}
    left, done = list(torch.autograd.Function.__subclasses__()), set()
    while left:
        kind = left.pop()
        if kind in done:
            continue
        done.add(kind)
        left += kind.__subclasses__()
        op = operation_of_function(kind)
        if op is not None:
            row = UncoveredKernel(op, f"{_FUNCTION}: {kind.__module__}.{kind.__qualname__}")
            before = kernel_by_name.get(kind.__name__, row)
            kernel_by_name[kind.__name__] = before if before is not None and before.op == op else None
    rows = {name: row for name, row in kernel_by_name.items() if row is not None}
    return rows | {f"{name}Backward": row for name, row in rows.items()}


class TritonFunction(NamedTuple):
    """A function of another package that Triton compiles to a kernel of its name, and the distribution that has it."""

    name: str
    module: str
    distribution: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" + (f" of {self.distribution}" if self.distribution else "")


def triton_functions() -> dict[str, tuple[TritonFunction, ...]]:
    """Return the Triton functions that modules of other packages hold now, by name; several may have the same."""
    jit: Any = sys.modules.get("triton.runtime.jit")
    if jit is None:
        return {}
    functions: dict[tuple[str, str], Any] = {}
    for module in list(sys.modules.values()):
        for value in list(getattr(module, "__dict__", {}).values()):
            # By type: `isinstance` reads attributes, which warns or imports where a package has lazy ones.
            while issubclass(type(value), jit.KernelInterface) and not issubclass(type(value), jit.JITFunction):
                value = getattr(value, "fn", None)  # what tunes or specializes it
            if issubclass(type(value), jit.JITFunction) and value.__module__.partition(".")[0] not in _OWN_TRITON:
                functions[value.__name__, value.__module__] = value
    packages = metadata.packages_distributions() if functions else {}
    rows: dict[str, tuple[TritonFunction, ...]] = {}
    for name, path in sorted(functions):
        owners = packages.get(path.partition(".")[0], ())
        row = TritonFunction(name, path, " or ".join(sorted(set(owners))))
        rows[name] = (*rows.get(name, ()), row)
    return rows


def decomposed_operator(name: str) -> UncoveredKernel | None:
    """Return the operation to which a transform of ``torch.func`` may lead an operator that no policy can speak of."""
    return UncoveredKernel("matmul", NOT_REACHED) if name in ("aten::dot", "aten::vdot") else None


@lru_cache(maxsize=4096)
def uncovered_kernel(name: str) -> UncoveredKernel | None:
    """Return what a kernel computes that no operator of PyTorch's launched, as far as its name shows."""
    for pattern, uncovered in _KERNELS:
        if pattern.search(name):
            return uncovered if uncovered.op else None
    return None


@lru_cache(maxsize=1)
def _overridden() -> dict[str, UncoveredKernel]:
    from xpuruntime.pytorch.dispatch.overrides.registry import RUNNING, overrides_of

    # Those of recurrent layers only say that a policy does not reach into them.
    names = (
        (override.name.partition("::")[2] or override.name, override.op)
        for group in RUNNING
        for override in overrides_of(group)
    )
    short = ((name.partition(".")[0], op) for name, op in names)
    return {name: UncoveredKernel(op, NOT_REACHED) for name, op in short if name not in _RECURRENT_OPERATORS}


#: Functions of PyTorch that a policy reaches, by the operation.
_REACHED = {
    "rms_norm": frozenset(("rms_norm", "fused_rmsnorm", "_fused_rms_norm")),
    "layer_norm": frozenset(("layer_norm", "native_layer_norm", "fused_layernorm")),
    "attention": frozenset((
        "scaled_dot_product_attention", "flex_attention", "varlen_attn", "fused_attention",
        "multi_head_attention_forward",
    )),
    "matmul": frozenset((
        "matmul", "mm", "bmm", "addmm", "addmm_", "baddbmm", "baddbmm_", "addbmm", "einsum", "linear", "tensordot",
        "inner", "@",
    )),
}  # fmt: skip
_PRODUCT_OPERATORS = frozenset(("matmul", "bmm", "baddbmm", "einsum", "@"))
#: Words of transformers for attention that call one of these functions.
FLASH_WORDS = ("flash_attention_2", "flash_attention_3", "flash_attention_4")
_SERVED_WORDS = frozenset(("sdpa", "flex_attention", "sdpa_paged", "paged|sdpa", *FLASH_WORDS))
_NORM = "calls no {op} of PyTorch: it computes the norm by elementwise operators"
_EAGER = "multiplies and takes a softmax: it calls no function for attention"
_USE_NORM = "use torch.nn.{module}, or leave {op} out of the policy"
_USE_SDPA = "call scaled_dot_product_attention, or leave attention out of the policy"
_SDPA_WORD = "load the model with attn_implementation='sdpa', or leave attention out of the policy"


class ByOperators(NamedTuple):
    """How a module computes an operation without calling it."""

    op: str
    reason: str
    fix: str


def computed_by_operators(module: torch.nn.Module) -> ByOperators | None:
    """Return what a module computes without a function that a policy reaches; ``None`` where it is not known to."""
    kind = type(module)
    if kind.__module__.partition(".")[0] == "torch":
        return None
    word = getattr(getattr(module, "config", None), "_attn_implementation", None)
    names = code_names(kind)  # type: ignore[arg-type]
    title = title_of(kind)
    if isinstance(word, str) and "eager_attention_forward" in names:
        function = eager_function(kind) if word == "eager" else None
        if word in _SERVED_WORDS or (function is not None and form_of(function)):
            return None
        return ByOperators("attention", f"{title} has attn_implementation={word!r}, which {_by(word)}", _SDPA_WORD)
    op = _operation(names)
    if op is None or (op != "attention" and next(module.children(), None) is not None):
        return None
    if op != "attention" and formula_of_module(module) is not None:
        return None
    if op == "attention":
        return ByOperators(op, f"{title} {_EAGER}", _USE_SDPA)
    fix = _USE_NORM.format(op=op, module="RMSNorm" if op == "rms_norm" else "LayerNorm")
    return ByOperators(op, f"{title} {_NORM.format(op=op)}", fix)


def title_of(kind: type) -> str:
    """Return the name of a class with its module."""
    return f"{kind.__module__}.{kind.__qualname__}"


def norm_by_operators(kind: type, forward: FunctionType | None = None) -> str | None:
    """Return the norm that a forward of a class may compute by elementwise operators."""
    op = _operation(code_names(kind, forward))
    return op if op in ("layer_norm", "rms_norm") else None


def _by(word: str) -> str:
    return "multiplies and takes a softmax" if "eager" in word else "calls kernels of another package"


def _operation(names: frozenset[str]) -> str | None:
    op = None
    if "softmax" in names and names & _PRODUCT_OPERATORS:
        op = "attention"
    elif "mean" in names and (names & {"rsqrt", "sqrt"} or ("pow" in names and names & {"eps", "variance_epsilon"})):
        op = "layer_norm" if names & {"var", "std", "-"} else "rms_norm"
    return None if op is None or names & _REACHED[op] else op


def names_operation(function: type[torch.autograd.Function], op: str) -> bool:
    """Say whether the code of an autograd function, or of functions of its package that it calls, calls an operation.

    A policy reaches the call then, and decides it.
    """
    return bool(code_names(function, helpers=True) & _REACHED[op])  # type: ignore[arg-type]
