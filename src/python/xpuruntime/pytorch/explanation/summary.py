# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Summaries of explanations, and how they are built."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Literal, cast

import msgspec
from msgspec import structs

from xpuruntime import _core
from xpuruntime.ops.decision_log import recorded
from xpuruntime.policies.call_facts import UNKNOWN
from xpuruntime.pytorch.attention import flash_impl
from xpuruntime.pytorch.attention.sdpa_backends import BACKENDS, kernels_in
from xpuruntime.pytorch.coverage.operation_table import CUTE, FLEX, unserved_operator
from xpuruntime.pytorch.coverage.unserved import products_of_any_type, sizes_of_call
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES, facts_of_call
from xpuruntime.pytorch.explanation.attribution import AttributedTime, Called
from xpuruntime.pytorch.explanation.requested import NO_FLOATS, is_no_float, requests_other_kernel, uncertain
from xpuruntime.pytorch.explanation.timeline import MODULE
from xpuruntime.pytorch.providers.bound import bound_kernel

if TYPE_CHECKING:
    from xpuruntime.ops.decision_log import Decision
    from xpuruntime.pytorch.explanation.attribution import TimeAttribution, UnattributedCalls
    from xpuruntime.pytorch.explanation.call_recorder import RecordedCalls
    from xpuruntime.pytorch.explanation.requested import RequestedKernels

RowStatus = Literal["honoured", "substituted", "default", "bypassed", "opaque", "other"]


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Calls of one operator, from one module, on tensors of the same shapes and types, in one phase.

    Outside of training, lengths that grow from token to token or from prompt to prompt count as the same within a range
    from above one power of two up to the next.

    Attributes
    ----------
    op : str
        Operation of a `KernelPolicy`, such as ``"matmul"``; empty for what no policy can speak of.
    operator : str
        PyTorch's operator, such as ``"aten::addmm"``; of what ran without one, the kernel, ``"CUDA graph"`` or
        ``"torch.compile"``.
    module : str
        Path of the module in whose forward it ran, or whose backward it is; empty where it is not known.
    phase : str
        ``"train"``, ``"infer"``, ``"prefill"``, ``"decode"`` or ``"backward"``; empty where it is not known.
    shapes : tuple of tuple of int
        Of the tensors that it was called with; of the first call, where lengths fall into one range.
    dtypes : tuple of str
        Of these, each once.
    device : str
        Such as ``"cuda:0"``; empty where it is not known.
    requested : tuple of str
        What the policy asks for, in order; empty where it asks for nothing.
    source : str
        The key that asks, such as ``"kernels.rules[0]"``; ``"default"`` where nothing does.
    resolved : str
        The kernel that this became, ``kernel@config`` where the core settled a configuration; empty where nobody
        chose.
    observed : tuple of str
        Kernels that ran, the longest first: on CUDA those of the device, as the profiler saw them; on the CPU operators
        of PyTorch's, or the xpuruntime kernel that served the calls.
    status : {"honoured", "substituted", "default", "bypassed", "opaque", "other"}
        Under a rule, and as it asks, or by another kernel. ``"default"``: no policy asks for anything. ``"bypassed"``:
        a policy speaks of this operation, but the calls bypassed it. ``"opaque"``: it cannot be seen what ran, as in
        the replay of a CUDA graph. ``"other"``: no policy can speak of it.
    reason : str
        Why it is not ``"honoured"``, and what else one should know.
    count : int
        Calls; of ``"other"`` and of kernels without operator on a device, kernels.
    time_us : float
        All of them together, in microseconds of `Explanation.time_kind`.
    kv : str
        Of an attention outside of training, the range of the lengths of its keys and values, such as ``"33..64"``, as
        rules take it.
    kind : str
        Of ``"other"``, what it does: ``"optimizer"``, ``"gradient accumulation"``, ``"loss"``, ``"copy"`` (casts
        included), ``"elementwise"``, ``"reduction"``, ``"indexing"``, ``"embedding"``, ``"fill"``, ``"random"``,
        ``"communication"``, or on the CPU ``"view"`` and ``"dispatch"``; empty where its name does not tell.
    measured : tuple of (str, float, int or None)
        Kernels that were measured for such calls, the chosen one first: each with the microseconds of a call, and with
        the most bytes that it holds where memory was to decide. Where one kernel serves forward and gradient, both are
        of these together. Empty for attention that another kernel than PyTorch's serves.
    """

    op: str
    operator: str
    module: str
    phase: str
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    device: str
    requested: tuple[str, ...]
    source: str
    resolved: str
    observed: tuple[str, ...]
    status: RowStatus
    reason: str
    count: int
    time_us: float
    kv: str = ""
    kind: str = ""
    measured: tuple[tuple[str, float, int | None], ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @property
    def title(self) -> str:
        """The calls in a few words: operator, shapes, module, phase, range of keys and values."""
        shapes = " x ".join(str(list(shape)) for shape in self.shapes)
        where = f"in {self.module}" if self.module else ""
        kv = f"kv {self.kv}" if self.kv else ""
        return " ".join(filter(None, (self.operator, shapes, ",".join(self.dtypes), where, self.phase, kv)))


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the time, each from 0 to 1; together they are 1, or 0 where nothing was timed.

    Attributes
    ----------
    honoured, substituted : float
        Under a rule, by the kernel that it asks for, or by another.
    default : float
        Operations that a policy could speak of, and none does.
    bypassed : float
        Operations that a policy speaks of, and that bypassed it.
    opaque : float
        It cannot be seen which operations these were.
    other : float
        Operations that no policy can speak of.
    """

    honoured: float
    substituted: float
    default: float
    bypassed: float
    opaque: float
    other: float

    @property
    def rule(self) -> float:
        """Share of the time that ran under a rule, `honoured` and `substituted`."""
        return self.honoured + self.substituted

    @property
    def covered(self) -> float:
        """Of the time in which a policy could have had a say, the share that ran as one asks; 0 where there is none."""
        reach = self.rule + self.default + self.bypassed + self.opaque
        return self.honoured / reach if reach else 0.0

    @classmethod
    def of(cls, rows: tuple[Row, ...]) -> Coverage:
        """Return the shares of some rows."""
        total = sum(row.time_us for row in rows)
        shares = dict.fromkeys(cls.__struct_fields__, 0.0)
        for row in rows:
            shares[row.status] += row.time_us / total if total else 0.0
        return cls(**shares)


