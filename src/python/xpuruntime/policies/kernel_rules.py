# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rules of a kernel policy: the words they may use, what they match, and how measured kernels replace others."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal

from xpuruntime.policies.call_facts import CallFacts, IntRange
from xpuruntime.policies.compiled_rules import certainty_of, conditions_of
from xpuruntime.policies.compound_kinds import Nested, OneOrMore
from xpuruntime.policies.device_spec import DEVICE_PATTERN, check_device
from xpuruntime.policies.document import Refused, did_you_mean, nearest, question, quote
from xpuruntime.policies.kinds import Choice, Duration, Number, Percentage, Text
from xpuruntime.policies.value import Accepts, PolicyValue, field

_FRAMEWORK = "whatever PyTorch runs by default; in a session without PyTorch, what its engine chooses"
_INDUCTOR = "left to torch.compile's own code generator; outside of compiled code, as torch"
#: Operation -> family -> what it means.
FAMILIES: dict[str, dict[str, str]] = {
    "matmul": {
        "auto": "the choice is free; the report says what ran",
        "cublas": "cuBLAS, its own choice of algorithm",
        "cublasLt": "cuBLASLt, with a pinned algorithm where the engine can hold it",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
        "inductor": _INDUCTOR,
    },
    "attention": {
        "auto": "the choice is free; the report says what ran",
        "flash_v2": "FlashAttention 2",
        "flash_v3": "FlashAttention 3 (Hopper and later)",
        "fa3": "the same as flash_v3",
        "fa4": "FlashAttention 4 (flash-attn-4), called directly",
        "cudnn": "cuDNN's fused attention",
        "efficient": "memory-efficient attention (CUTLASS)",
        "math": "unfused: matmul, softmax, matmul",
        "trt_fused": "TensorRT's fused attention kernels",
        "trt_flash": "TensorRT's flash attention kernels",
        "trt_cross": "TensorRT's fused cross attention kernels",
        "trt_causal": "TensorRT's fused causal attention kernels",
        "lean": "lean attention, for decoding",
        "decoder": "the decoder's masked attention kernels",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
        "inductor": _INDUCTOR,
    },
    "layer_norm": {
        "auto": "the choice is free; the report says what ran",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
        "inductor": _INDUCTOR,
    },
    "rms_norm": {
        "auto": "the choice is free; the report says what ran",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
        "inductor": _INDUCTOR,
    },
    "conv": {
        "auto": "the choice is free; the report says what ran",
        "cudnn": "cuDNN, with the engine's own way of choosing an algorithm",
        "cudnn_heuristic": "cuDNN, algorithm by its heuristics: the same choice in every run",
        "cudnn_exhaustive": "cuDNN, algorithm by timing all: the fastest, but the choice may differ between runs",
        "cudnn_default": "cuDNN without search: its default algorithm, or quick heuristics among deterministic ones",
        "cuda_raw": "the CUDA kernels of this library",
        "cpu": "the CPU kernels of this library",
        "torch": _FRAMEWORK,
        "inductor": _INDUCTOR,
    },
}

#: Those that kernels of the core serve; the others are for kernels on tensors of PyTorch alone.
ARRAY_OPS = tuple(FAMILIES)
TENSOR_OPS = (
    "swiglu", "geglu", "rope", "softmax", "cross_entropy", "linear_cross_entropy", "grouped_matmul", "cache_update",
)  # fmt: skip
FAMILIES |= {op: {"auto": FAMILIES["conv"]["auto"], "torch": _FRAMEWORK, "inductor": _INDUCTOR} for op in TENSOR_OPS}
FAMILIES["linear_cross_entropy"]["chunked"] = "a part of the rows at a time, so that the logits are never all in memory"
#: The operations a kernel can be chosen for.
OPS: tuple[str, ...] = tuple(FAMILIES)

