# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Dropout by random numbers of a kernel's own: which attention weights it drops, found from its results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime import ops
from xpuruntime.testing.op_arrays import Input
from xpuruntime.testing.op_philox import dropout_factors
from xpuruntime.testing.op_run import compare

if TYPE_CHECKING:
    from xpuruntime.testing.op_arrays import Arrays
    from xpuruntime.testing.op_case import OpCall, OpCase

__all__ = ["find_factors"]

Array = np.ndarray[Any, Any]

#: Standard deviations that the number of weights kept may be away from what is expected.
_MOST_DEVIATIONS = 6


def find_factors(case: OpCase, kernel: str, arrays: Arrays, seed: int = 0) -> Array:
    """Return what multiplies each attention weight of a case with dropout: 0 or ``1 / (1 - p)``.

    Attention by values that are unit vectors gives the weights themselves, as the forward of the kernel drops and
    scales them; so a gradient that agrees with these factors drops what the forward does.
    """
    call = case.call(seed)
    assert call.weights is not None, f"{case.name} has no dropout"
    p = float(np.float32(call.options["dropout_p"]))
    seen = call.weights.values > 0
    found = _dropped_weights(call, kernel, arrays)
    whole = call.weights.values / (1 - p)
    kept = seen & (found > whole / 2)
    bound = np.where(kept, call.weights.bound / (1 - p), 0.0)
    compare(f"{case.name}: weights after dropout", found, np.where(kept, whole, 0.0), bound)

    count, share = int(seen.sum()), int(kept.sum())
    deviation = np.sqrt(count * p * (1 - p))
    assert abs(share - (1 - p) * count) <= _MOST_DEVIATIONS * deviation, (
        f"{case.name}: {share} of {count} weights are kept, expected {(1 - p) * count:.0f} within "
        f"{_MOST_DEVIATIONS * deviation:.0f}"
    )
    of_heads = kept.reshape(-1, *kept.shape[2:])
    assert len(np.unique(of_heads, axis=0)) == len(of_heads), f"{case.name}: two heads drop the same weights"

    again = _dropped_weights(call, kernel, arrays)
    assert np.array_equal(again, found), f"{case.name}: the same rng gives other bits the second time"
    given = call.inputs["rng"].values
    for what, change in (("seed", (1, 0)), ("offset", (0, 64))):
        other = _dropped_weights(call, kernel, arrays, given + np.array(change))
        assert not np.array_equal(other > 0, kept), f"{case.name}: another {what} drops the same weights"
    ours = dropout_factors(p, int(given[0]), int(given[1]), (*kept.shape,)) > 0
    assert not np.array_equal(ours & seen, kept), (
        f"{case.name}: other random numbers are declared, and those of the op are drawn"
    )
    return np.where(kept, 1 / (1 - p), 0.0)


def _dropped_weights(call: OpCall, kernel: str, arrays: Arrays, rng: Array | None = None) -> Array:
    """Return the weights [batch, heads, q_length, kv_length] after dropout."""
    inputs = {name: call.inputs[name] for name in ("q", "k", "mask", "rng") if name in call.inputs}
    if rng is not None:
        inputs["rng"] = Input(rng, "int64")
    q, shape = call.inputs["q"], call.inputs["v"].values.shape
    made = {name: arrays.make(one) for name, one in inputs.items()}
    options = {**call.options, "return_lse": True, "kernel": kernel}
    parts = []
    for start in range(0, shape[2], shape[3]):
        units = np.broadcast_to(np.eye(shape[2], shape[3], -start), shape)
        out, _ = ops.attention(v=arrays.make(Input(units, q.dtype)), **made, **options)
        parts.append(arrays.read(out)[..., : shape[2] - start])
    return np.concatenate(parts, -1)
