# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Compile a model into a folder, and start sessions from that."""

from __future__ import annotations

import xpuruntime as xrt

artifact = xrt.compile_model(xrt.demo_model_path(), "digits.xrt", engine="onnxruntime", device="cpu")
images, labels = xrt.demo_images()
with xrt.InferenceSession("digits.xrt") as session:
    logits = session.run({"image": images})["logits"]
print(f"{(logits.argmax(axis=1) == labels).mean():.1%} recognized by {artifact.manifest.engine}, compiled before")
