# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The shipped model and images, and the whole loop on them: plan, accuracy, latency, evidence.

The images are from the UCI data set "Optical Recognition of Handwritten Digits" as scikit-learn ships it; see
``DATA.md`` beside this file. ``examples/train_digits.py`` makes both files.
"""

from __future__ import annotations

from xpuruntime.demo.run import DemoResult, demo_images, demo_model_path, run_demo, write_demo_files

__all__ = ["DemoResult", "demo_images", "demo_model_path", "run_demo", "write_demo_files"]