#: Well-known ids: id -> (operations, what it means). Ids that are not listed are accepted: backends may define more.
KERNEL_IDS: dict[str, tuple[tuple[str, ...], str]] = {
    "cuda_raw.skinny": (("matmul",), "matmul with few rows (m <= 64), bound by reading the weights"),
    "cuda_raw.flash_attention_v2": (("attention",), "FlashAttention 2 of this library"),
    "triton_raw.decode": (("attention",), "attention of one query a row, of this library, for inference"),
    "cuda_raw.layer_norm": (("layer_norm",), "layer norm of this library"),
    "cuda_raw.rms_norm": (("rms_norm",), "RMS norm of this library"),
    "cuda_raw.depthwise_conv": (("conv",), "depthwise convolution of this library: one filter for each channel"),
    "cudnn.sdpa": (("attention",), "cuDNN's scaled dot product attention"),
    "cudnn.conv_heuristic": (("conv",), "cuDNN's convolution, by its precise heuristics"),
    "cudnn.conv_default": (("conv",), "cuDNN's convolution, by its quick heuristics among deterministic plans"),
    "cudnn.conv_exhaustive": (("conv",), "cuDNN's convolution, by timing all plans"),
    "cublas.cublas": (("matmul",), "the cuBLAS kernels"),
    "cublas.cublasLt": (("matmul",), "the cuBLASLt kernels"),
    "cpu.blas": (("matmul",), "matrix products by OpenBLAS"),
    "cpu.gemm_conv": (("conv",), "convolution as matrix products by OpenBLAS"),
    "cpu.vectorised": (("layer_norm", "rms_norm"), "norms with the widest vectors of the processor"),
    "cpu.reference": (ARRAY_OPS, "the definition of each operation, in double precision: slow and exact"),
    "null.null": (ARRAY_OPS, "computes nothing: the outputs become zeros"),
    "torch.mm": (("matmul",), "PyTorch's matrix product"),
    "torch.flash": (("attention",), "PyTorch's FlashAttention 2"),
    "torch.efficient": (("attention",), "PyTorch's memory-efficient attention"),
    "torch.cudnn": (("attention",), "cuDNN's attention as PyTorch calls it"),
    "torch.math": (("attention",), "PyTorch's unfused attention"),
    "torch.flex_triton": (("attention",), "flex_attention by its Triton kernel, compiled"),
    "torch.flex_decode": (("attention",), "flex_attention by its Triton kernel for few queries, compiled"),
    "torch.flex_flash": (("attention",), "flex_attention by FlashAttention 4, compiled"),
    "torch.layer_norm": (("layer_norm",), "PyTorch's layer norm"),
    "torch.rms_norm": (("rms_norm",), "PyTorch's RMS norm"),
    "torch_masked.cudnn": (("attention",), "cuDNN's with a mask, and 0 for queries that see no key"),
    "fa4.attention": (("attention",), "FlashAttention 4 (flash-attn-4), called directly"),
    "quack.rms_norm": (("rms_norm",), "quack's RMS norm, in CuTe"),
    "liger.rms_norm": (("rms_norm",), "Liger's RMS norm, in Triton"),
    "liger.swiglu": (("swiglu",), "Liger's gated SiLU, in Triton"),
    "liger.geglu": (("geglu",), "Liger's gated GELU by tanh, in Triton"),
    "liger.rope": (("rope",), "Liger's rotary embedding, in Triton"),
    "liger.cross_entropy": (("cross_entropy",), "Liger's cross entropy, in Triton"),
    "liger.linear_cross_entropy": (("linear_cross_entropy",), "Liger's fused linear cross entropy, in Triton"),
    "chunked.linear_cross_entropy": (("linear_cross_entropy",), FAMILIES["linear_cross_entropy"]["chunked"]),
    "torch_chunked.linear_cross_entropy": (("linear_cross_entropy",), "that of PyTorch 2.13 in chunks"),
    "compiled.swiglu": (("swiglu",), "gated SiLU by torch.compile, in eager calls"),
    "compiled.geglu": (("geglu",), "gated GELU by torch.compile, in eager calls"),
    "compiled.rope": (("rope",), "rotary embedding by torch.compile, in eager calls"),
    "compiled.cross_entropy": (("cross_entropy",), "cross entropy by torch.compile, in eager calls"),
    "compiled.linear_cross_entropy": (("linear_cross_entropy",), "the logits of some rows at a time, by torch.compile"),
    "flashinfer.rms_norm": (("rms_norm",), "FlashInfer's RMS norm, for inference"),
    "flashinfer.swiglu": (("swiglu",), "FlashInfer's gated SiLU, for inference"),
    "flashinfer.rope": (("rope",), "FlashInfer's rotary embedding, for inference"),
    "flashinfer.decode": (("attention",), "FlashInfer's attention of a single query, for inference"),
    "flashinfer.cache_update": (("cache_update",), "FlashInfer's write of keys and values into a cache"),
    "quack.softmax": (("softmax",), "quack's softmax, in CuTe"),
    "quack.cross_entropy": (("cross_entropy",), "quack's cross entropy, in CuTe"),
    "quack.linear_cross_entropy": (("linear_cross_entropy",), "the logits of some rows at a time, their loss by quack"),
    "quack.rope": (("rope",), "quack's rotary embedding, in CuTe"),
    "quack.grouped_matmul": (("grouped_matmul",), "quack's product of groups of rows, in CuTe"),
}

