# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""PyTorch's profiler, which runs once in a process, and which an exception must not leave running."""

from __future__ import annotations

import contextlib
import os
import warnings
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.errors import InputError
from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Profiler", "refuse_a_second"]


def refuse_a_second(what: str) -> None:
    """Refuse to start a profiler while one runs: there is one of PyTorch's per process, and a second would crash it."""
    if _private_api.profiler_flag() or _private_api.profiler_enabled():
        msg = (
            f"{what} needs PyTorch's profiler, and one runs already: one profiler runs at a time. Leave the block of "
            "torch.profiler, xpuruntime.pytorch.profile or explain() around it first, or do not nest them"
        )
        raise InputError(msg)


def _default_activities() -> list[Any]:
    """Return what is to be recorded: the CPU, and CUDA where there is a device."""
    activity = torch.profiler.ProfilerActivity
    return [activity.CPU, activity.CUDA] if torch.cuda.is_available() else [activity.CPU]


class Profiler:
    """`torch.profiler.profile`, which holds everything between `start` and `stop`, kernels that are under way included.

    As a context manager it starts, stops, and abandons itself.
    """

    def __init__(self, activities: Iterable[Any] | None = None, **options: Any) -> None:
        # Else PyTorch 2.13 prints a line for each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        chosen = _default_activities() if activities is None else list(activities)
        self.torch = torch.profiler.profile(activities=chosen, **options)
        self._runs = False
        self._filters: Any = None

    def start(self) -> None:
        """Start it; kernels that were started before are waited for. `abandon` it where this is interrupted."""
        _finish_kernels()
        self._filters = warnings.filters
        self._runs = True
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.torch.start()

    def stop(self) -> None:
        """Wait for the kernels that are under way, and stop. `abandon` it where this is interrupted."""
        try:
            _finish_kernels()
        finally:
            self._filters = warnings.filters
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.torch.stop()
        self._runs = False

    def abandon(self) -> None:
        """Leave PyTorch without a profiler, at whatever point `start` or `stop` was interrupted. Idempotent."""
        if not self._runs:
            return
        if self._filters is not None and warnings.filters is not self._filters:
            warnings.filters = self._filters
            warnings._filters_mutated()  # type: ignore[attr-defined]
        prepared: Any = self.torch.profiler
        if prepared is not None and not _private_api.profiler_enabled():
            # PyTorch 2.11 prepares no second one where the first was prepared and never enabled, and says so.
            with contextlib.suppress(RuntimeError):
                _private_api.prepare_profiler(prepared)
            _private_api.enable_profiler(prepared)
        if _private_api.profiler_enabled():
            _private_api.disable_profiler()
        _private_api.set_profiler_flag(False)
        self._runs = False

    def _enter(self) -> Profiler:
        self.start()
        return self

    def _exit(self, *_: object) -> None:
        self.stop()

    __enter__ = _core.guarded(_enter, abandon)
    __exit__ = _core.guarded(_exit, abandon)

    def events(self) -> list[Any]:
        """Return everything that was recorded, as kineto has it; times are nanoseconds since the epoch."""
        profiler = self.torch.profiler
        events: list[Any] = profiler.kineto_results.events()
        return events


def _finish_kernels() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)
