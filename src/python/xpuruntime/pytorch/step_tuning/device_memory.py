# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`VariantMemoryMeter`: peak of the allocator for one variant, without what tuning itself and other variants hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["VariantMemoryMeter"]


class VariantMemoryMeter:
    """Peaks of variants that are built one after another, each as if it were the only one.

    Made before anything is copied, so that copies of parameters do not count. The first variant makes the state of the
    optimizer, which stays for the others: it counts for each of them.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        allocated: Callable[[torch.device], int] = torch.cuda.memory_allocated,
        peak: Callable[[torch.device], int] = torch.cuda.max_memory_allocated,
        reset: Callable[[torch.device], None] = torch.cuda.reset_peak_memory_stats,
    ) -> None:
        self._device, self._allocated, self._peak, self._reset = device, allocated, peak, reset
        self._own = self._before = allocated(device)
        self._begun = self._copies = 0

    def begin(self) -> None:
        """Begin a variant; the one before has given its state and its gradients back."""
        self._before = self._allocated(self._device)
        if self._begun == 0:
            self._copies = self._before - self._own
        elif self._begun == 1:
            self._own = self._before - self._copies
        self._begun += 1
        self._reset(self._device)

    def peak(self) -> int:
        """Return the most bytes that the variant has needed since `begin`."""
        return self._own + self._peak(self._device) - self._before
