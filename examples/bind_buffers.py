# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Fix the buffers once, then run without any argument: the quickest way to call a model many times."""

from __future__ import annotations

import xpuruntime as xrt

images, labels = xrt.demo_images()
with xrt.InferenceSession(xrt.demo_model_path(), device="cpu") as session:
    bound = session.bind({"image": (1, 1, 8, 8)})
    correct = 0
    for image, label in zip(images, labels, strict=True):
        bound.inputs["image"][...] = image
        bound.run()
        correct += bound.outputs["logits"].argmax() == label
    bound.close()
print(f"{correct} of {len(labels)} images recognized")