_ID = r"[A-Za-z_][A-Za-z0-9_]*\.[A-Za-z_][A-Za-z0-9_]*(@[A-Za-z0-9_.:=,+-]+)?"
#: Kernels that are named by where they come from: a registered operator, or a layer of a Hugging Face repository.
SOURCE_PREFIXES = ("triton:", "hf:")
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_SOURCES = {
    "triton:": rf"triton:{_NAME}(\.{_NAME})+",
    "hf:": (
        rf"hf:([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9._-]+@[0-9a-f]{{40}}|/[^,?@\s]+@sha256:[0-9a-f]{{64}})/{_NAME}"
    ),
}
_SOURCE_FIX = {
    "triton:": "write triton:package.module.operator",
    "hf:": (
        "write hf:organization/repository@<the 40 hexadecimal digits of a commit>/Layer, or "
        "hf:/absolute/folder@sha256:<digest of its files>/Layer; a branch, a tag or a short commit may mean another "
        "kernel tomorrow"
    ),
}
#: The form of an id or a source, for the JSON Schema.
ID_PATTERN = f"^({'|'.join((_ID, *_SOURCES.values()))})$"


def families_of(op: str | None) -> dict[str, str]:
    """Return family -> meaning for an operation, or for all operations together when `op` is ``None``."""
    if op is not None:
        return FAMILIES[op]
    return {family: meaning for families in FAMILIES.values() for family, meaning in families.items()}


def ops_of(use: str | Sequence[str] | None) -> frozenset[str]:
    """Return the operations that a rule is for which states none: those of arrays, and those of its kernels."""
    return computed_by(use) | frozenset(ARRAY_OPS)


def computed_by(use: str | Sequence[str] | None) -> frozenset[str]:
    """Return the operations that kernels compute: those of arrays for a kernel of which nothing else is known."""
    op_names: set[str] = set()
    for kernel in (use,) if isinstance(use, str) else use or ():
        name = kernel.partition("@")[0]
        if name not in ("auto", "torch", "inductor"):
            named = {*KERNEL_IDS.get(name, ((), ""))[0], *(op for op in OPS if name in FAMILIES[op])}
            op_names.update(named or ARRAY_OPS)
    return frozenset(op_names)


def _ids_of(op: str | None) -> list[str]:
    return [name for name, (ops, _) in KERNEL_IDS.items() if op is None or op in ops]


def nearest_kernel(kernel: str, op: str | None) -> str | None:
    """Return the family or id for `op` (``None``: for any) that a name was probably meant to be, or ``None``."""
    return nearest(kernel, [*families_of(op), *_ids_of(op)])


def misspelt_kernel(kernels: Sequence[str], op: str | None) -> str | None:
    """Return what the first id without a known kernel was probably meant to be; ``None`` where there is no such id."""
    names = (kernel.partition("@")[0] for kernel in kernels)
    unknown = next((name for name in names if "." in name and name not in KERNEL_IDS), None)
    return None if unknown is None else nearest_kernel(unknown, op)


def _fix(kernel: str, op: str | None) -> str:
    """Return the kernel to write in place of another, and where the others of the operation are listed."""
    ids, parts = _ids_of(op), set(re.split("[.@]", kernel))
    near = nearest_kernel(kernel, op) or next((name for name in ids if parts & set(name.split("."))), "auto")
    if op is not None and op not in ARRAY_OPS:
        return f"Fix: write {near}, or another of {', '.join(ids)}"
    return f"Fix: write {near}, or another that `xrt kernels{f' {op}' if op else ''}` lists"