_OPAQUE = {
    "replay": "the replay of a CUDA graph shows its kernels by name alone; what was chosen was chosen at the capture",
    "compiled": "torch.compile made C++ of it, in which operations cannot be distinguished; norms may be among them",
    "unknown": "it is code of another package, and the table of operations does not say what it computes",
    "elsewhere": "it was launched in a thread that PyTorch's profiler does not record",
}
_BY_NAME = "the kernel was called by its name, as by code that torch.compile made for this policy"
_FOLLOWS = "PyTorch's gradient of attention runs by the kernel of its forward"
#: Operators that make or view tensors; they are not what a call is about.
_MINOR = frozenset(
    f"aten::{name}" for name in ("empty", "as_strided", "view", "detach", "t", "transpose", "reshape", "resolve_conj")
)


def build_rows(
    kinds: Sequence[RecordedCalls],
    attribution: TimeAttribution,
    decisions: Sequence[Decision],
    asking: RequestedKernels,
) -> tuple[Row, ...]:
    """Return the rows, those that took longest first."""
    rows = [
        _of_calls(kinds[key.kind], key, share, attribution.kind, decisions) for key, share in attribution.calls.items()
    ]
    rows += _unwatched(kinds, attribution, decisions)
    rows += [_of_rest(key, share, attribution.kind, asking) for key, share in attribution.rest.items()]
    return tuple(sorted(rows, key=lambda row: -row.time_us))


def decision_of(seen: RecordedCalls, decisions: Sequence[Decision]) -> Decision | None:
    """Return what the core decided for calls of one kind; ``None`` where PyTorch's own kernel served them."""
    if seen.native:
        return None
    fitting = [decision for decision in decisions if _is_of(decision, seen)]
    exact = next((choice for choice in fitting if _fits(choice, seen)), None)
    if exact is None and seen.site is not None:  # the log keeps so many, and where the calls come from some more
        exact = next((choice for choice in recorded(seen.site) if _is_of(choice, seen) and _fits(choice, seen)), None)
    return next(iter(fitting), None) if exact is None else exact


def _is_of(decision: Decision, seen: RecordedCalls) -> bool:
    return (
        decision.asked_by == seen.source
        and decision.asked == (seen.kernel,)
        and decision.op.startswith(seen.op)
        and decision.dtype in seen.dtypes
    )


