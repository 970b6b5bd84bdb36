# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records of kernel tuning: what a tuner in Python measured, kept in the cache that the core's tuner uses too."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from xpuruntime import _core
from xpuruntime.errors import InputError, warn
from xpuruntime.measuring.rounds import PROTOCOL, KernelTiming, Replacement
from xpuruntime.ops.call_context import prepare
from xpuruntime.ops.tuning_cache import (
    BACKEND_LIBRARIES,
    TuningCache,
    core_build,
    mapped_builds,
    tuning_path,
    use_tuning_cache,
)
from xpuruntime.policies import TuningPolicy
from xpuruntime.policies.kernel_rules import ARRAY_OPS

_LEAST_US = 1e-3
_USUAL = TuningPolicy()


class Exchange(Protocol):
    """How ranks pass measured times on: one measures a key, and the others take what it found."""

    def take(self, key: str) -> tuple[int, dict[str, Any]] | None:
        """Return which rank has measured, and its entry; ``None`` where there is none to wait for."""

    def measures(self, key: str) -> bool:
        """Say whether this rank is to measure the key for all."""

    def give(self, key: str, entry: Mapping[str, Any]) -> None:
        """Pass on what this rank has measured."""

    def refuse(self, rank: int, key: str, differences: str) -> None:
        """Raise, since this rank has other libraries than the one that has measured."""


class SharedTimes:
    """The tuning cache of one rank of several, for both tuners, until it is closed: see `Exchange`."""

    _open: list[SharedTimes] = []  # noqa: RUF012 - of all

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        prepare()
        self._cache = use_tuning_cache(self)
        self._open.append(self)

    def close(self) -> None:
        """Give the cache back to whom it was of before."""
        self._open.remove(self)
        use_tuning_cache(self._open[-1] if self._open else None)

    @classmethod
    def current(cls) -> SharedTimes | None:
        """Return the innermost one."""
        return cls._open[-1] if cls._open else None

    def find(self, key: str, validators: Mapping[str, str]) -> tuple[dict[str, Any] | None, str]:
        """Return what the rank that measures has measured; as `TuningCache.find`."""
        taken = self._exchange.take(key)
        if taken is not None:
            rank, entry = taken
            if not entry["times"]:  # that rank could not measure
                return entry, ""
            theirs = entry["validators"]
            differences = [
                f"{name} is {validators.get(name, 'not there')!r} here and {theirs.get(name, 'not there')!r} there"
                for name in sorted({*validators, *theirs})
                if validators.get(name) != theirs.get(name)
            ]
            if differences:
                self._exchange.refuse(rank, key, ", ".join(differences))
            return entry, ""
        if self._cache is None or not self._exchange.measures(key):
            return None, ""
        record, note = self._cache.find(key, validators)
        if record is None or record.get("undecided"):  # which one rank alone would measure again
            return None, note
        self._exchange.give(key, record)
        return record, note

    def settle(self, key: str) -> None:
        """Pass on that nothing was measured, where this rank was to."""
        if self._exchange.measures(key):
            self._exchange.give(key, {"times": [], "validators": {}})

    def put(self, key: str, entry: Mapping[str, Any]) -> str:
        """Keep what was measured, and pass it on; as `TuningCache.put`."""
        note = "" if self._cache is None else self._cache.put(key, entry)
        self._exchange.give(key, {**entry, "seconds": 1e9})  # no rank measures an undecided one again
        return note


def settle(key: str) -> None:
    """Have ranks that wait for what this one measures go on without, where it has kept nothing."""
    shared = SharedTimes.current()
    if shared is not None:
        shared.settle(key)


def _store_of(key: str) -> TuningCache | SharedTimes | None:
    """Return where times are kept: those that choose kernels of PyTorch's operators are shared by ranks."""
    chooses = key.startswith("torch;") and not key.startswith("torch;route;")
    return (SharedTimes.current() if chooses else None) or _open_store()


@functools.cache
def _open_store() -> TuningCache | None:
    try:
        path = tuning_path()
    except InputError as error:
        warn(f"measured times are not kept: {error}")
        return None
    return None if path is None else TuningCache(path)


def rule_suffix(rule: TuningPolicy) -> str:
    """Return what a key ends in where kernels replace others by another rule than the usual one."""
    text = "" if rule.objective == _USUAL.objective else f";objective={rule.objective}"
    if (rule.min_effect, rule.confidence) == (_USUAL.min_effect, _USUAL.confidence):
        return text
    return f"{text};min_effect={rule.min_effect:.6g};confidence={rule.confidence:.6g}"


def _kernels(op: str, device: str) -> tuple[tuple[str, str], ...]:
    if op not in ARRAY_OPS:
        return ()
    prepare()
    every = _core.KernelRegistry.instance().kernels(op)
    return tuple(
        (kernel["id"], kernel["version"]) for kernel in every if kernel["device_type"] == device and kernel["available"]
    )


def validators(op: str, device: str, versions: Mapping[str, str], libraries: Sequence[str] = ()) -> dict[str, str]:
    """Return what measured times of an operation hold for.

    Parameters
    ----------
    op : str
        Operation of a `KernelPolicy`.
    device : {"cpu", "cuda"}
    versions : mapping of str to str
        Of the libraries whose kernels were measured beside xpuruntime's.
    libraries : sequence of str
        Patterns of the file names of its libraries, which are loaded by now.
    """
    from xpuruntime import __version__

    kernels = _kernels(op, device)
    patterns = [*libraries, *(("libcuda.so*",) if device == "cuda" else ())]
    for backend in dict.fromkeys(id_.partition(".")[0] for id_, _ in kernels):
        patterns += BACKEND_LIBRARIES.get(backend, ())
    return {
        **versions,
        "xpuruntime": __version__,
        "core": core_build(),
        "protocol": PROTOCOL,
        "kernels": " ".join(f"{id_}={version}" for id_, version in kernels),
        **mapped_builds(patterns),
    }


def recall(key: str, held_by: Mapping[str, str], rule: TuningPolicy) -> Replacement | None:
    """Return what was measured, as far as it still holds; ``None`` where it was undecided with a smaller budget."""
    store = _store_of(key)
    if store is None:
        return None
    entry, _ = store.find(key, held_by)
    if entry is None:
        return None
    measured = Replacement(
        tuple(KernelTiming(**time) for time in entry["times"]),
        entry.get("rounds", 0),
        entry.get("seconds", 0.0),
        entry.get("undecided", False),
    )
    return None if measured.undecided and measured.seconds < rule.budget else measured


def keep(key: str, held_by: Mapping[str, str], measured: Replacement) -> str:
    """Keep what was measured. Returns why it is not kept, or nothing."""
    store = _store_of(key)
    if store is None or measured.cancelled:
        return ""
    times = [
        timing._replace(microseconds=max(timing.microseconds, _LEAST_US))._asdict() for timing in measured.candidates
    ]
    return store.put(
        key,
        {
            "times": times,
            "validators": dict(held_by),
            "rounds": measured.rounds,
            "seconds": measured.seconds,
            "undecided": measured.undecided,
        },
    )
