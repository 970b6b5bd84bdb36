# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rounding fp32 weights to fp16 and bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from xpuruntime.engines.precision.types import FLOAT16

if TYPE_CHECKING:
    import numpy as np
    import onnx
    from numpy.typing import NDArray

__all__ = ["Rounded", "round_tensor", "round_values"]

_FP16_MAX = 65504.0
_FP16_TINY = 2.0**-24  # the smallest positive value
_BF16_MAX_BITS = 0x7F7F
# Elements rounded at a time, so that large weights need no large temporaries.
_BLOCK = 1 << 20


class Rounded(NamedTuple):
    """`bits` as uint16, and how many finite values were too large (`over`) or not zero yet too small (`under`)."""

    bits: NDArray[np.uint16]
    over: int
    under: int


def round_values(values: NDArray[np.float32], target: int) -> Rounded:
    """Round to nearest, ties to even.

    Finite values stay finite and values other than zero stay other than zero, as in ONNX Runtime's converter: too
    large ones become the largest value of the type, too small ones the smallest. NaN and infinities stay.
    """
    import numpy as np

    values = np.ascontiguousarray(values, dtype=np.float32).reshape(-1)
    if target == FLOAT16:
        size = np.abs(values)
        large = (size > _FP16_MAX) & np.isfinite(values)
        small = (size < _FP16_TINY) & (size > 0)
        over, under = int(np.count_nonzero(large)), int(np.count_nonzero(small))
        if over or under:
            values = values.copy()
            values[large] = np.copysign(np.float32(_FP16_MAX), values[large])
            values[small] = np.copysign(np.float32(_FP16_TINY), values[small])
        return Rounded(values.astype(np.float16).view(np.uint16), over, under)
    raw = values.view(np.uint32)
    bits = ((raw + (((raw >> 16) & 1) + 0x7FFF)) >> 16).astype(np.uint16)
    nan = np.isnan(values)
    bits[nan] = (raw[nan] >> 16).astype(np.uint16) | 0x40
    grown = ((bits & 0x7FFF) == 0x7F80) & np.isfinite(values)
    bits[grown] = (bits[grown] & 0x8000) | _BF16_MAX_BITS
    lost = ((bits & 0x7FFF) == 0) & (values != 0)
    bits[lost] |= 1
    return Rounded(bits, int(np.count_nonzero(grown)), int(np.count_nonzero(lost)))


def round_tensor(tensor: onnx.TensorProto, target: int) -> tuple[Any, Rounded]:
    """Return a float tensor as a new tensor of the target type, and how it was rounded. Its data must be loaded."""
    import numpy as np
    import onnx

    if tensor.HasField("raw_data"):
        values = np.frombuffer(tensor.raw_data, dtype="<f4")
    else:
        values = np.array(tensor.float_data, dtype=np.float32)
    bits = np.empty(values.size, "<u2")
    over = under = 0
    for start in range(0, values.size, _BLOCK):
        part = round_values(values[start : start + _BLOCK], target)
        bits[start : start + _BLOCK] = part.bits
        over, under = over + part.over, under + part.under
    proto = onnx.TensorProto(name=tensor.name, doc_string=tensor.doc_string, data_type=target, dims=tensor.dims)
    proto.raw_data = bits.tobytes()
    return proto, Rounded(bits, over, under)
