# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`KernelPolicy`: which kernel runs each operation."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Literal, Self

from xpuruntime.errors import PolicyError
from xpuruntime.policies.call_facts import CallFacts
from xpuruntime.policies.compiled_rules import CompiledRules
from xpuruntime.policies.compound_kinds import FrozenDict, ListOf, Nested, OneOrMore
from xpuruntime.policies.document import did_you_mean, quote
from xpuruntime.policies.kernel_rules import OPS, KernelName, KernelRule, TuningPolicy
from xpuruntime.policies.kinds import Choice
from xpuruntime.policies.value import Accepts, PolicySection, field

AutoStrategy = Literal["first_supported", "best_performance"]


def _kernels(op: str) -> OneOrMore:
    doc = f"Kernel for {op}, or several in order of preference."
    return OneOrMore(KernelName(op), doc, keep_single=True, last="auto", optional=True)


class _Preferences(FrozenDict):
    __slots__ = ()
    FIX = "take the new policy that policy.set(op, kernel) or policy.remove(op) returns"


class KernelPolicy(PolicySection, frozen=True, kw_only=True, dict=True, cache_hash=True):
    """Which kernel runs each operation.

    A kernel is a family such as ``"cublasLt"`` or an id such as ``"cuda_raw.flash_attention_v2"``. Several are in
    order of preference: the first that the engine can run is taken, and ``"auto"`` may come last.

    Attributes
    ----------
    matmul, attention, layer_norm, rms_norm, conv, swiglu, geglu, rope : str or tuple of str or None
    softmax, cross_entropy, linear_cross_entropy, grouped_matmul, cache_update : str or tuple of str or None
        The short forms; ``None`` when nothing is stated.
    rules : tuple of KernelRule
        Looked at before the short forms; the first that matches wins.
    auto_strategy : {"first_supported", "best_performance"}
        How a kernel is chosen where the policy leaves the choice: the first that works, or the fastest measured.
    tuning : TuningPolicy
        How ``best_performance`` measures, and when one kernel replaces another. Outside of a tuned choice it asks for
        nothing.

    Raises
    ------
    PolicyError
        For an unknown operation or kernel; names the nearest valid one.

    Examples
    --------
    >>> policy = KernelPolicy(matmul="cublasLt", attention=["cudnn", "flash_v2"])
    >>> policy.attention
    ('cudnn', 'flash_v2')
    >>> policy.set("conv", "cudnn_heuristic").preferences["conv"]
    'cudnn_heuristic'
    """

    SECTION = "kernels"
    matmul: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(_kernels("matmul"), default=None)
    attention: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("attention"), default=None
    )
    layer_norm: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("layer_norm"), default=None
    )
    rms_norm: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("rms_norm"), default=None
    )
    conv: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(_kernels("conv"), default=None)
    swiglu: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(_kernels("swiglu"), default=None)
    geglu: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(_kernels("geglu"), default=None)
    rope: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(_kernels("rope"), default=None)
    softmax: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("softmax"), default=None
    )
    cross_entropy: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("cross_entropy"), default=None
    )
    linear_cross_entropy: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("linear_cross_entropy"), default=None
    )
    grouped_matmul: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("grouped_matmul"), default=None
    )
    cache_update: Accepts[str | tuple[str, ...] | None, str | Sequence[str] | None] = field(
        _kernels("cache_update"), default=None
    )
    rules: Accepts[tuple[KernelRule, ...], Sequence[KernelRule | dict[str, Any]]] = field(
        ListOf(
            Nested(KernelRule), "Rules by operation, shape, dtype, device, name or phase; the first that matches wins."
        ),
        default=(),
    )
    auto_strategy: AutoStrategy = field(
        Choice(
            ("first_supported", "best_performance"),
            "How a kernel is chosen where the policy leaves the choice.",
            what="strategies",
        ),
        default="first_supported",
    )
    tuning: Accepts[TuningPolicy, TuningPolicy | dict[str, Any]] = field(
        Nested(TuningPolicy, "How best_performance measures, and when one kernel replaces another."),
        default=TuningPolicy(),
    )

    OUTSIDE = frozenset(("auto_strategy", "tuning"))

    @property
    def preferences(self) -> dict[str, str | tuple[str, ...]]:
        """The short forms that are stated: operation to kernel, or to kernels in order.

        Frozen as the policy is: changing it raises `TypeError`; `set` and `remove` return a new policy.
        """
        return _Preferences({op: kernel for op in OPS if (kernel := getattr(self, op)) is not None})

    def get(self, op: str) -> str | tuple[str, ...] | None:
        """Return the short form for `op`, or ``None``. Raises `PolicyError` for an unknown operation."""
        kernel: str | tuple[str, ...] | None = getattr(self, _check_op(op))
        return kernel

    def set(self, op: str, kernel: str | Sequence[str]) -> KernelPolicy:
        """Return a new policy with this short form. This one stays as it is.

        Raises `PolicyError` for an unknown operation or kernel.
        """
        if kernel is None:
            raise PolicyError(
                f"KernelPolicy.{_check_op(op)}: no kernel is given; to take the key out, use remove({op!r})"
            )
        return self.replace(**{_check_op(op): kernel})

    def remove(self, op: str) -> KernelPolicy:
        """Return a new policy without this short form. This one stays as it is.

        Removing what is not set is no error. Raises `PolicyError` for an unknown operation.
        """
        return self.replace(**{_check_op(op): None})

    def choose(self, op: str, **facts: Any) -> tuple[tuple[str, ...], str]:
        """Return the kernels asked for one operation, in order, and the key that asks.

        Parameters
        ----------
        op : str
        **facts
            What is known of the operation: the keyword arguments of `RuleMatch.matches`, such as ``m=8``.

        Returns
        -------
        use : tuple of str
            Never empty; ``("auto",)`` when the policy states nothing.
        source : str
            ``"kernels.rules[0]"``, ``"kernels.matmul"``, or ``"default"``.

        Notes
        -----
        The first rule that matches and states `use` wins, then the short form. Rules that state only a precision do not
        choose a kernel; see `choose_precision`.
        """
        result = self.compiled_rules.match(CallFacts(op=_check_op(op), **facts))
        return result.use, result.source

    def choose_precision(self, op: str | None, **facts: Any) -> tuple[str | None, str]:
        """Return the precision that a rule asks for one operation, and the key that asks.

        The first rule that matches and states `precision` wins; ``(None, "default")`` when none does. `op` is
        ``None`` for operations that no kernel can be chosen for: rules by node or module name still hold for them.
        """
        if op is not None:
            _check_op(op)
        return self.compiled_rules.match_precision(CallFacts(op=op, **facts))

    def without_framework(self) -> Self:
        """Return it as a session takes it that runs without PyTorch: ``"torch"`` leaves the choice to the engine."""
        changes: dict[str, Any] = {op: _freed(kernel) for op, kernel in self.preferences.items()}
        changes["rules"] = tuple(
            rule if rule.use is None else rule.replace(use=_freed(rule.use)) for rule in self.rules
        )
        return self if all(getattr(self, name) == value for name, value in changes.items()) else self.replace(**changes)

    @functools.cached_property
    def compiled_rules(self) -> CompiledRules:
        """The rules, compiled at the first use: matches calls some of whose facts are unknown as well."""
        return CompiledRules(self.rules, self.preferences)


def _freed(kernel: str | tuple[str, ...]) -> str | tuple[str, ...]:
    names = (kernel,) if isinstance(kernel, str) else kernel
    if "torch" not in names:
        return kernel
    before = names[: names.index("torch")]
    return (*before, "auto") if before else "auto"


def _check_op(op: str) -> str:
    if op not in OPS:
        text = op if isinstance(op, str) else repr(op)
        raise PolicyError(f"{quote(text)} is not an operation of a KernelPolicy{did_you_mean(text, OPS, 'operations')}")
    return op
