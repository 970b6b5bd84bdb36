# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What the tests of sessions share: the answer on the CPU, and how close is close."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

import xpuruntime as xrt

if TYPE_CHECKING:
    from pathlib import Path

SLEEP_CYCLES = 400_000_000  # about 0.2 s


def reference(path: Path, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    with xrt.InferenceSession(path, device="cpu") as session:
        return session.run({"x": x})["y"]


def close(got: Any, want: Any, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    exact, wide = np.asarray(want, dtype=np.float64), np.asarray(got, dtype=np.float64)
    np.testing.assert_allclose(wide, exact, rtol=rtol, atol=atol)
