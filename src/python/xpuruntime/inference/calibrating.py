# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`calibration_of`: the inputs that a session quantises with: given to it, or those that its policy names."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.errors import LockError, PolicyError
from xpuruntime.files.paths import kind_of, with_home

if TYPE_CHECKING:
    from xpuruntime.artifacts.manifest import Artifact
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.quantisation import Calibration
    from xpuruntime.policies import Policy

__all__ = ["calibration_of"]


def calibration_of(
    given: Any, policy: Policy, info: ModelInfo, *, artifact: Artifact | None = None, lock: str | None = None
) -> Calibration | None:
    """Return the inputs to quantise with, compared with the digest that the policy states."""
    stated = policy.calibration
    if given is None and (stated is None or artifact is not None):
        return None
    from xpuruntime.engines.model import with_shapes
    from xpuruntime.engines.quantisation import Calibration

    if artifact is None:
        info = with_shapes(info, policy)
    if given is None:
        assert stated is not None
        path = with_home(str(stated.path), "calibration.path")
        if kind_of(path) not in ("file", "folder"):
            raise _missing(str(path), str(stated.digest), lock)
        given = path
    found = Calibration.of(given, info)
    if found is not None and stated is not None and lock is None:
        _check(found, stated.digest, stated.samples)
    return found


def _missing(path: str, digest: str, lock: str | None) -> PolicyError | LockError:
    fix = "restore it, or name the inputs with calibration= (--calibration PATH)"
    if lock is not None:
        return LockError(
            f"the lock {lock} does not hold: calibration: expected {digest}, found no file or folder "
            f"{path!r}. Fix: {fix}"
        )
    return PolicyError(
        f"calibration.path: there is no file or folder {path!r}, which the policy names with the digest {digest}. "
        f"Fix: {fix}; in a policy file it is relative to that file"
    )


def _check(found: Calibration, digest: str | None, samples: int | None) -> None:
    has = f"sha256:{found.digest}"
    where = f"{found.origin} has {found.count} samples with the digest {has}"
    fix = "restore the inputs, or state what `xrt policy calibration MODEL PATH` prints"
    if samples is not None and found.count != samples:
        raise PolicyError(f"calibration.samples: {where}, and the policy states {samples} samples. Fix: {fix}")
    if has != digest:
        raise PolicyError(f"calibration.digest: {where}, and the policy states {digest}. Fix: {fix}")
