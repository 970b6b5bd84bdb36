# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Run a model on OpenVINO, many images at a time. Needs `pip install "xpuruntime[openvino]"`."""

from __future__ import annotations

import xpuruntime as xrt

images, labels = xrt.demo_images()
with xrt.InferenceSession(xrt.demo_model_path(), engine="openvino", device="cpu", precision="fp32") as session:
    futures = [session.run_async({"image": image[None]}) for image in images]
    digits = [int(future.result()["logits"].argmax()) for future in futures]
    report = session.explain({"image": images[:1]})
print(f"{sum(a == b for a, b in zip(digits, labels, strict=True))} of {len(labels)} images recognized")
print({unit.kernel for unit in report.units if unit.kernel})
