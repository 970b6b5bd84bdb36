# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Comparison of the outputs of a converted model with those of the original."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.evidence.tolerances import TOLERANCES, Tolerance

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["TOLERANCES", "OutputFigures", "ProbeResult", "Tolerance", "compare_outputs", "compare_within", "verify"]


class OutputFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one output.

    Attributes
    ----------
    name : str
    passed : bool
    max_abs : float
        Largest difference; for integers, strings and booleans the number of elements that differ.
    max_rel : float
        `max_abs` over the largest magnitude of the reference; for integers and the like the share that differs.
    cosine : float
        1 for an output without values.
    nan, inf : int
        Elements that are NaN or infinite in the candidate alone.
    reason : str
        Why it did not pass; empty when it did.
    compared : int or None
        Elements whose comparison says something: all integers, strings and booleans, and the finite floats, unless
        every one of the reference is zero, which no relative limit applies to. ``None``: not recorded.
    """

    name: str
    passed: bool
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float = 1.0
    nan: int = 0
    inf: int = 0
    reason: str = ""
    compared: int | None = None


class ProbeResult(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of all outputs.

    `first_failing` names the first output out of tolerance; `not_run` says why nothing could be run.
    """

    passed: bool
    outputs: tuple[OutputFigures, ...]
    tolerance: Tolerance
    first_failing: str | None = None
    not_run: str | None = None

    @property
    def inconclusive(self) -> str | None:
        """Why a comparison that passed says nothing of some outputs, or ``None``."""
        if self.first_failing is not None:
            return None
        if self.not_run is not None:
            return self.not_run
        if not self.outputs:
            return "there is no output to compare"
        idle = [o.name for o in self.outputs if o.compared == 0]
        if not idle:
            return None
        named = ", ".join(map(repr, idle[:4])) + (f" and {len(idle) - 4} more" if len(idle) > 4 else "")
        return f"nothing was compared: the reference has no finite value other than zero in {named}"

    @property
    def max_abs(self) -> float:
        """The largest difference over all outputs."""
        return max((o.max_abs for o in self.outputs), default=0.0)

    @property
    def cosine(self) -> float:
        """The least cosine over all outputs."""
        return min((o.cosine for o in self.outputs), default=1.0)

    @property
    def figures(self) -> str:
        """The first output that is out of tolerance and by how much, or the figures of those that agree."""
        worst = next((o for o in self.outputs if o.name == self.first_failing), None)
        if worst is None:
            return f"largest difference {self.max_abs:.3g}, least cosine {self.cosine:.6f}"
        return f"output {worst.name!r} is out of tolerance: {worst.reason}"

    def __str__(self) -> str:
        if self.inconclusive is not None:
            return f"inconclusive: {self.inconclusive}"
        if self.first_failing is None:
            return f"{len(self.outputs)} outputs agree with the reference: {self.figures}"
        failed = sum(not o.passed for o in self.outputs)
        return (
            f"{self.figures} (allowed: rtol {self.tolerance.rtol:g} of the "
            f"largest magnitude, atol {self.tolerance.atol:g}, cosine {self.tolerance.cosine:g}); "
            f"{failed} of {len(self.outputs)} outputs failed. Fix: keep the nodes that need it in fp32 "
            "(a kernels rule with match.node and precision: fp32), widen `accuracy` in the policy, or choose another "
            "precision: bf16 has the range of fp32, fp16 has more digits"
        )


def compare_within(reference: Mapping[str, Any], candidate: Mapping[str, Any], tolerance: Tolerance) -> ProbeResult:
    """Compare two sets of outputs by name, as `compare_outputs`, within a tolerance."""
    limits = {"rtol": tolerance.rtol, "atol": tolerance.atol, "cosine": tolerance.cosine}
    return compare_outputs(reference, candidate, **limits)


