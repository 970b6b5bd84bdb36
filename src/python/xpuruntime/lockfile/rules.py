# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rules of a lock: its calls as rules of a kernel policy, each with one kernel and its configuration."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable
from typing import Any

import msgspec

from xpuruntime.errors import LockError, PolicyError
from xpuruntime.lockfile.records import CallEntry, LockedPolicy
from xpuruntime.policies import Policy, TuningPolicy
from xpuruntime.policies.kernel_rules import OPS, KernelRule, RuleMatch
from xpuruntime.policies.kinds import in_folder, seen_from

#: Keys of files and folders, which are of one machine: no lock holds a plan to them.
PLACES = frozenset(("execution.lock", "execution.artifacts.cache", "calibration.path"))
_GLOB = re.compile(r"[*?\[]")
#: Operation of a call, such as a gradient, to the one that a policy names.
_OP = re.compile(r"_(backward|gradient|input_gradient|weight_gradient)$")


def rules_of_calls(calls: Iterable[CallEntry]) -> tuple[KernelRule, ...]:
    """Return one rule for each call: by node, module, phase, type and sizes, as far as the lock knows them."""
    return tuple(KernelRule(match=RuleMatch(**_match(call)), use=call.kernel) for call in calls)


def _match(entry: CallEntry) -> dict[str, Any]:
    match: dict[str, Any] = {}
    if (op := _OP.sub("", entry.op)) in OPS:
        match["op"] = op
    if entry.node:
        match["node"] = _literal(entry.node)
        return match
    if entry.dtype:
        match["dtype"] = entry.dtype
    if entry.module:
        match["module"] = _literal(entry.module)
    if entry.phase:
        match["phase"] = entry.phase
    return {**match, **entry.facts}


def _literal(name: str) -> str:
    return _GLOB.sub(lambda mark: f"[{mark[0]}]", name)


def without_lock(policy: Policy) -> Policy:
    """Return a policy without ``execution.lock``, which names a lock of the rest."""
    return policy if policy.execution.lock is None else policy.replace(execution=policy.execution.replace(lock=None))


def policy_record(policy: Policy, folder: str = "") -> LockedPolicy:
    """Return the record of a policy; its digest is of what it asks of a run, not of how that is verified.

    Paths below `folder`, that of the lock's file, are recorded relative to it; see `policy_of`.
    """
    policy = without_lock(policy)
    keys = {key: value for key, value in _without_places(policy).to_dict().items() if key != "verify"}
    if "calibration" in keys:
        keys["calibration"] = {key: value for key, value in keys["calibration"].items() if key != "path"}
    digest = hashlib.sha256(msgspec.json.encode(keys, order="sorted")).hexdigest()
    document = policy.relocated(seen_from(folder)).to_dict()
    return LockedPolicy(sha256=digest, stated=stated_keys(policy), document=document)


def policy_of(record: LockedPolicy, where: str | os.PathLike[str]) -> Policy:
    """Return the policy of a lock; `where` is the lock's file, to whose folder the paths in it are relative."""
    try:
        policy = Policy.coerce(record.document)
    except PolicyError as error:
        raise LockError(
            f"the policy in the lock {os.fspath(where)} is none: {error.reason}",
            fix="restore it, or make it again with `xrt lock MODEL -p POLICY`",
        ) from error
    return policy.relocated(in_folder(os.path.dirname(where)))  # noqa: PTH120 - of any text


def stated_keys(policy: Policy) -> dict[str, str]:
    """Return every key by which a policy asks something of a run, with its value as a policy file has it."""
    stated = _without_places(without_lock(policy)).stated()
    return {
        key: _text(value)
        for key, value in sorted(stated.items())
        if not key.startswith("verify") and key != "calibration.path"
    }


def _without_places(policy: Policy) -> Policy:
    """Return a policy whose folders and files are one: where they are is of one machine."""
    return policy.relocated(lambda _: "./")


def _text(value: Any) -> str:
    plain = value.to_plain() if hasattr(value, "to_plain") else value
    return plain if isinstance(plain, str) else msgspec.json.encode(plain, order="sorted").decode()


def locked_policy(policy: Policy, engine: str, device: str, calls: Iterable[CallEntry]) -> Policy:
    """Return the policy that a lock runs under: its engine and device, no fallback, its calls as first rules."""
    kernels = policy.kernels
    rules = kernels.rules
    if kernels.auto_strategy == "best_performance":
        # What was measured is a rule by now; a node without one is served by the engine, and stays so.
        kernels = kernels.replace(
            auto_strategy="first_supported",
            tuning=TuningPolicy(),
            **{op: _without_auto(getattr(kernels, op)) for op in OPS},
        )
        stated = ((rule, _without_auto(rule.use)) for rule in rules)
        rules = tuple(rule.replace(use=use) for rule, use in stated if use or rule.precision is not None)
    return policy.replace(
        execution=policy.execution.replace(engine=engine, device=device, fallback="error", lock=None),
        kernels=kernels.replace(rules=(*rules_of_calls(calls), *rules)),
    )


def _without_auto(use: str | tuple[str, ...] | None) -> str | tuple[str, ...] | None:
    """Return the kernels that are named, without the choice that was left at the end."""
    named = tuple(kernel for kernel in ((use,) if isinstance(use, str) else use or ()) if kernel != "auto")
    return named or None
