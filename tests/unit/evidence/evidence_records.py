# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Records made by hand for the tests of evidence."""

from __future__ import annotations

from xpuruntime.evidence import Boundary, Control, Conversion, Latency, Time, Unit


def unit(name, op="MatMul", device="cpu", ran="fp32", asked="fp32", relation="exact", time=10.0, **more):
    fields = {
        "id": name,
        "op": op,
        "relation": relation,
        "source_nodes": () if relation == "inserted" else (name,),
        "outputs": (f"{name}_y",),
        "engine": "onnxruntime",
        "device": device,
        "precision_run": ran,
        "precision_requested": asked,
        "time": None if time is None else Time(value=time, unit="us", kind="wall", runs=5),
    }
    return Unit(**{**fields, **more})


def control(key, requested, resolved=None, enforceability="enforced", reason="it has a switch"):
    return Control(
        key=key,
        requested=requested,
        resolved=requested if resolved is None else resolved,
        enforceability=enforceability,
        reason=reason,
    )


BOUNDARY = Boundary(
    kind="copy",
    where="cuda:0 -> cpu",
    count=2,
    bytes=5_000_000,
    time=Time(value=31.5, unit="us", kind="wall", runs=5),
)
CONVERSION = Conversion(what="input 'x' was not C-contiguous: copied", reason="the engine reads rows", count=3)
LATENCY = Latency(median_us=120.5, p90_us=140.0, min_us=118.25, runs=50, detail={"warmup": (1, 2)})
