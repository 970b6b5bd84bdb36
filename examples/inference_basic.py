# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Load a model, run it on NumPy arrays, check the answers."""

from __future__ import annotations

import xpuruntime as xrt

images, labels = xrt.demo_images()
with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    logits = session.run({"image": images})["logits"]
print(f"{(logits.argmax(axis=1) == labels).mean():.1%} of {len(labels)} images recognized")