def compare_outputs(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any],
    *,
    rtol: float,
    atol: float,
    cosine: float,
) -> ProbeResult:
    """Compare two sets of outputs by name.

    Parameters
    ----------
    reference, candidate : mapping of str to array
        Arrays of any shape, or lists and dicts of arrays (sequences and maps).
    rtol, atol, cosine : float
        See `Tolerance`.

    Returns
    -------
    ProbeResult
        Fails where an output is missing, has another shape or dtype, has NaN or infinity where the reference has
        not, or is out of tolerance. NaN in both is equal.
    """
    limits = Tolerance(rtol=rtol, atol=atol, cosine=cosine)
    figures: list[OutputFigures] = []
    flat, other = _flatten(reference), _flatten(candidate)
    for name, expected in flat.items():
        if name not in other:
            figures.append(OutputFigures(name=name, passed=False, reason="it is missing"))
        else:
            figures.append(_compare(name, expected, other[name], limits))
    figures += [
        OutputFigures(name=name, passed=False, reason="the reference has no such output")
        for name in other
        if name not in flat
    ]
    failing = next((f.name for f in figures if not f.passed), None)
    return ProbeResult(passed=failing is None, outputs=tuple(figures), tolerance=limits, first_failing=failing)


def verify(
    run_ref: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    run_new: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    feeds: Mapping[str, Any],
    tolerance: Tolerance,
) -> ProbeResult:
    """Run both on the same feeds and compare. Errors of either run are passed on."""
    return compare_outputs(
        run_ref(feeds), run_new(feeds), rtol=tolerance.rtol, atol=tolerance.atol, cosine=tolerance.cosine
    )


def _flatten(outputs: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, dict):
            flat.update(_flatten({f"{name}[{key!r}]": item for key, item in value.items()}))
        elif isinstance(value, (list, tuple)):
            flat.update(_flatten({f"{name}[{i}]": item for i, item in enumerate(value)}))
        else:
            flat[name] = value
    return flat


def _compare(name: str, reference: Any, candidate: Any, limits: Tolerance) -> OutputFigures:
    import numpy as np

    want, got = np.asarray(reference), np.asarray(candidate)
    if want.shape != got.shape:
        return OutputFigures(name=name, passed=False, reason=f"its shape is {got.shape}, not {want.shape}")
    if want.dtype != got.dtype:
        return OutputFigures(name=name, passed=False, reason=f"its dtype is {got.dtype}, not {want.dtype}")
    if want.dtype.kind in "biuOUS":
        return _compare_exact(name, want, got, limits)
    wide = np.complex128 if want.dtype.kind == "c" else np.float64
    return _compare_floats(name, want.astype(wide).reshape(-1), got.astype(wide).reshape(-1), limits)


def _compare_exact(name: str, want: Any, got: Any, limits: Tolerance) -> OutputFigures:
    different = int((want != got).sum())
    share = different / want.size if want.size else 0.0
    reason = "" if share <= limits.rtol else f"{different} of {want.size} elements differ"
    passed = not reason
    return OutputFigures(
        name=name, passed=passed, max_abs=float(different), max_rel=share, reason=reason, compared=int(want.size)
    )


def _compare_floats(name: str, want: Any, got: Any, limits: Tolerance) -> OutputFigures:
    import numpy as np

    nan = int((np.isnan(got) & ~np.isnan(want)).sum())
    inf = int((np.isinf(got) & (got != want)).sum())
    lost = int((np.isfinite(got) & ~np.isfinite(want)).sum())
    both = np.isfinite(want) & np.isfinite(got)
    want, got = want[both], got[both]
    largest = float(np.abs(want).max(initial=0.0))
    distance = float(np.abs(want - got).max(initial=0.0))
    lengths = float(np.linalg.norm(want)) * float(np.linalg.norm(got))
    if lengths:
        cosine = float(abs(np.vdot(want, got)) / lengths if np.iscomplexobj(want) else np.dot(want, got) / lengths)
    else:  # a vector of zeros has no direction: the distance alone decides
        cosine = 1.0
    reasons: list[str] = []
    if nan or inf:
        reasons.append(f"{nan} elements became NaN and {inf} infinite")
    if lost:
        reasons.append(f"{lost} elements are finite that are not in the reference")
    if distance > limits.atol + limits.rtol * largest:
        reasons.append(f"largest difference {distance:.3g}, against a largest magnitude of {largest:.3g}")
    # Below atol an output is noise around zero, and so is its direction.
    if cosine < limits.cosine and distance > limits.atol:
        reasons.append(f"cosine {cosine:.6f}")
    return OutputFigures(
        name=name,
        passed=not reasons,
        max_abs=distance,
        max_rel=distance / largest if largest else (0.0 if not distance else float("inf")),
        cosine=cosine,
        nan=nan,
        inf=inf,
        reason="; ".join(reasons),
        compared=int(both.sum()) if largest else 0,
    )
