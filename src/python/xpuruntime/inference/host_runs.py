# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`host_runner`: how a server runs a session on arrays of the host."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from xpuruntime.engines.host_runner import HostRunner, PinnedRunner

if TYPE_CHECKING:
    from xpuruntime.inference.session import InferenceSession

__all__ = ["host_runner"]


def host_runner(session: InferenceSession) -> HostRunner:
    """Return what runs a session on host arrays: on CUDA through pinned memory, elsewhere its `run`."""
    own = session._open().host_runner()
    if own is not None:
        return own
    device = session.plan.device
    if device.startswith("cuda") and _is_there(device):
        return PinnedRunner(session.run, device, f"inputs of {Path(session.model.path).name}")
    return HostRunner(session.run, session._open().release_idle)


def _is_there(device: str) -> bool:
    """Say whether this process can use a CUDA device: an engine that computes nothing runs without."""
    from xpuruntime import _core

    return _core.DeviceManager.instance().get_device_count("cuda") > int(device.partition(":")[2] or 0)