def check_kernel(kernel: str, op: str | None) -> str:
    """Return `kernel` if it can be used for `op` (``None``: for any operation). Raises `Refused` otherwise."""
    if (prefix := next((prefix for prefix in SOURCE_PREFIXES if kernel.startswith(prefix)), None)) is not None:
        if not re.fullmatch(_SOURCES[prefix], kernel):
            raise Refused(f"{quote(kernel)} names no exact kernel. Fix: {_SOURCE_FIX[prefix]}")
        return kernel
    families = families_of(op)
    for_op = f" for {op}" if op else ""
    name, at, _ = kernel.partition("@")
    if "." not in name:
        if at and name in families:
            raise Refused(
                f"{quote(kernel)} gives a configuration to a family. Fix: give it to an id: 'backend.name@config'"
            )
        if kernel in families:
            return kernel
        others = [other for other in OPS if kernel in FAMILIES[other]]
        if others:
            raise Refused(
                f"{quote(kernel)} is a kernel of {' and '.join(others)}, not of {op}."
                f" Valid kernels: {', '.join(families)}, or an id such as 'backend.name'. {_fix(kernel, op)}"
            )
        ids = _ids_of(op)
        example = next((name for name in ids if name.startswith("torch.")), ids[0])
        hint = did_you_mean(kernel, families, "kernels", more=f", or an id such as {example!r}").partition(" Fix: ")[0]
        raise Refused(f"{quote(kernel)} is not a known kernel{for_op}{hint} {_fix(kernel, op)}")
    if not re.fullmatch(_ID, kernel):
        hint = question(nearest_kernel(kernel, op), ".")
        raise Refused(
            f"{quote(kernel)} is not a kernel id: an id is 'backend.name', with one dot{hint} {_fix(kernel, op)}"
        )
    ops, _ = KERNEL_IDS.get(name, (OPS, ""))
    if op is not None and op not in ops:
        raise Refused(f"{quote(kernel)} is a kernel of {' and '.join(ops)}, not of {op}. {_fix(kernel, op)}")
    return kernel


DType = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"]
Phase = Literal["train", "infer", "prefill", "decode", "backward"]
RulePrecision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]

_DTYPES: tuple[DType, ...] = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4")
_PHASES: tuple[Phase, ...] = ("train", "infer", "prefill", "decode", "backward")
_PRECISIONS: tuple[RulePrecision, ...] = ("fp32", "tf32", "fp16", "bf16", "int8")
_ARCH = "sm[0-9]{2,3}"


class KernelName(Text):
    """A kernel family or id that can serve `op`; ``None`` stands for any operation."""

    def __init__(self, op: str | None) -> None:
        super().__init__(what="the name of a kernel", parse=lambda text: check_kernel(text, op))
        self._op = op

    def _schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(families_of(self._op))}, {"type": "string", "pattern": ID_PATTERN}]}


def _check_match_device(text: str) -> str:
    return text if re.fullmatch(_ARCH, text) else check_device(text)


class RuleMatch(PolicyValue, frozen=True, kw_only=True):
    """The operations a rule is for. Every key that is stated must hold; a key that is not stated holds always."""

    op: str | None = field(Choice(OPS, "Operation.", what="operations"), default=None)
    m: int | str | None = field(
        IntRange("Rows of a matmul: a number or a condition such as '<=16', '>=128', '1..64'."), default=None
    )
    n: int | str | None = field(IntRange("Columns of a matmul: a number or a condition."), default=None)
    k: int | str | None = field(IntRange("Inner size of a matmul: a number or a condition."), default=None)
    head_dim: int | str | None = field(IntRange("Head size of an attention: a number or a condition."), default=None)
    kv: int | str | None = field(
        IntRange("Length of the keys and values of an attention: a number or a condition."), default=None
    )
    dtype: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        OneOrMore(Choice(_DTYPES, what="dtypes"), "Data type of the inputs, or several.", keep_single=True),
        default=None,
    )
    device: str | None = field(
        Text(
            "Device such as 'cuda' or 'cuda:1', or architecture such as 'sm90'.",
            what="a device or architecture",
            parse=_check_match_device,
            pattern=f"{DEVICE_PATTERN}|^{_ARCH}$",
        ),
        default=None,
    )
    node: str | None = field(Text("Pattern for the name of the graph node, such as 'layers.*.attn'."), default=None)
    module: str | None = field(Text("Pattern for the name of the PyTorch module."), default=None)
    phase: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        OneOrMore(Choice(_PHASES, what="phases"), "Phase of the work, or several.", keep_single=True), default=None
    )

    def matches(
        self,
        *,
        op: str | None = None,
        m: int | None = None,
        n: int | None = None,
        k: int | None = None,
        head_dim: int | None = None,
        kv: int | None = None,
        dtype: str | None = None,
        device: str | None = None,
        arch: str | None = None,
        node: str | None = None,
        module: str | None = None,
        phase: str | None = None,
    ) -> bool:
        """Say whether an operation with these facts is meant. A fact that is not known never meets a stated key.

        `device` is concrete, such as ``"cuda:0"``; `arch` is its architecture, such as ``"sm90"``.
        """
        facts = CallFacts(op, m, n, k, head_dim, kv, dtype, device, arch, node, module, phase)
        return certainty_of(conditions_of(self), facts) == "yes"


