# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Messages of PyTorch that are read, since its errors have no codes, and what follows where a text is another."""

from __future__ import annotations

import itertools

__all__ = [
    "has_no_sdp_backend",
    "is_capture_error",
    "is_kernel_gone",
    "is_second_backward",
    "sdp_reasons",
    "without_source",
]


def is_kernel_gone(error: RuntimeError) -> bool:
    """Whether a kernel that was looked up has been deregistered. Otherwise: the error goes to the caller."""
    return "has been invalidated" in str(error)


def has_no_sdp_backend(error: RuntimeError) -> bool:
    """Whether no enabled backend of attention serves a call. Otherwise: its arguments count as wrong."""
    return any(text in str(error) for text in ("No available kernel", "No viable backend"))


def sdp_reasons(warnings: list[str]) -> list[tuple[str, str]]:
    """Return the warnings that a backend is not used, each with the next one, which has the reason. Otherwise: none."""
    pairs = itertools.pairwise(warnings)
    return [(what, without_source(why)) for what, why in pairs if "not used because" in what]


def without_source(warning: str) -> str:
    """Return a warning without the line of PyTorch's source that it comes from. Otherwise: as it is."""
    return warning.split("(Triggered internally", 1)[0].strip(" .")


def is_capture_error(error: BaseException) -> bool:
    """Whether an error is about the capture of a CUDA graph. Otherwise: it goes to the caller as it is."""
    return isinstance(error, RuntimeError) and "captur" in str(error)


def is_second_backward(error: RuntimeError) -> bool:
    """Whether a graph has no saved tensors any more. Otherwise: the error goes to the caller."""
    return "backward through the graph a second time" in str(error)
