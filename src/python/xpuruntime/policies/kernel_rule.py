# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RuleMatch` and `KernelRule`: a kernel or a precision for some operations only."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from xpuruntime.policies.call_facts import CallFacts
from xpuruntime.policies.compiled_rules import certainty_of, conditions_of
from xpuruntime.policies.compound_kinds import Nested, OneOrMore
from xpuruntime.policies.device_spec import DEVICE_PATTERN, check_device
from xpuruntime.policies.int_range import IntRange
from xpuruntime.policies.kernel_ids import ID_PATTERN, OPS, check_kernel, families_of
from xpuruntime.policies.kinds import Choice, Kind, Text
from xpuruntime.policies.refusal import Refused
from xpuruntime.policies.value import PolicyValue

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["DType", "KernelName", "KernelRule", "Phase", "RuleMatch", "RulePrecision"]

DType = Literal["fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4"]
Phase = Literal["train", "infer", "prefill", "decode", "backward"]
RulePrecision = Literal["fp32", "tf32", "fp16", "bf16", "int8"]

_DTYPES: tuple[DType, ...] = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8", "int8", "int4")
_PHASES: tuple[Phase, ...] = ("train", "infer", "prefill", "decode", "backward")
_PRECISIONS: tuple[RulePrecision, ...] = ("fp32", "tf32", "fp16", "bf16", "int8")
_ARCH = re.compile("sm[0-9]{2,3}")


class KernelName(Text):
    """A kernel family or id that can serve `op`; ``None`` stands for any operation."""

    def __init__(self, op: str | None) -> None:
        super().__init__(what="the name of a kernel", parse=lambda text: check_kernel(text, op))
        self._op = op

    def _schema(self) -> dict[str, Any]:
        return {"anyOf": [{"enum": list(families_of(self._op))}, {"type": "string", "pattern": ID_PATTERN}]}


def _check_match_device(text: str) -> str:
    return text if _ARCH.fullmatch(text) else check_device(text)


class RuleMatch(PolicyValue, frozen=True, kw_only=True):
    """The operations a rule is for. Every key that is stated must hold; a key that is not stated holds always."""

    KINDS: ClassVar[dict[str, Kind]] = {
        "op": Choice(OPS, "Operation.", what="operations", optional=True),
        "m": IntRange("Rows of a matmul: a number or a condition such as '<=16', '>=128', '1..64'."),
        "n": IntRange("Columns of a matmul: a number or a condition."),
        "k": IntRange("Inner size of a matmul: a number or a condition."),
        "head_dim": IntRange("Head size of an attention: a number or a condition."),
        "kv": IntRange("Length of the keys and values of an attention: a number or a condition."),
        "dtype": OneOrMore(
            Choice(_DTYPES, what="dtypes"), "Data type of the inputs, or several.", keep_single=True, optional=True
        ),
        "device": Text(
            "Device such as 'cuda' or 'cuda:1', or architecture such as 'sm90'.",
            what="a device or architecture",
            parse=_check_match_device,
            pattern=f"{DEVICE_PATTERN}|^{_ARCH.pattern}$",
            optional=True,
        ),
        "node": Text("Pattern for the name of the graph node, such as 'layers.*.attn'.", optional=True),
        "module": Text("Pattern for the name of the PyTorch module.", optional=True),
        "phase": OneOrMore(
            Choice(_PHASES, what="phases"), "Phase of the work, or several.", keep_single=True, optional=True
        ),
    }

    op: str | None = None
    m: int | str | None = None
    n: int | str | None = None
    k: int | str | None = None
    head_dim: int | str | None = None
    kv: int | str | None = None
    dtype: str | tuple[str, ...] | None = None
    device: str | None = None
    node: str | None = None
    module: str | None = None
    phase: str | tuple[str, ...] | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            op: str | None = None,
            m: int | str | None = None,
            n: int | str | None = None,
            k: int | str | None = None,
            head_dim: int | str | None = None,
            kv: int | str | None = None,
            dtype: str | Sequence[str] | None = None,
            device: str | None = None,
            node: str | None = None,
            module: str | None = None,
            phase: str | Sequence[str] | None = None,
        ) -> None: ...

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

    KINDS: ClassVar[dict[str, Kind]] = {
        "match": Nested(RuleMatch, "The operations this rule is for; states at least one key."),
        "use": OneOrMore(
            KernelName(None),
            "Kernel to use, or several in order of preference.",
            keep_single=True,
            last="auto",
            optional=True,
        ),
        "precision": Choice(_PRECISIONS, "Precision to compute in.", what="precisions", optional=True),
    }
    REQUIRED: ClassVar[tuple[str, ...]] = ("match",)

    match: RuleMatch
    use: str | tuple[str, ...] | None = None
    precision: RulePrecision | None = None

    if TYPE_CHECKING:

        def __init__(
            self,
            *,
            match: RuleMatch | dict[str, Any],
            use: str | Sequence[str] | None = None,
            precision: RulePrecision | None = None,
        ) -> None: ...

    def check_together(self) -> None:
        """Refuse rules that ask for nothing or match everything, and kernels of another operation."""
        if self.use is None and self.precision is None:
            raise Refused("asks for nothing; state 'use', 'precision' or both")
        if not self.match.stated_fields():
            raise Refused(
                f"states no key, so it would match everything; state one of {', '.join(RuleMatch.KINDS)}", "match"
            )
        if self.match.op is not None and self.use is not None:
            single = isinstance(self.use, str)
            for index, kernel in enumerate((self.use,) if isinstance(self.use, str) else self.use):
                try:
                    check_kernel(kernel, self.match.op)
                except Refused as refused:
                    raise refused.under(*(("use",) if single else ("use", index))) from None
