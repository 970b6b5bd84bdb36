# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Exports for every engine: the model with its lock, for servers and registries. A session of xpuruntime runs them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from xpuruntime.engines.native_export.model_files import free_place
from xpuruntime.engines.native_export.native_config import KeyOutcomes, NativeExporter
from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from xpuruntime.engines.native_export.native_config import KeyOutcome

__all__ = ["LOCK", "PortableExporter"]

#: The lock in an export.
LOCK = "session.lock"


class PortableExporter(NativeExporter):
    """Writes the model and its lock, so that every key of the policy holds where xpuruntime opens them."""

    targets: ClassVar[dict[str, str]] = {}

    def device_word(self) -> str:
        """Return the device of the plan."""
        return self.job.request.device

    def copy_model(self, folder: Path, *, also: Sequence[str] = ()) -> tuple[str, ...]:
        """Copy the model and its external data, and return their paths in the folder, the model first."""
        job, info = self.job, self.job.request.model
        if job.request.calibration is not None:
            raise UnsupportedOperationError(
                f"the session of {info.path} is quantised from calibration inputs as it is opened, which an export for "
                "servers does not have. Fix: export it to ort-python or openvino-json, whose graph is quantised"
            )
        folder.mkdir(parents=True, exist_ok=True)
        model = Path(info.file)
        names = [model.name, *(one.location for one in info.external_files)]
        for place, name in enumerate(names):
            target = free_place(folder, name, also=(LOCK, *also))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(Path(info.base_dir or ".") / name if place else model, target)
        return tuple(names)

    def copy_lock(self, folder: Path) -> str:
        """Copy the lock, and return its name."""
        shutil.copyfile(self.job.lock_path, folder / LOCK)
        return LOCK

    def outcomes(self, reason: str) -> tuple[KeyOutcome, ...]:
        """Return every key as kept."""
        found = KeyOutcomes(self.job, "xpuruntime")
        for key in self.job.stated:
            if key != "mode":
                found.add(key, "kept", reason)
        return found.settle(device=reason)
