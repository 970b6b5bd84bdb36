# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`RequestedKernels`: what the policies active in a block request for calls that passed no override."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from xpuruntime.policies.kernel_rules import computed_by
from xpuruntime.pytorch.call_scope import module_names
from xpuruntime.pytorch.coverage.operation_table import computed_by_operators
from xpuruntime.pytorch.dispatch.route import DEFAULT_ID, NATIVE_NAMES

if TYPE_CHECKING:
    import torch

    from xpuruntime.policies import KernelPolicy
    from xpuruntime.policies.call_facts import CallFacts
    from xpuruntime.policies.compiled_rules import Preference
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy
    from xpuruntime.pytorch.explanation.summary import Row

#: The operator in rows of what `torch.compile` made C++ of.
COMPILED = "torch.compile"
#: Operators that a sentence names.
_NAMED = 4
#: Why a product is PyTorch's own whatever a policy asks for.
NO_FLOATS = "matmul of a policy does not include products of integers and of complex numbers"
_NO_FLOATS_SEEN = " but products of integers or complex numbers, which stay PyTorch's own,"


def is_no_float(dtypes: Sequence[str]) -> bool:
    """Say whether the first type of a call is one of integers, of truth values or of complex numbers."""
    return bool(dtypes) and dtypes[0].startswith(("int", "uint", "complex", "bool"))


class RequestedKernels:
    """The policies that held at some time in a block."""

    def __init__(self) -> None:
        self._policies: dict[int, KernelPolicy] = {}
        self._active: dict[int, CompiledPolicy] = {}

    def note(self, active: CompiledPolicy | None) -> None:
        """Take note of a policy that holds."""
        if active is not None:
            self._policies.setdefault(active.number, active.policy.kernels)
            self._active.setdefault(active.number, active)

    def unmatched(self) -> tuple[str, ...]:
        """Return a sentence for each rule of a module that no call has matched."""
        return tuple(sentence for active in self._active.values() for sentence in active.rule_use.unmatched())

    def adapted(self) -> tuple[str, ...]:
        """Return a sentence for each class of models whose calls go to the kernels of these policies."""
        return tuple(dict.fromkeys(sentence for active in self._active.values() for sentence in active.adapted))

    def never_ran(self, rows: Sequence[Row], root: torch.nn.Module | None) -> tuple[str, ...]:
        """Return a sentence for each operation of which a policy names a kernel, and of which no call was seen.

        Rules that state a size, a type, a device or a phase may meet no call, which `met_no_call` says, and are no such
        request. Products of integers are no calls of matmul here. Where it cannot be seen what ran, the sentence begins
        with ``"inconclusive"`` and names what hides it.
        """
        decided = (row for row in rows if row.status != "default" or row.source != "default")
        seen = {row.op for row in decided if not (row.requested and _is_own(row.op, row.requested))}
        others = {row.op: " that this key decides" for row in rows}
        others |= {row.op: _NO_FLOATS_SEEN for row in rows if row.reason == NO_FLOATS}
        sentences: dict[str, str] = {}
        for active in self._active.values():
            kernels = active.policy.kernels
            at = active.root if root is None else root
            for op in sorted(DEFAULT_ID):
                source = next((key for key, use in _named(kernels, op) if requests_other_kernel(op, use)), None)
                if source is not None and op not in seen:
                    hidden = _hiding(rows, op)
                    sentence = _inconclusive(op, source, hidden) if hidden else ""
                    sentences.setdefault(op, sentence or _never(op, source, others.get(op, ""), at))
        return tuple(sentences.values())

    def met_no_call(self, rows: Sequence[Row]) -> tuple[str, ...]:
        """Return a sentence for each rule with a size, a type, a device or a phase that decided none of the calls."""
        sources = {row.source for row in rows}
        sentences: dict[str, None] = {}
        for kernels in self._policies.values():
            for rule in kernels.compiled_rules.rules:
                stated = rule.rule.match.stated_fields()
                if rule.use and rule.source not in sources and not stated.keys() <= {"op", "module", "node"}:
                    words = ", ".join(f"{name}: {value}" for name, value in stated.items())
                    sentences[f"{rule.source} ({words}) decided no call that was seen"] = None
        return tuple(sentences)

    def requested(self, facts: CallFacts) -> tuple[tuple[str, ...], str, bool]:
        """Return what is asked for a call, the key that asks, and whether that is sure.

        Nothing and ``"default"`` where what is asked for is what PyTorch does anyway.
        """
        for kernels in self._policies.values():
            preference, sure = request_of(kernels, facts)
            if preference is not None:
                return preference.use, preference.source, sure
        return (), "default", True

    def own_kernel(self, facts: CallFacts) -> Preference | None:
        """Return the preference that surely leaves a call to PyTorch's own kernel by name, if there is one."""
        for kernels in self._policies.values():
            result = kernels.compiled_rules.match(facts)
            first = next(iter(result.preferences), None)
            if first is not None and _is_own(str(facts.op), first.use) and result.certainty != "unknown":
                return first
        return None


