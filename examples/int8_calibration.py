# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compute in 8-bit integers: quantize a model in floats from some of its inputs, and see which nodes ran in int8."""

from __future__ import annotations

import xpuruntime as xrt

images, labels = xrt.demo_images()
samples, held_out = images[:64], images[64:]
with xrt.InferenceSession(xrt.demo_model_path(), device="cpu", precision="int8", calibration=samples) as session:
    logits = session.run({"image": held_out})["logits"]
    report = session.explain({"image": held_out[:1]})
print(f"{(logits.argmax(axis=1) == labels[64:]).mean():.1%} recognized in int8")
for unit in report.units:
    print(f"{', '.join(unit.source_nodes) or unit.op}: {unit.precision_run}")
