# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Controls of ONNX Runtime for the kernel keys of a policy, on the CPU and on CUDA."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.control_builder import ENGINE_CHOICE, ControlBuilder
from xpuruntime.engines.onnxruntime.options import ATTENTION_BITS, CONV_SEARCH, OnnxRuntimeSettings
from xpuruntime.engines.onnxruntime.rewriting.rules import (
    THREADS,
    FoundRewrites,
    Rewrite,
    RuleQuery,
    UnrewrittenNode,
    by_key,
    xpuruntime_threads,
)
from xpuruntime.policies.document import question
from xpuruntime.policies.kernel_rules import RuleMatch, misspelt_kernel
from xpuruntime.policies.kinds import share_text

if TYPE_CHECKING:
    from xpuruntime.engines.base import Request
    from xpuruntime.policies import KernelPolicy, KernelRule

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
_TYPES = {"fp16": 10, "bf16": 16}
#: Nodes that a control names.
_NAMED = 3


class KernelKeys:
    """Resolves the kernel keys of one request: by xpuruntime operators, or by options of ONNX Runtime."""

    def __init__(
        self,
        request: Request,
        settings: OnnxRuntimeSettings,
        builder: ControlBuilder,
        capability: tuple[int, int] | None,
    ) -> None:
        self._request, self._book = request, builder
        self._cuda = request.device.startswith("cuda")
        self._policy = request.policy.kernels
        self._settings = settings = settings.replace(capability=capability)
        self._query = RuleQuery(self._policy, request.device, settings.arch)
        self._why_not = _why_not(request, settings)
        self._why_not_tuned = self._why_not or _why_not_tuned(self._policy)
        tune = self._policy.auto_strategy == "best_performance" and self._why_not_tuned is None
        self._found = self._find(capability, tune=tune) if self._why_not is None else FoundRewrites()
        self._settings = settings.replace(
            tune=tune,
            rewrites={rewrite.node: str(rewrite) for rewrite in self._found.rewrites},
            left={node.node: str(node) for node in self._found.left},
        )

    def resolve(self) -> OnnxRuntimeSettings:
        """Add the control of every kernel key, and return the settings with what the keys resolve to."""
        for op in self._policy.preferences:
            self._short_form(op)
        self._rules()
        if self._policy.auto_strategy == "best_performance" and self._why_not_tuned is not None:
            self._book.add("kernels.auto_strategy", "-", "unsupported", *self._why_not_tuned)
        elif self._settings.tune:
            self._book.add(
                "kernels.auto_strategy",
                f"{len(self._found.free)} nodes measured at load",
                "enforced",
                "where the policy leaves the choice, each operation whose sizes are fixed is measured as ONNX Runtime "
                "has it and as an xpuruntime operator, and becomes one where that is surely faster by more than "
                f"{share_text(self._policy.tuning.min_effect)}",
            )
        else:
            reason = "where the policy leaves the choice, ONNX Runtime's own kernels run"
            self._book.add("kernels.auto_strategy", "first_supported", "enforced", reason)

        self._threads()
        return self._settings

    def _threads(self) -> None:
        """Take the promise of ``execution.threads`` back where xpuruntime kernels run on threads of their own."""
        requested = self._request.policy.execution.threads
        on_cpu = bool(self._settings.rewrites or self._settings.tune) and not self._cuda
        if requested is None or not on_cpu or xpuruntime_threads() == requested:
            return
        for index, control in enumerate(self._book.controls):
            if control.key == "execution.threads":
                self._book.controls[index] = msgspec.structs.replace(
                    control,
                    enforceability="advisory",
                    reason="session option for ONNX Runtime's operators; xpuruntime kernels share the threads of the "
                    "process",
                    fix=f"set the environment variable {THREADS}={requested} before the process starts",
                )

    def _find(self, capability: tuple[int, int] | None, *, tune: bool) -> FoundRewrites:
        if not (tune or self._query.requests_kernels):
            return FoundRewrites()
        from xpuruntime.engines.model.shapes import with_shapes
        from xpuruntime.engines.onnxruntime.rewriting.graph_edit import find_rewrites, terms_of

        request, settings = self._request, self._settings
        return find_rewrites(
            with_shapes(request.model, request.policy).named_proto(),
            self._query,
            terms_of(request, settings),
            capability,
            tune=tune,
            fp32_as=_TYPES.get(settings.convert or "", 1),
        )

    def _short_form(self, op: str) -> None:
        key, use = f"kernels.{op}", self._policy.preferences[op]
        wanted = (use,) if isinstance(use, str) else tuple(use)
        if wanted[0] == "auto":
            self._book.add(key, ENGINE_CHOICE, "enforced", "auto leaves the choice to the engine")
        elif self._query.names_kernel(op, wanted) and (self._why_not is None or not self._has_option(op, wanted)):
            self._rewritten(key, wanted, present=self._present(op), what=op)
        elif not self._present(op) and self._seen.get(op) and not (op == "attention" and self._cuda):
            self._unserved(key, op, wanted)
        elif not self._present(op) and not self._seen.get(op):
            self._absent(key, op, wanted)
        elif op == "attention" and self._cuda:
            self._attention(wanted, key)
        elif op == "conv" and self._cuda:
            self._conv(wanted, key)
        elif wanted[-1] == "auto":
            self._book.add(key, ENGINE_CHOICE, "enforced", f"it has no {', '.join(wanted[:-1])}, then auto")
        else:
            reason = f"neither an option of ONNX Runtime nor an xpuruntime kernel is called {', '.join(wanted)}"
            self._book.add(key, "-", "unsupported", *_not_built(wanted, reason, op))

    def _has_option(self, op: str, wanted: Sequence[str]) -> bool:
        known: object = {"attention": ATTENTION_BITS, "conv": CONV_SEARCH}.get(op, {})
        return self._cuda and any(word in known for word in wanted)  # type: ignore[operator]

    @functools.cached_property
    def _seen(self) -> dict[str, tuple[str, ...]]:
        from xpuruntime.engines.written_out import written_out

        return written_out(self._request.model.nodes)

    def _unserved(self, key: str, op: str, wanted: Sequence[str]) -> None:
        nodes = self._seen[op]
        rest = f" and {len(nodes) - _NAMED} more" if len(nodes) > _NAMED else ""
        named = ", ".join(map(repr, nodes[:_NAMED]))
        reason = (
            f"the model writes {op} out (at {named}{rest}), and no option of ONNX Runtime and no xpuruntime kernel "
            f"called {', '.join(wanted)} serves it"
        )
        self._book.add(key, "-", "unsupported", reason)

    def _present(self, op: str) -> bool:
        return op in self._kinds or not _OPS_OF.get(op, frozenset()).isdisjoint(self._op_types)

    @functools.cached_property
    def _kinds(self) -> set[str]:
        return {rewrite.kind for rewrite in self._found.rewrites} | {node.kind for node in self._found.left}

    @functools.cached_property
    def _op_types(self) -> set[str]:
        return {name.rpartition(":")[2] for name in self._request.model.ops}

    @functools.cached_property
    def _done(self) -> dict[str, list[Rewrite]]:
        return by_key(self._found.rewrites)

    @functools.cached_property
    def _left(self) -> dict[str, list[UnrewrittenNode]]:
        return by_key(self._found.left)

    def _rewritten(self, key: str, wanted: Sequence[str], *, present: bool, what: str) -> None:
        done, left = self._done.get(key, []), self._left.get(key, [])
        if self._why_not is not None and present:
            reason, fix = self._why_not
            self._book.add(key, "-", "unsupported", f"{', '.join(wanted)}: {reason}", fix)
        elif not done and not left and present:
            self._book.add(key, "-", "enforced", "other rules hold for every node: nothing to choose")
        elif not done and not left and self._seen.get(what):
            self._unserved(key, what, wanted)
        elif not done and not left:
            self._absent(key, what, wanted)
        elif not left:
            self._book.add(key, _counted(done), "enforced", _held(done, strict=self._settings.strict))
        else:
            reason = f"{len(left)} of {len(done) + len(left)} nodes stay with ONNX Runtime: {_named(left)}"
            level: object = "advisory" if done else "unsupported"
            import json

            rule = f"{{match: {{node: {json.dumps(left[0].node)}}}, use: auto}}"
            fix = f"leave each to ONNX Runtime by a rule, the first of them by kernels.rules: [{rule}]"
            self._book.add(key, _counted(done) if done else "-", level, reason, fix)  # type: ignore[arg-type]

    def _absent(self, key: str, op: str, wanted: Sequence[str]) -> None:
        from xpuruntime.engines.written_out import absence

        self._book.add(key, "-", "advisory" if wanted[-1] == "auto" else "unsupported", *absence(op, self._seen))

    def _rules(self) -> None:
        """Resolve the rules: xpuruntime kernels, and fp32 for nodes of a converted or quantized graph."""
        keep: list[str] = []
        for index, rule in enumerate(self._policy.rules):
            key = f"kernels.rules[{index}]"
            use = (rule.use,) if isinstance(rule.use, str) else rule.use or ()
            glob = rule.match.node
            chosen = bool(use) and use[0] != "auto"
            changed = self._settings.convert is not None or self._settings.qdq is not None
            kept = rule.precision == "fp32" and bool(glob) and changed
            if kept and glob:
                keep.append(glob)
            if chosen and rule.precision is not None and not kept:
                self._precision(key)
            elif chosen and self._query.names_kernel(rule.match.op, use):
                present = rule.match.op is None or self._present(rule.match.op)
                if present and self._why_not is None and not self._query.may_match(rule.match):
                    self._idle(key, index, rule)
                else:
                    self._rewritten(key, use, present=present, what=rule.match.op or "operation that it is for")
            elif chosen:
                reason = (
                    f"no xpuruntime kernel is called {', '.join(use)}, and no option of ONNX Runtime is for one node"
                )
                self._book.add(key, "-", "unsupported", *_not_built(use, reason, rule.match.op))
            elif kept:
                by = "converter" if self._settings.qdq is None else "quantizer"
                self._book.add(key, f"nodes {glob} stay fp32", "enforced", f"the {by} leaves them alone")
            elif rule.precision is None:
                self._book.add(key, ENGINE_CHOICE, "enforced", "auto leaves the choice to the engine")
            else:
                self._precision(key)
        self._settings = self._settings.replace(keep_fp32=tuple(keep))

    def _idle(self, key: str, index: int, rule: KernelRule) -> None:
        """Add the control of a rule that is for no node of the model."""
        # A path that the model does not have asks for a missing module, and a size that the operation does not have for
        # no call at all. Other conditions may hold for other models, devices and phases that the policy is for.
        why, fix = self._policy.compiled_rules.rules[index].lacking_sizes()
        if why:
            self._book.add(key, "-", "advisory", f"it can match no node: {why}", fix)
            return
        stated = rule.match.stated_fields()
        words = ", ".join(f"{name}: {value}" for name, value in stated.items())
        reason = f"no node of the model is one that the rule is for, which states {words}"
        path = RuleMatch(**{name: value for name, value in stated.items() if name in ("op", "module", "node")})
        if self._query.may_match(path):
            self._book.add(key, "-", "enforced", reason)
        else:
            self._book.add(key, "-", "advisory", reason, "state a name that `xrt plan` shows, or leave the rule out")

    def _precision(self, key: str) -> None:
        self._book.add(
            key,
            "-",
            "unsupported",
            "a precision rule needs a node pattern, precision: fp32, and a graph converted or quantized here",
            "state match.node and execution.precision: fp16, or int8 with a calibration",
        )

    def _attention(self, wanted: tuple[str, ...], key: str) -> None:
        unknown = [name for name in wanted if name not in ATTENTION_BITS]
        known = [name for name in wanted if name in ATTENTION_BITS]
        if not known:
            self._book.add(
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
        self._settings = self._settings.with_options({"sdpa_kernel": str(bits)})
        left = f"; it has no {', '.join(unknown)}" if unknown else ""
        if known == ["math"] and not unknown:
            self._book.add(key, f"sdpa_kernel={bits}", "enforced", "only the unfused kernel is allowed")
            return
        self._book.add(
            key,
            f"sdpa_kernel={bits}",
            "advisory",
            (
                "the set of allowed kernels; ONNX Runtime keeps the unfused one allowed where none of them "
                f"fits{left}. The evidence says which ran"
            ),
        )

    def _conv(self, wanted: tuple[str, ...], key: str) -> None:
        known = [name for name in wanted if name in CONV_SEARCH]
        if not known:
            self._book.add(
                key,
                "-",
                "unsupported",
                f"the CUDA provider has only cuDNN convolutions: {', '.join(CONV_SEARCH)}",
                "name one of those",
            )
            return
        search = CONV_SEARCH[known[0]]
        if self._settings.deterministic and search == "EXHAUSTIVE":
            self._book.add(
                key,
                "cudnn_conv_algo_search=HEURISTIC",
                "unsupported",
                "exhaustive search picks by timing, which execution.determinism forbids",
                "state kernels.conv: cudnn_heuristic, which picks without timing",
            )
            return
        self._settings = self._settings.with_options({"cudnn_conv_algo_search": search})
        self._book.add(key, f"cudnn_conv_algo_search={search}", "enforced", "provider option, read back after loading")


def _not_built(words: Sequence[str], reason: str, op: str | None) -> tuple[str, str | None]:
    from xpuruntime import _core

    missing = [why for why in dict.fromkeys(map(_core.why_not_built, words)) if why]
    if missing:
        return "; ".join(missing), "run `xrt doctor`, which names the fix"
    near = misspelt_kernel(words, op)
    return reason + question(near), near and f"write {near}"


def _why_not(request: Request, settings: OnnxRuntimeSettings) -> tuple[str, str] | None:
    if settings.qdq is not None:
        return (
            "the graph is quantized, and xpuruntime kernels compute in floats",
            "state precision fp32, fp16 or bf16, which they compute in",
        )
    if request.purpose == "compile" or request.artifact is not None:
        return "a compiled graph holds ONNX Runtime's own operators", "open the model itself, where the key holds"
    return None


def _why_not_tuned(policy: KernelPolicy) -> tuple[str, str] | None:
    if policy.tuning.objective == "memory":
        return "sessions are compared by their times alone", "state tuning: {objective: time}"
    return None


def _counted(done: Sequence[Rewrite]) -> str:
    ops = ", ".join(dict.fromkeys(f"xpuruntime.{rewrite.op}" for rewrite in done))
    return f"{len(done)} {'node' if len(done) == 1 else 'nodes'} as {ops}"


def _held(done: Sequence[Rewrite], *, strict: bool) -> str:
    rest = list(dict.fromkeys(rewrite.rest for rewrite in done if rewrite.rest))
    text = "xpuruntime operators, which xpuruntime's dispatcher serves; the evidence says which kernel ran"
    if rest:
        text += f". {'; '.join(rest)}"
    if strict:
        text += ". A run whose sizes the kernel cannot serve is refused"
    return text


def _named(left: Sequence[UnrewrittenNode]) -> str:
    shown = "; ".join(f"{node.node!r}: {node.reason}" for node in left[:_NAMED])
    return shown + (f"; and {len(left) - _NAMED} more" if len(left) > _NAMED else "")


#: Found by opening a model of one operator for each (opset 23, bfloat16, CPU provider off) with ONNX Runtime 1.31.1 on
#: an H200. What is not here stays in fp32, between casts, and the report says so.
CUDA_BF16_OPS: frozenset[str] = frozenset(
    {
        "Abs",
        "Add",
        "Attention",
        "AveragePool",
        "Concat",
        "Conv",
        "Cos",
        "Div",
        "Erf",
        "Exp",
        "Expand",
        "Flatten",
        "Gather",
        "Gelu",
        "Gemm",
        "HardSigmoid",
        "HardSwish",
        "Identity",
        "IsNaN",
        "LayerNormalization",
        "LpNormalization",
        "MatMul",
        "Max",
        "Min",
        "Mish",
        "Mod",
        "Mul",
        "Neg",
        "Pow",
        "RMSNormalization",
        "ReduceMean",
        "ReduceSum",
        "Relu",
        "Reshape",
        "ScatterND",
        "Sigmoid",
        "Sin",
        "Slice",
        "Softmax",
        "Softplus",
        "Split",
        "Sqrt",
        "Squeeze",
        "Sub",
        "Sum",
        "Tanh",
        "Tile",
        "Transpose",
        "Trilu",
        "Unsqueeze",
        "Where",
    }
)