class KernelRule(PolicyValue, frozen=True, kw_only=True):
    """A kernel, a precision, or both, for the operations that `match` describes."""

    match: Accepts[RuleMatch, RuleMatch | dict[str, Any]] = field(
        Nested(RuleMatch, "The operations this rule is for; states at least one key.")
    )
    use: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        OneOrMore(
            KernelName(None),
            "Kernel to use, or several in order of preference.",
            keep_single=True,
            last="auto",
        ),
        default=None,
    )
    precision: RulePrecision | None = field(
        Choice(_PRECISIONS, "Precision to compute in.", what="precisions"), default=None
    )

    def ops_of_kernels(self) -> frozenset[str] | None:
        """Return the operations that it is for by its kernels, where it states none itself; ``None`` elsewhere."""
        return ops_of(self.use) if self.match.op is None and self.use is not None else None

    def _check_together(self) -> None:
        if self.use is None and self.precision is None:
            raise Refused("asks for nothing. Fix: state 'use', 'precision' or both")
        if not self.match.stated_fields():
            raise Refused(
                f"states no key, so it would match everything. Fix: state one of {', '.join(RuleMatch.KINDS)}", "match"
            )
        if self.match.op is not None and self.use is not None:
            single = isinstance(self.use, str)
            for index, kernel in enumerate((self.use,) if isinstance(self.use, str) else self.use):
                try:
                    check_kernel(kernel, self.match.op)
                except Refused as refused:
                    raise refused.under(*(("use",) if single else ("use", index))) from None


#: What measured kernels are chosen by.
OBJECTIVES = ("time", "memory")


class TuningPolicy(PolicyValue, frozen=True, kw_only=True):
    """How ``auto_strategy: best_performance`` measures kernels, and when one replaces another.

    Attributes
    ----------
    min_effect : float
        Share by which a kernel has to be faster than the one that would run otherwise, or need less memory: 0.02, or
        ``"2%"`` in a file.
    confidence : float
        One minus the chance that any candidate of one operation falsely replaces that one, from 0.5 to 0.9999.
    budget : float
        Seconds that measuring one operation may take; what is undecided by then replaces nothing. ``"3s"`` in a file.
    objective : {"time", "memory"}
        What PyTorch's operations choose by. Memory is the most bytes of tensors that a call holds, its gradient
        included; among kernels that need about as little, time decides, and among those that take about as long,
        memory.

    Examples
    --------
    >>> TuningPolicy(min_effect=0.05, budget=1.0)
    TuningPolicy(min_effect=0.05, budget=1.0)
    """

    min_effect: Accepts[float, float | str] = field(
        Percentage("Percentage by which a kernel has to be faster to replace another.", most=0.9), default=0.02
    )
    confidence: float = field(
        Number(0.5, 0.9999, "Confidence of all decisions about one operation together."), default=0.99
    )
    budget: Accepts[float, float | str] = field(Duration("Time that measuring one operation may take."), default=3.0)
    objective: str = field(
        Choice(OBJECTIVES, "What kernels of PyTorch's operations are chosen by.", what="objectives"), default="time"
    )
