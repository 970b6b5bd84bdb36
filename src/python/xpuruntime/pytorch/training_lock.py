# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training locks: the kernels of a step, by operation, sizes, type, phase and module, as rules that replay them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from xpuruntime.argument_types import FLAG, TEXT, check_types
from xpuruntime.errors import InputError, LockError
from xpuruntime.files.paths import kind_of, user_path
from xpuruntime.lockfile.canonical import load_lock, save_lock
from xpuruntime.lockfile.differences import compare_identities
from xpuruntime.lockfile.drift import ValidatorKind, drift_error, lacking
from xpuruntime.lockfile.records import CallEntry, Identity, Lock, Provenance
from xpuruntime.lockfile.rules import policy_record, rules_of_calls, stated_keys, without_lock
from xpuruntime.lockfile.validators import Surroundings, collect_validators, compare_validators
from xpuruntime.policies import Policy
from xpuruntime.pytorch.call_scope.generation_calls import LockedGeneration
from xpuruntime.pytorch.explanation.explanation import Explanation, other_model
from xpuruntime.pytorch.explanation.requested import COMPILED
from xpuruntime.runtime.machine import EngineFacts
from xpuruntime.runtime.snapshot import machine_snapshot

if TYPE_CHECKING:
    import os

    from xpuruntime.lockfile.records import Validator
    from xpuruntime.pytorch.explanation.summary import Row

#: Operators whose sizes follow from the shapes of two matrices.
_PRODUCTS = ("aten::mm", "aten::mm.out", "aten::addmm", "aten::addmm.out")
_MATRIX = 2
_RELOCK = "`xpuruntime.pytorch.lock(found, path, upgrade=True)` with what `explain()` finds"


def lock(
    found: Explanation,
    path: str | os.PathLike[str] | None = None,
    *,
    upgrade: bool = False,
    note: str = "",
    tokenizer: Any = None,
) -> Lock:
    """Return a lock of the kernels that a step ran, and write it.

    Calls that no policy asks for are not in it. Where the file is there and the step ran as it has it, the file is left
    as it is. Of models of transformers that generated, `Explanation.generation` is in it, and neither how many tokens
    nor the prompt.

    Parameters
    ----------
    found : Explanation
        Of `explain`, around one step under a policy, after its ``with`` block.
    path : str or path, optional
        The file; default: none is written.
    upgrade : bool
        Replace a lock that is there and does not hold.
    note : str
        Kept in the lock.
    tokenizer : object, optional
        A tokenizer of transformers: the lock has digests of it and of its chat template.

    Raises
    ------
    LockError
        The lock that is there does not hold; or calls that a rule cannot tell apart ran different kernels.
    InputError
        Nothing was run under a policy, or the file cannot be read or written.

    Examples
    --------
    >>> import tempfile, torch, xpuruntime.pytorch as xrt_torch
    >>> path = tempfile.mkdtemp() + "/step.lock"
    >>> with xrt_torch.kernel_policy(matmul="cpu.blas"), xrt_torch.explain() as found:
    ...     product = torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    >>> made = xrt_torch.lock(found, path)
    >>> with xrt_torch.kernel_policy(lock=path):
    ...     again = torch.mm(torch.ones(2, 3), torch.ones(3, 2))
    """
    if not isinstance(found, Explanation):
        msg = f"found is a {type(found).__name__}: give what `with explain() as found` gives"
        raise TypeError(msg)
    check_types({"upgrade": FLAG, "note": TEXT}, {"upgrade": upgrade, "note": note})
    target = None if path is None else user_path(path, "the lock")
    old = load_lock(target) if target is not None and kind_of(target) == "file" else None
    if old is not None and not upgrade:
        return check_locked(found, old, str(target), tokenizer)
    new_lock = _lock_of(found, note, old, tokenizer)
    if target is None or (old is not None and not compare_identities(old.identity, new_lock.identity)):
        return new_lock if old is None else old
    save_lock(new_lock, target)
    return new_lock


