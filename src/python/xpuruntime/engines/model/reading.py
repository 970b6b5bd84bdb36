# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`read_model`: whatever a session is given as its model, as a `ModelInfo`."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.info import ModelInfo, inspect_model
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

__all__ = ["read_model"]


def read_model(
    model: Any, example_inputs: Mapping[str, Any] | Sequence[Any] | None = None, *, trust: bool = False
) -> ModelInfo:
    """Return what is known of a model before any engine sees it."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(model, torch.nn.Module):
        from xpuruntime.engines.torch.program.reading import inspect_module

        return inspect_module(model, example_inputs)
    if example_inputs is not None:
        raise InputError("example_inputs describe a torch module; a model says itself what it takes. Leave them out")
    if isinstance(model, (str, os.PathLike)) and os.fspath(model).endswith(".pt2"):
        from xpuruntime.engines.torch.program.reading import inspect_program

        return inspect_program(os.fspath(model), trust=trust)
    return inspect_model(model)