def _fits(decision: Decision, seen: RecordedCalls) -> bool:
    if decision.module and decision.module != seen.module:
        return False
    shapes = list(seen.shapes)
    inputs = [tuple(shape) for name, shape in decision.shapes.items() if name in ("a", "b", "q", "k", "v", "x")]
    return bool(inputs) and all(shape in shapes for shape in inputs)


def _dropped() -> str:
    dropped = _core.Dispatcher.instance().dropped_decisions
    if not dropped:
        return "the dispatcher keeps no decision of these calls: it was cleared, or a kernel of a package serves them"
    return f"{dropped} decisions are not in the log, which is full; clear_decisions() empties it"


def _unwatched(
    kinds: Sequence[RecordedCalls], attribution: TimeAttribution, decisions: Sequence[Decision]
) -> list[Row]:
    """Return rows for calls of which the profiler saw nothing."""
    timed: dict[int, int] = {}
    for key, share in attribution.calls.items():
        timed[key.kind] = timed.get(key.kind, 0) + share.count
    rows = []
    for seen in kinds:
        share = AttributedTime()
        share.count = seen.count - timed.get(seen.number, 0)
        if share.count > 0:
            key = Called(seen.number, "", seen.module, seen.phase, seen.shapes, seen.dtypes)
            row = _of_calls(seen, key, share, attribution.kind, decisions)
            reason = "; ".join(filter(None, (row.reason, "ran in a thread that PyTorch's profiler does not record")))
            rows.append(structs.replace(row, reason=reason))
    return rows


def _of_calls(seen: RecordedCalls, key: Called, share: AttributedTime, kind: str, decisions: Sequence[Decision]) -> Row:
    decision = decision_of(seen, decisions)
    status, reason = _status(seen, share)
    notes = [reason] if reason else []
    observed = _observed(share)
    if decision is not None:
        notes += decision.notes
        if kind == "cpu":
            observed = (decision.kernel,)
    elif not seen.native and kind == "cpu":
        observed = ()
        notes.append(f"unobservable: {_dropped()}")
    return Row(
        op=seen.op,
        operator=key.operator or seen.operator,
        module=key.module,
        phase=key.phase,
        shapes=key.shapes,
        dtypes=key.dtypes,
        device=seen.device,
        requested=seen.asked,
        source=seen.source,
        resolved=seen.kernel if decision is None else decision.kernel,
        observed=observed,
        status=status,
        reason="; ".join(notes),
        count=min(share.count, seen.count),
        time_us=share.ns / 1000,
        kv=seen.kv,
        measured=seen.measured,
    )


def _status(seen: RecordedCalls, share: AttributedTime) -> tuple[RowStatus, str]:
    status = cast("RowStatus", seen.status)
    if status == "honoured" and seen.native and seen.kernel in BACKENDS:
        ran = kernels_in(share.leaves)
        if ran and seen.kernel not in ran.values():
            return "substituted", f"PyTorch ran {', '.join(sorted(ran))}"
    if seen.by_switch:
        return status, "set by a switch of PyTorch's for all calls"
    return status, seen.reason


#: Operators of PyTorch, modules that spell an operation out by them, and nodes of its C++ autograd.
_OF_PYTORCH = re.compile(r"^(aten|nn)::|Backward\d+$")


