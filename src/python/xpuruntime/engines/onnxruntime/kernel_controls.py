# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What ONNX Runtime can do with the kernel keys of a policy, on the CPU and on CUDA."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.engines.onnxruntime.book import Book
    from xpuruntime.engines.onnxruntime.settings import Settings

__all__ = ["ATTENTION_BITS", "CONV_SEARCH", "settle_kernels", "settle_rules"]

#: Attention families to bits of the CUDA option ``sdpa_kernel``. Bit 16 (math) is never switched off by ONNX Runtime.
ATTENTION_BITS = {
    "flash_v2": 1,
    "efficient": 2,
    "trt_fused": 4,
    "cudnn": 8,
    "cudnn.sdpa": 8,
    "math": 16,
    "trt_flash": 32,
    "trt_cross": 64,
    "trt_causal": 128,
    "lean": 256,
    "decoder": 512,
}

#: Convolution families to the CUDA option ``cudnn_conv_algo_search``.
CONV_SEARCH = {
    "cudnn": "HEURISTIC",
    "cudnn_heuristic": "HEURISTIC",
    "cudnn_exhaustive": "EXHAUSTIVE",
    "cudnn_default": "DEFAULT",
}

_ATTENTION_OPS = frozenset(
    {"Attention", "MultiHeadAttention", "GroupQueryAttention", "PackedAttention", "DecoderMaskedMultiHeadAttention"}
)
_OPS_OF = {
    "matmul": frozenset({"MatMul", "Gemm", "FusedMatMul", "MatMulNBits"}),
    "attention": _ATTENTION_OPS,
    "layer_norm": frozenset({"LayerNormalization", "SkipLayerNormalization"}),
    "rms_norm": frozenset({"RMSNormalization", "SimplifiedLayerNormalization", "SkipSimplifiedLayerNormalization"}),
    "conv": frozenset({"Conv", "ConvTranspose", "FusedConv"}),
}
_REWRITE = "no option of ONNX Runtime chooses this kernel"


def settle_kernels(request: Request, settings: Settings, book: Book, *, cuda: bool) -> None:
    """Resolve the preferences of the kernel policy into provider options."""
    for op, use in request.policy.kernels.preferences.items():
        key = f"kernels.{op}"
        wanted = (use,) if isinstance(use, str) else tuple(use)
        present = any(name.rpartition(":")[2] in _OPS_OF[op] for name in request.model.ops)
        if "auto" in wanted:
            book.add(key, "the engine's choice", "enforced", "auto leaves the choice to the engine")
        elif not present:
            book.add(key, "-", "enforced", f"the model has no {op} node: nothing to choose")
        elif op == "attention" and cuda:
            _attention(wanted, settings, book, key)
        elif op == "conv" and cuda:
            _conv(wanted, settings, book, key)
        elif op == "matmul" and cuda and set(wanted) <= {"cublas", "cublasLt", "cublas.cublas", "cublas.cublasLt"}:
            book.add(
                key,
                "-",
                "unsupported",
                f"{_REWRITE}; the CUDA provider calls cuBLAS or cuBLASLt as it sees fit",
                "remove the key, or use mode: prefer",
            )
        else:
            book.add(key, "-", "unsupported", _REWRITE, "remove the key, or use mode: prefer")


def _attention(wanted: tuple[str, ...], settings: Settings, book: Book, key: str) -> None:
    unknown = [name for name in wanted if name not in ATTENTION_BITS]
    known = [name for name in wanted if name in ATTENTION_BITS]
    if not known:
        book.add(
            key,
            "-",
            "unsupported",
            f"the CUDA provider has no {', '.join(unknown)}; it has {', '.join(ATTENTION_BITS)}",
            "name one of those",
        )
        return
    bits = 0
    for name in known:
        bits |= ATTENTION_BITS[name]
    settings.options["sdpa_kernel"] = str(bits)
    left = f"; it has no {', '.join(unknown)}" if unknown else ""
    if known == ["math"] and not unknown:
        book.add(key, f"sdpa_kernel={bits}", "enforced", "only the unfused kernel is allowed")
        return
    book.add(
        key,
        f"sdpa_kernel={bits}",
        "advisory",
        (
            "the set of allowed kernels; ONNX Runtime keeps the unfused one allowed where none of them "
            f"fits{left}. The evidence says which ran"
        ),
    )


def _conv(wanted: tuple[str, ...], settings: Settings, book: Book, key: str) -> None:
    known = [name for name in wanted if name in CONV_SEARCH]
    if not known:
        book.add(
            key,
            "-",
            "unsupported",
            f"the CUDA provider has only cuDNN convolutions: {', '.join(CONV_SEARCH)}",
            "name one of those",
        )
        return
    search = CONV_SEARCH[known[0]]
    if settings.deterministic and search == "EXHAUSTIVE":
        book.add(
            key,
            "cudnn_conv_algo_search=HEURISTIC",
            "unsupported",
            "exhaustive search picks by timing, which determinism: run_to_run forbids",
            "drop one of the two keys",
        )
        return
    settings.options["cudnn_conv_algo_search"] = search
    book.add(key, f"cudnn_conv_algo_search={search}", "enforced", "provider option, read back after loading")


def settle_rules(request: Request, settings: Settings, book: Book) -> None:
    """Resolve the rules of the kernel policy: only precision by node can be enforced here."""
    keep: list[str] = []
    for index, rule in enumerate(request.policy.kernels.rules):
        key = f"kernels.rules[{index}]"
        glob = rule.match.node
        chosen = rule.use not in (None, "auto", ("auto",))
        if rule.precision == "fp32" and glob and not chosen and settings.convert:
            keep.append(glob)
            book.add(key, f"nodes {glob} stay fp32", "enforced", "the converter leaves them alone")
        elif chosen:
            book.add(key, "-", "unsupported", f"{_REWRITE} for single nodes", "remove the rule, or use mode: prefer")
        else:
            book.add(
                key,
                "-",
                "unsupported",
                "a precision rule needs a node pattern, precision: fp32 and a converted graph",
                "state match.node and execution.precision: fp16",
            )
    settings.keep_fp32 = tuple(keep)