def _is_own(op: str, use: Iterable[str]) -> bool:
    return {"torch", DEFAULT_ID[op]}.issuperset(use)


def _named(kernels: KernelPolicy, op: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the keys that name kernels for all calls of an operation, or for all of some modules."""
    # A rule that states no operation is for that of its kernels, where they compute a single one.
    rules = kernels.compiled_rules
    for rule in rules.rules:
        match = rule.rule.match
        ops = computed_by(rule.use) if match.op is None else {match.op}
        if ops == {op} and match.stated_fields().keys() <= {"op", "module", "node"}:
            yield rule.source, rule.use
    if op in rules.short_forms:
        yield rules.short_forms[op].source, rules.short_forms[op].use


def _hiding(rows: Sequence[Row], op: str) -> list[str]:
    fused = op not in ("matmul", "attention", "conv")  # compiled code calls the operators of these
    opaque = (row.operator for row in rows if row.status == "opaque")
    return list(dict.fromkeys(name for name in opaque if fused or name != COMPILED))


def _inconclusive(op: str, source: str, hidden: list[str]) -> str:
    names = ", ".join(hidden[:_NAMED]) + (f" and {len(hidden) - _NAMED} more" if len(hidden) > _NAMED else "")
    seen = f"{source} names a kernel for {op}, and no call of {op} was seen"
    return f"inconclusive: {seen}, but whether any ran inside {names} cannot be seen"


def _never(op: str, source: str, others: str, root: torch.nn.Module | None) -> str:
    """Return that a key asks for something of which nothing ran, and where the model has it out of reach."""
    sentence = f"{source} names a kernel for {op}, and no call of {op}{others} was seen: 0 calls obey"
    own: dict[str, int] = {}
    for part, _, _ in () if root is None else module_names.walk(root):
        by = computed_by_operators(part)
        if by is not None and by.op == op:
            own[by.reason] = own.get(by.reason, 0) + 1
    if not own:
        return sentence
    things = "attention modules" if op == "attention" else "norms"
    return f"{sentence}; 0 of {sum(own.values())} {things} are reachable, as {'; '.join(own)}"


def request_of(kernels: KernelPolicy, facts: CallFacts) -> tuple[Preference | None, bool]:
    """Return the first preference for a call that asks for more than PyTorch's own choice, and whether it is sure."""
    result = kernels.compiled_rules.match(facts)
    op = str(facts.op)
    preference = next(
        (preference for preference in result.preferences if requests_other_kernel(op, preference.use)), None
    )
    return preference, result.certainty != "unknown"


def uncertain(source: str) -> str:
    """Return that a rule depends on facts of a call that are not known."""
    return f"whether {source} matches these calls is not known"


def requests_other_kernel(op: str, kernel_names: Iterable[str]) -> bool:
    """Say whether kernel names ask for more than PyTorch's own choice."""
    return any(
        kernel_name != "auto" and NATIVE_NAMES[op].get(kernel_name) != DEFAULT_ID[op] for kernel_name in kernel_names
    )
