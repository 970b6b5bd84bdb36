# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Policy embedded in a model file, and the lock that it was exported with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.errors import LockError, ModelError, PolicyError
from xpuruntime.evidence.metadata import (
    LOCK_KEY,
    OP_OF_NODE,
    OP_OF_TORCH,
    POLICY_KEY,
    module_of_node,
    read_policy,
)

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.evidence.records import Unit
    from xpuruntime.lockfile.canonical import ExportLock
    from xpuruntime.planning import Plan
    from xpuruntime.policies import Policy

#: Kernels that a note names.
_NAMED = 4


def carries_policy(info: ModelInfo) -> bool:
    """Say whether a model has a policy of its own."""
    return POLICY_KEY in info.metadata or any(node.kernels for node in info.nodes)


def carried_policy(info: ModelInfo) -> tuple[Policy | None, list[str]]:
    """Return the policy that a model carries, and notes on what is left out of it."""
    marks = [(node.name, node.op, node.kernels) for node in info.nodes if node.kernels]
    try:
        policy = read_policy(info.metadata.get(POLICY_KEY), marks, POLICY_KEY)
    except PolicyError as error:
        fix = "export it again, or state a policy, which then holds instead"
        raise ModelError(
            f"cannot use the model {info.path!r}: the policy that it carries: {error}. Fix: {fix}."
        ) from None
    return _without_places(policy)


def _without_places(policy: Policy | None) -> tuple[Policy | None, list[str]]:
    """Return a model's policy without folders and files: where they are is not for a model to say."""
    if policy is None:
        return None, []
    execution, why = policy.execution, "is left out: a model does not say where files are read or written"
    notes = []
    if execution.artifacts.cache not in ("off", "default"):
        notes.append(f"execution.artifacts.cache of the model's own policy {why}")
        execution = execution.replace(artifacts=execution.artifacts.replace(cache="off"))
    options: dict[str, dict[str, Any]] = {}
    for engine, option in execution.provider_options.items():
        for name, value in option.items():
            if isinstance(value, str) and ("/" in value or "\\" in value):
                notes.append(f"execution.provider_options.{engine}.{name} of the model's own policy {why}")
            else:
                options.setdefault(engine, {})[name] = value
    if notes:
        execution = execution.replace(provider_options=options)
    return policy.replace(execution=execution), notes


def check_export_lock(info: ModelInfo, plan: Plan) -> Plan:
    """Return the plan with what the model's lock and the plan disagree on."""
    text = info.metadata.get(LOCK_KEY)
    if text is None:
        return plan
    from xpuruntime.lockfile.canonical import ExportLock

    warnings: list[str] = []
    notes: list[str] = []
    try:
        lock = ExportLock.from_json(text, info.path)
        notes.append(f"exported by torch {lock.torch}, {lock.exporter}, on {_place(lock)}")
        if info.weights_digest is None:
            notes.append("the lock was not compared with the weights: they are in other files")
        elif info.weights_digest != lock.weights:
            msg = (
                f"{info.path} has other weights than those that were exported, so what was shown of the exported model "
                "is not shown of it. Fix: export it again"
            )
            raise LockError(msg)
    except LockError as error:
        if plan.mode == "strict":
            raise
        warnings.append(str(error))
    return msgspec.structs.replace(plan, warnings=(*plan.warnings, *warnings), notes=(*plan.notes, *notes))


def _place(lock: ExportLock) -> str:
    return f"{lock.device} ({lock.device_name}, {lock.arch})" if lock.arch else lock.device


def compare_kernels(info: ModelInfo, plan: Plan, arch: str | None, units: Sequence[Unit]) -> tuple[str, ...]:
    """Return notes on kernels that ran here and others that the model's lock has."""
    from xpuruntime.lockfile.canonical import ExportLock

    try:
        lock = ExportLock.from_json(info.metadata[LOCK_KEY], info.path)
    except (KeyError, LockError):  # nothing to compare with; the plan has said so
        return ()
    if not lock.kernels:
        return ()
    if plan.device.partition(":")[0] != lock.device.partition(":")[0] or (lock.arch or None) != arch:
        return (f"the kernels in the lock are of {_place(lock)}, and are not compared with those of {plan.device}",)
    operators = {node.name: node.op for node in info.nodes}
    others: dict[str, int] = {}
    compared = 0
    for unit in units:
        node = next((name for name in unit.source_nodes if _operation(operators.get(name, "")) is not None), None)
        if node is None or unit.kernel is None or unit.kernel_source != "reported":
            continue
        op = _operation(operators[node])
        rows = [kernel for kernel in lock.kernels if kernel.op == op and kernel.module in ("", module_of_node(node))]
        if not rows:
            continue
        compared += 1
        known = {row.kernel.partition("@")[0] for row in rows}
        ran = {kernel.strip().partition("@")[0] for kernel in unit.kernel.split(", ")}
        if not ran & known:
            text = f"{node} ({op}) ran {unit.kernel}, and the lock has {', '.join(sorted(known))}"
            others[text] = others.get(text, 0) + 1
    if not others:
        return (f"{compared} units ran the kernels that the lock has for their operation",) if compared else ()
    shown = list(others)[:_NAMED]
    tail = f"; and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
    return (f"other kernels than in the lock: {'; '.join(shown)}{tail}",)


def _operation(operator: str) -> str | None:
    return OP_OF_NODE.get(operator) or OP_OF_TORCH.get(operator.rpartition(".")[2])