def check_locked(explanation: Explanation, old: Lock, where: str, tokenizer: Any = None) -> Lock:
    """Return a lock that a step ran as. Raises `LockError` where it ran otherwise."""
    model = old.provenance.facts.get("model", "")
    if other := other_model(where, model, explanation.model):
        raise LockError(other, fix=_RELOCK)
    compared = compare_identities(old.identity, _lock_of(explanation, "", old, tokenizer).identity)
    drifts = [drift for drift in compared if not lacking(drift)]
    if drifts:
        raise drift_error(where, drifts, take=_RELOCK)
    return old


def _lock_of(explanation: Explanation, note: str, old: Lock | None, tokenizer: Any) -> Lock:
    if explanation.policy is None:
        raise InputError(
            "no policy held when explain() was entered, so there are no kernels to lock. Fix: enter it inside of "
            "kernel_policy(...)"
        )
    policy = without_lock(Policy.coerce(explanation.policy))
    if old is not None and old.identity.subject == "training" and old.identity.policy is not None:
        replayed = _replayed(old.identity, Policy.coerce(old.identity.policy.document))
        if policy_record(policy) == policy_record(replayed):  # the step ran under the lock
            policy = Policy.coerce(old.identity.policy.document)
    rows = [row for row in explanation.rows if row.op and row.resolved and row.source != "default"]
    if not rows:
        raise InputError(
            "no call of the step is one that its policy asks for: there is nothing to lock. Fix: state kernels for the "
            "operations that the step has"
        )
    device = next((row.device for row in rows if row.device.startswith("cuda")), rows[0].device or "cpu")
    facts = {(ValidatorKind.GENERATION, model): facts for model, facts in explanation.generation.items()}
    if tokenizer is not None:
        facts[ValidatorKind.TOKENIZER, "tokenizer"] = _digests_of(tokenizer)
    here = _surroundings(device, policy, compiled=any(map(_is_compiled, explanation.rows)), facts=facts)
    validators = collect_validators(here, kernels=[row.resolved for row in rows])
    if old is not None:
        validators = _named_as_in(old, validators)
    ids = tuple(sorted(validator.id for validator in validators))
    return Lock.of(
        Identity(
            subject="training",
            policy=policy_record(policy),
            validators=validators,
            calls=_calls(rows, ids),
        ),
        provenance=msgspec.structs.replace(
            Provenance.now("xpuruntime.pytorch.lock", note=note),
            facts={"model": explanation.model} if explanation.model else {},
        ),
    )


def _named_as_in(old: Lock, validators: tuple[Validator, ...]) -> tuple[Validator, ...]:
    """Name a CUDA device as a lock does, which another rank may have made on a device of another number."""
    locked = next((validator for validator in old.identity.validators if validator.kind == ValidatorKind.DEVICE), None)
    if locked is None or not locked.key.startswith("cuda"):
        return validators
    return tuple(
        msgspec.structs.replace(validator, id=locked.id, key=locked.key)
        if validator.kind == ValidatorKind.DEVICE and validator.key.startswith("cuda")
        else validator
        for validator in validators
    )


def _calls(rows: list[Row], ids: tuple[str, ...]) -> tuple[CallEntry, ...]:
    """Return one entry for each kind of calls that a rule can tell apart; those with a module first."""
    entries: dict[tuple[Any, ...], CallEntry] = {}
    by_range = _kernels_differ(rows)
    for row in rows:
        entry = CallEntry(
            op=row.op,
            dtype=row.dtypes[0] if len(row.dtypes) == 1 else "",
            facts={**_sizes(row), **({"kv": row.kv} if _place(row) in by_range else {})},
            phase=row.phase,
            module=row.module,
            kernel=row.resolved,
            depends_on=ids,
        )
        key = (not entry.module, entry.module, entry.op, entry.phase, entry.dtype, tuple(sorted(entry.facts.items())))
        other = entries.get(key)
        if other is None:
            entries[key] = entry
        elif other.kernel != entry.kernel:
            raise LockError(
                f"cannot lock {entry.name}: calls that a rule cannot tell apart ran {other.kernel} and {entry.kernel}. "
                "Fix: call them from modules of their own, or state one kernel for them in kernels.rules"
            )
    return tuple(entries[key] for key in sorted(entries))