def _of_rest(key: UnattributedCalls, share: AttributedTime, kind: str, asking: RequestedKernels) -> Row:
    status: RowStatus = "other"
    reason = ""
    requested: tuple[str, ...] = ()
    source, resolved = "default", ""
    if key.what == "uncovered":
        status = "default"
        unserved = unserved_operator(key.operator) == key.op
        facts = facts_of_call(
            key.op,
            device="cpu" if kind == "cpu" else "cuda",
            dtype=key.dtypes[0] if key.dtypes else None,
            phase=key.phase or UNKNOWN,
            module=key.module,
        )
        sizes: dict[str, Any] = dict((sizes_of_call(key.op, key.shapes) if unserved else None) or ())
        facts = facts._replace(**sizes)
        if not key.module:  # the profiler names none: it is not known whether there is one
            facts = facts._replace(module=UNKNOWN, node=UNKNOWN)
        left = products_of_any_type(key.operator) and is_no_float(key.dtypes)
        requested, source, sure = ((), "default", True) if left else asking.requested(facts)
        follows = _follows(key)
        chosen = _of_flex(key, requested)
        if chosen is not None:
            requested, source, resolved, status, reason = chosen
        elif traced := _traced(key, requested):
            status, resolved, reason = "honoured", traced, _BY_NAME
        elif requested and follows:
            kept = any(NATIVE_NAMES[key.op].get(kernel_name) == follows for kernel_name in requested)
            status, resolved, reason = ("honoured" if kept else "substituted"), follows, _FOLLOWS
        elif _is_kept(key, requested):
            status, resolved, reason = "honoured", _kernel_of(key), _BY_NAME
        elif left:
            reason = NO_FLOATS
        elif sure and unserved and any(not requests_other_kernel(key.op, (kernel_name,)) for kernel_name in requested):
            status, resolved, reason = "honoured", _kernel_of(key), key.reason
        elif requested:
            status = "bypassed"
            reason = key.reason if sure else f"{key.reason}; {uncertain(source)}"
        elif _OF_PYTORCH.search(key.operator) and (own := asking.own_kernel(facts)) is not None:
            requested, source = own
            status, resolved = "honoured", DEFAULT_ID[key.op]
    elif key.what != "other":
        status = "opaque"
        reason = _OPAQUE[key.what]
    return Row(
        op=key.op,
        operator=key.operator,
        module=key.module,
        phase=key.phase,
        shapes=key.shapes,
        dtypes=key.dtypes,
        device="cpu" if kind == "cpu" else "",
        requested=requested,
        source=source,
        resolved=resolved,
        observed=_observed(share),
        status=status,
        reason=reason,
        count=share.count,
        time_us=share.ns / 1000,
        kind=key.kind,
    )


def _of_flex(
    key: UnattributedCalls, requested: tuple[str, ...]
) -> tuple[tuple[str, ...], str, str, RowStatus, str] | None:
    # Return requested, source, resolved, status and reason of a kernel of flex_attention, from when it was compiled.
    # ``None``: it is none, or nothing was chosen for it.
    choices = flash_impl.choices(key.module) if key.reason in (FLEX, CUTE) else ()
    if key.reason == CUTE and not any(choice.kernel == "torch.flex_flash" for choice in choices):
        return None
    if not choices:
        return None
    kernels = tuple(dict.fromkeys(choice.kernel for choice in choices))
    first = choices[0]
    if len(choices) == 1 or all(choice[:4] == first[:4] for choice in choices):
        why = f"chosen when it was compiled; {first.reason}" if first.reason else "chosen when it was compiled"
        stated_names = () if first.status == "default" else first.asked
        return stated_names, first.source, first.kernel, cast("RowStatus", first.status), why
    if all(choice.status == first.status and choice.source == first.source for choice in choices) and len(kernels) == 1:
        return first.asked, first.source, first.kernel, cast("RowStatus", first.status), "chosen when it was compiled"
    kernel_list = " and ".join(kernels)
    why = f"compiled code was given {kernel_list} for flex_attention, "
    why += "and the name of this kernel does not show which it is"
    return requested, first.source, "", "opaque", why


def _follows(key: UnattributedCalls) -> str:
    return _kernel_of(key) if key.operator.endswith("_backward") else ""


def _traced(key: UnattributedCalls, requested: tuple[str, ...]) -> str:
    """Return the kernel that is asked for of which compiled code has the operators themselves; empty: none is."""
    # Its calls have a mask, so that PyTorch's own by the same operator are told apart.
    tensors = 7 if key.operator.endswith("_backward") else 4
    for word in requested if key.op == "attention" and len(key.shapes) >= tensors else ():
        bound = bound_kernel(word, key.op)
        patterns = bound.kernel.operators if bound is not None and bound.kernel.traceable else ()
        if bound is not None and any(fnmatchcase(key.operator, pattern) for pattern in patterns):
            return bound.kernel.id
    return ""


def _is_kept(key: UnattributedCalls, requested: tuple[str, ...]) -> bool:
    """Say whether a kernel of PyTorch's attention ran that is asked for, though nothing was decided at the call."""
    ran = _kernel_of(key)
    return bool(ran) and any(NATIVE_NAMES[key.op].get(kernel_name) == ran for kernel_name in requested)


def _kernel_of(key: UnattributedCalls) -> str:
    return kernels_in((key.operator,)).get(key.operator, "") if key.op == "attention" else ""


def _observed(share: AttributedTime) -> tuple[str, ...]:
    ran = (name for name in share.kernels if not name.startswith(MODULE))
    names = sorted(ran, key=lambda name: -share.kernels[name])
    return tuple(name for name in names if name not in _MINOR) or tuple(names)
