# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Tolerance` and `TOLERANCES`: how far outputs may be from a reference, by the precision they are computed in."""

from __future__ import annotations

import msgspec

__all__ = ["TOLERANCES", "Tolerance"]


class Tolerance(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How far an output may be from the reference.

    Attributes
    ----------
    rtol, atol : float
        The largest difference allowed is ``atol + rtol * max(abs(reference))``. The scale is that of the whole output:
        an element near zero has no meaningful relative error of its own. Of integer and boolean outputs, the share
        `rtol` of elements may differ.
    cosine : float
        The least cosine between the two outputs as vectors.
    cosine_stated : bool
        Whether the user states the cosine. Such a limit is judged on outputs of any size; that of a precision only
        where the largest difference exceeds `atol`, below which an output and its direction are noise.
    """

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