def _kernels_differ(rows: list[Row]) -> set[tuple[str, ...]]:
    """Return which attentions run by another kernel at other lengths of keys and values: those are locked by range."""
    kernels: dict[tuple[str, ...], set[str]] = {}
    for row in rows:
        if row.kv:
            kernels.setdefault(_place(row), set()).add(row.resolved)
    return {key for key, names in kernels.items() if len(names) > 1}


def _place(row: Row) -> tuple[str, ...]:
    return row.op, row.module, row.phase, *row.dtypes


def _sizes(row: Row) -> dict[str, int | str]:
    # Return ``m``, ``n`` and ``k`` of a product of two matrices, of a prefill without ``m``; of other calls nothing.
    # How many tokens there are to begin with is no property of what computes them.
    matrices = [shape for shape in row.shapes if len(shape) == _MATRIX]
    if row.op != "matmul" or row.operator not in _PRODUCTS or len(matrices) < _MATRIX:
        return {}
    (m, k), (inner, n) = matrices[-2:]
    if inner != k:
        return {}
    return {"n": n, "k": k} if row.phase == "prefill" else {"m": m, "n": n, "k": k}


def _is_compiled(row: Row) -> bool:
    names = (row.operator, *row.observed)
    return row.operator == COMPILED or any(name.startswith("triton_") or "cpp_fused_" in name for name in names)


def _digests_of(tokenizer: Any) -> dict[str, str]:
    if not hasattr(tokenizer, "get_vocab"):
        msg = f"tokenizer is a {type(tokenizer).__name__}: give a tokenizer of transformers"
        raise TypeError(msg)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    parts = {
        "vocabulary": sorted(tokenizer.get_vocab().items()) if backend is None else backend.to_str(),
        "special_tokens": tokenizer.special_tokens_map,
        "chat_template": getattr(tokenizer, "chat_template", None),
    }
    texts = {name: json.dumps(part, sort_keys=True, default=str) for name, part in parts.items() if part}
    digests = {name: "sha256:" + hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    return {"class": type(tokenizer).__name__, **digests}


def _surroundings(
    device: str, policy: Policy, *, compiled: bool = False, facts: Mapping[tuple[ValidatorKind, str], Any] | None = None
) -> Surroundings:
    engine = EngineFacts(name="torch", version=str(torch.__version__), loadable=True)
    return Surroundings(
        engine="torch",
        device=device,
        machine=machine_snapshot().with_engines({"torch": engine}),
        policy=stated_keys(policy),
        settings={"mode": "compile"} if compiled else {},
        facts=facts or {},
    )


def policy_of_lock(lock: Lock | str | os.PathLike[str]) -> tuple[Policy, LockedGeneration]:
    """Return the policy that replays a training lock, once its validators hold: its calls are the first rules.

    Beside it what the lock expects of models that generate, which is compared when they do, and the model it is of.
    """
    where = lock.digest if isinstance(lock, Lock) else str(user_path(lock, "the lock"))
    loaded = lock if isinstance(lock, Lock) else load_lock(where)
    identity = loaded.identity
    if identity.subject != "training" or identity.policy is None:
        raise LockError(
            f"{where} is a lock of {identity.subject}, and a policy on PyTorch needs one of training. Fix: make one "
            "with `xpuruntime.pytorch.lock`"
        )
    policy = Policy.coerce(identity.policy.document)
    device = next((validator.key for validator in identity.validators if validator.kind == "device"), "cpu")
    drifts = compare_validators(identity, _surroundings(device, policy))
    if drifts:
        raise drift_error(where, drifts, take=_RELOCK)
    expected = {
        validator.key: validator.expect
        for validator in identity.validators
        if validator.kind == ValidatorKind.GENERATION
    }
    generation = LockedGeneration(where, expected, _RELOCK, loaded.provenance.facts.get("model", ""))
    return _replayed(identity, policy), generation


def _replayed(identity: Identity, policy: Policy) -> Policy:
    kernels = policy.kernels
    return policy.replace(kernels=kernels.replace(rules=(*rules_of_calls(identity.calls), *kernels.rules)))
