# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Outputs beside those of a reference: within tolerances by precision, as samples, bit for bit, and in ulps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

Array = np.ndarray[Any, Any]

_BITS = {2: np.int16, 4: np.int32, 8: np.int64}

#: For outputs that cannot be compared because the model draws random numbers.
RANDOM_FIX = "export the model with its random numbers as an input"


class Tolerance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far an output may be from the reference."""

    rtol: float
    atol: float
    cosine: float
    cosine_stated: bool = False


#: Defaults by precision. One operation rounds with a relative error of up to 2^-11 = 5e-4 in fp16 and 2^-9 = 2e-3 in
#: bf16; errors of tens of layers add up to about twenty times that, and a wrong graph is further off by far. The fp32
#: row is for two fp32 engines, which only sum in another order. In int8 each tensor has 256 steps over its range: a few
#: steps, summed over layers, are some percent of the largest value.
TOLERANCES: dict[str, Tolerance] = {
    "fp32": Tolerance(rtol=1e-4, atol=1e-5, cosine=0.99999),
    "tf32": Tolerance(rtol=1e-2, atol=1e-3, cosine=0.999),
    "fp16": Tolerance(rtol=1e-2, atol=1e-3, cosine=0.999),
    "bf16": Tolerance(rtol=4e-2, atol=1e-2, cosine=0.995),
    "int8": Tolerance(rtol=1.5e-1, atol=2e-2, cosine=0.98),
}
#: Two runs of one model may differ by as much where their bits do: batches and threads change the order of sums.
REPEATED = Tolerance(rtol=1e-3, atol=1e-5, cosine=0.0)
#: Largest error of one kernel by type, as a share of the largest number of the result in float64.
KERNEL_TOLERANCES = {"float64": 1e-9, "float32": 1e-4, "float16": 8e-3, "bfloat16": 4e-2}
#: Relative difference of a training step's losses by the type that is computed in.
LOSS_TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 2e-2}


class OutputFigures(msgspec.Struct, frozen=True, kw_only=True):
    """The comparison of one output."""

    name: str
    passed: bool
    max_abs: float = 0.0
    max_rel: float = 0.0
    cosine: float | None = None
    nan: int = 0
    inf: int = 0
    reason: str = ""
    compared: int | None = None
    undecided: str = ""


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
        idle: dict[str, list[str]] = {}
        for output in self.outputs:
            if output.undecided:
                idle.setdefault(output.undecided, []).append(repr(output.name))
        said = [
            f"{reason} in {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            for reason, names in idle.items()
        ]
        return f"nothing was compared: {'; '.join(said)}" if said else None

    @property
    def no_cosine(self) -> str | None:
        """Why a stated cosine judges no output, or ``None`` where it judges one, or none is stated."""
        judged = [output for output in self.outputs if output.cosine is not None and output.compared != 1]
        if judged or not self.tolerance.cosine_stated or not self.passed:
            return None
        return (
            "no output has a cosine: each holds one number, or integers, booleans or text, which are compared exactly"
        )

    @property
    def max_abs(self) -> float:
        """The largest difference over all outputs."""
        return max((o.max_abs for o in self.outputs), default=0.0)

    @property
    def cosine(self) -> float | None:
        """The least cosine over all outputs that have one."""
        return min((o.cosine for o in self.outputs if o.cosine is not None), default=None)

    @property
    def figures(self) -> str:
        """The first output that is out of tolerance and by how much, or the figures of those that agree."""
        worst = next((o for o in self.outputs if o.name == self.first_failing), None)
        if worst is None:
            angle = "no cosine is defined" if self.cosine is None else f"least cosine {self.cosine:.6f}"
            limits = f"allowed {self.tolerance.atol:g} plus {self.tolerance.rtol:g} of the largest magnitude"
            return f"largest difference {self.max_abs:.3g} ({limits}), {angle}"
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


def compare_within(
    reference: Mapping[str, Any],
    candidate: Mapping[str, Any],
    tolerance: Tolerance,
    random: Mapping[str, str] | None = None,
) -> ProbeResult:
    """Compare two sets of outputs by name."""
    drawn = {name: node for name, node in (random or {}).items() if name in reference and name in candidate}
    figures = [
        OutputFigures(name=name, passed=True, compared=0, undecided=f"random numbers of node {node} are")
        for name, node in drawn.items()
    ]
    flat, other = (
        _flatten({name: value for name, value in side.items() if name not in drawn}) for side in (reference, candidate)
    )
    for name, expected in flat.items():
        if name not in other:
            figures.append(OutputFigures(name=name, passed=False, reason="it is missing"))
        else:
            figures.append(_compare(name, expected, other[name], tolerance))
    figures += [
        OutputFigures(name=name, passed=False, reason="the reference has no such output")
        for name in other
        if name not in flat
    ]
    failing = next((f.name for f in figures if not f.passed), None)
    return ProbeResult(passed=failing is None, outputs=tuple(figures), tolerance=tolerance, first_failing=failing)


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
    idle = "" if want.size else "the reference has no value"
    if limits.rtol >= 1:
        idle = idle or f"rtol {limits.rtol:g} lets every element differ"
    reason = "" if share <= limits.rtol else f"{different} of {want.size} elements differ"
    return OutputFigures(
        name=name,
        passed=not reason,
        max_abs=float(different),
        max_rel=share,
        reason=reason,
        compared=int(want.size),
        undecided="" if reason else idle,
    )


def _compare_floats(name: str, want: Any, got: Any, limits: Tolerance) -> OutputFigures:
    nan = int((np.isnan(got) & ~np.isnan(want)).sum())
    inf = int((np.isinf(got) & (got != want)).sum())
    lost = int((np.isfinite(got) & ~np.isfinite(want)).sum())
    both = np.isfinite(want) & np.isfinite(got)
    want, got = want[both], got[both]
    largest = float(np.abs(want).max(initial=0.0))
    distance = float(np.abs(want - got).max(initial=0.0))
    cosine = _cosine(want, got)
    reasons: list[str] = []
    if nan or inf:
        reasons.append(f"{nan} elements became NaN and {inf} infinite")
    if lost:
        reasons.append(f"{lost} elements are finite that are not in the reference")
    if distance > limits.atol + limits.rtol * largest:
        reasons.append(f"largest difference {distance:.3g}, against a largest magnitude of {largest:.3g}")
    if cosine is not None and cosine < limits.cosine and (limits.cosine_stated or distance > limits.atol):
        reasons.append(f"cosine {cosine:.6f}")
    undecided = "" if reasons else _undecided(want, largest, cosine, limits)
    return OutputFigures(
        name=name,
        passed=not reasons,
        max_abs=distance,
        max_rel=distance / largest if largest else (0.0 if not distance else float("inf")),
        cosine=cosine,
        nan=nan,
        inf=inf,
        reason="; ".join(reasons),
        compared=0 if undecided else int(both.sum()),
        undecided=undecided,
    )


def _cosine(want: Any, got: Any) -> float | None:
    scales = [np.abs(side).max(initial=0.0) for side in (want, got)]
    if not all(scales):
        return None
    want, got = want / scales[0], got / scales[1]  # squares of small and large values are out of range
    product = np.abs(np.vdot(want, got)) if np.iscomplexobj(want) else np.dot(want, got)
    return float(product / (np.linalg.norm(want) * np.linalg.norm(got)))


def _undecided(want: Any, largest: float, cosine: float | None, limits: Tolerance) -> str:
    if not largest:
        return "the reference has no finite value other than zero"
    if cosine is None:
        return "the candidate has no finite value other than zero, and so no cosine"
    if limits.cosine_stated and want.size > 1 and (want == want[0]).all():
        return "the reference has the same value everywhere, of which a cosine tells nothing,"
    if largest <= limits.atol and not limits.cosine_stated:
        return f"the reference has no value larger than atol {limits.atol:g}"
    return ""


def samples_agree(expected: Sequence[float], values: Sequence[float], rtol: float, atol: float) -> bool:
    """Whether samples of an output agree within a tolerance; NaN agrees with NaN."""
    if len(expected) != len(values):
        return False
    return all(
        (math.isnan(value) and math.isnan(other)) or value == other or abs(value - other) <= atol + rtol * abs(value)
        for value, other in zip(expected, values, strict=True)
    )


def kept(outputs: Mapping[str, Any]) -> dict[str, Array]:
    """Return copies of the results of a run on the host."""
    return {name: np.array(value, copy=True) for name, value in outputs.items()}


def same_bits(array: Array, other: Array) -> bool:
    """Whether two arrays are the same, bit for bit: NaN equals the same NaN, and 0.0 is not -0.0."""
    if array.dtype != other.dtype or array.shape != other.shape:
        return False
    if array.dtype == object:
        return bool(np.array_equal(array, other))
    return np.ascontiguousarray(array).tobytes() == np.ascontiguousarray(other).tobytes()


def differing(want: Mapping[str, Array], got: Mapping[str, Array]) -> tuple[str, ...]:
    """Return the names of arrays that both have and that differ."""
    return tuple(name for name in want if name in got and not same_bits(want[name], got[name]))


def ulp_distance(array: Array, other: Array) -> int | None:
    """Return the largest distance of two elements, in units in the last place; of integers, in steps of one.

    ``None`` where elements are no numbers, shapes differ, or of two different elements one is not finite.
    """
    if array.dtype != other.dtype or array.shape != other.shape:
        return None
    if array.dtype.kind in "iub":
        wide = np.uint64 if array.dtype == np.uint64 else np.int64
        return _largest_step(array.astype(wide), other.astype(wide))
    bits = _BITS.get(array.dtype.itemsize)
    if bits is None or array.dtype.name not in ("float16", "float32", "float64", "bfloat16"):
        return None
    left, right = (np.ascontiguousarray(array).view(bits) for array in (array, other))
    moved = left != right
    if not moved.any():
        return 0
    finite = np.isfinite(array[moved].astype(np.float64)) & np.isfinite(other[moved].astype(np.float64))
    if not finite.all():
        return None
    return _largest_step(_ordered(left[moved]), _ordered(right[moved]))


def _largest_step(array: Array, other: Array) -> int:
    """Return the largest difference of two arrays of 64-bit integers: the true one fits into 64 bits without a sign."""
    if not array.size:
        return 0
    high, low = np.maximum(array, other), np.minimum(array, other)
    return int((high.view(np.uint64) - low.view(np.uint64)).max())


def _ordered(bits: Array) -> Array:
    """Return the bits of floats as integers in the order of the floats, in which -0.0 and 0.0 are one."""
    wide = bits.astype(np.int64)
    lowest = np.iinfo(bits.dtype).min
    return np.where(wide < 0, lowest - wide, wide)
