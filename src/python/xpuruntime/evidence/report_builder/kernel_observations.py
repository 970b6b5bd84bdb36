# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Observations of kernels: those that a policy prefers, compared with those that ran."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.evidence.records import Control, Status, Unit

__all__ = ["observe_kernels"]

#: Words in an engine's operator name by which a policy key finds its units.
_FAMILIES = {
    "matmul": ("matmul", "gemm"),
    "attention": ("attention", "sdpa"),
    "layer_norm": ("layernorm", "layernormalization"),
    "rms_norm": ("rmsnorm", "rmsnormalization", "simplifiedlayernorm"),
    "conv": ("conv",),
}


def observe_kernels(control: Control, effective: Mapping[str, str], units: Sequence[Unit]) -> tuple[str, Status, str]:
    """Compare one ``kernels.*`` key with the units that ran."""
    family = control.key.removeprefix("kernels.")
    words = _FAMILIES.get(family)
    concerned = list(units) if words is None else [u for u in units if any(w in _flat(u.op) for w in words)]
    if words is not None and not concerned and control.enforceability != "unsupported" and control.resolved == "-":
        return "-", "unobservable", control.reason
    wanted = [_flat(w.rpartition(".")[2]) for w in re.split(r"[,\s\[\]()'\"]+", control.requested) if w]
    if control.key in effective and (words is None or all(u.kernel is None for u in concerned)):
        value = effective[control.key]
        if value in (control.resolved, control.requested) or {_flat(v) for v in value.split(",")} <= set(wanted):
            return value, "honoured", "read back from the engine"
        return value, "substituted", "the engine reads back another value"
    if words is None and control.key == "kernels.auto_strategy":
        return "-", "unobservable", "a way of choosing leaves no trace of its own"
    if not concerned:
        return "-", "unobservable", f"no {family} unit ran: the engine may have run it as other operators"
    if words is None:
        # Which units a rule concerns is for the engine to say: it puts the answer in `effective`.
        return "-", "unobservable", "the engine does not say which units this rule reached"
    silent = [u for u in concerned if u.kernel is None or u.kernel_source == "unknown"]
    if len(silent) == len(concerned):
        set_as = "" if control.resolved in ("", "-") else f" ({control.resolved} was set)"
        return (
            f"kernel unknown in {len(silent)} units",
            "unobservable",
            f"{concerned[0].engine} does not report which kernel ran{set_as}",
        )
    ran = sorted({u.kernel for u in concerned if u.kernel})
    other = [u for u in concerned if u.kernel and not any(w in _flat(u.kernel) for w in wanted)]
    observed = ", ".join(ran)
    if other:
        return (
            observed,
            "substituted",
            f"{len(other)} of {len(concerned)} units ran another kernel, such as {other[0].kernel}",
        )
    if silent:
        return observed, "unobservable", f"{len(silent)} of {len(concerned)} units do not report their kernel"
    guessed = any(u.kernel_source == "inferred" for u in concerned)
    if guessed:
        return observed, "unobservable", "the kernel was inferred from its surroundings, not reported"
    return observed, "honoured", f"all {len(concerned)} units ran it"


def _flat(text: str) -> str:
    return re.sub(r"[^a-z0-9]", "", text.lower())
