# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`torch_facts`: the route by which policies reach PyTorch's operators, for ``xrt doctor``."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from xpuruntime.runtime.snapshot import core_problem

if TYPE_CHECKING:
    from xpuruntime.runtime.doctor.facts import TorchFacts

__all__ = ["torch_facts"]


def torch_facts() -> TorchFacts | None:
    """Return the route, where PyTorch is installed and can be imported; that takes seconds."""
    if core_problem() is not None or find_spec("torch") is None:
        return None
    try:
        from xpuruntime.pytorch.dispatch.fast_path import facts

        return facts()
    except (ImportError, OSError):  # which the checks of engines say
        return None
