# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records of kernel tuning: what a tuner in Python measured, kept in the cache that the core's tuner uses too."""

from __future__ import annotations

import functools
import warnings
from typing import TYPE_CHECKING

from xpuruntime import _core
from xpuruntime.errors import InputError, XpuRuntimeWarning
from xpuruntime.measuring.rounds import PROTOCOL, KernelTiming, Replacement
from xpuruntime.ops.call_context import prepare
from xpuruntime.ops.tuning_cache import BACKEND_LIBRARIES, TuningCache, core_build, mapped_builds, tuning_path
from xpuruntime.policies import TuningPolicy
from xpuruntime.policies.kernel_rules import ARRAY_OPS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["keep", "recall", "rule_suffix", "validators"]

_LEAST_US = 1e-3
_USUAL = TuningPolicy()


@functools.cache
def _open_store() -> TuningCache | None:
    try:
        path = tuning_path()
    except InputError as error:
        warnings.warn(f"measured times are not kept: {error}", XpuRuntimeWarning, stacklevel=2)
        return None
    return None if path is None else TuningCache(path)


def rule_suffix(rule: TuningPolicy) -> str:
    """Return what a key ends in where kernels replace others by another rule than the usual one."""
    if (rule.min_effect, rule.confidence) == (_USUAL.min_effect, _USUAL.confidence):
        return ""
    return f";min_effect={rule.min_effect:.6g};confidence={rule.confidence:.6g}"


def _kernels(op: str, device: str) -> tuple[tuple[str, str], ...]:
    """Return the xpuruntime kernels that can serve an operation on a type of device, with their versions."""
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
    store = _open_store()
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
    store = _open_store()
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
