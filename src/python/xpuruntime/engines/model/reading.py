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
    """Return what is known of a model before any engine sees it.

    Parameters
    ----------
    model : path, bytes, onnx.ModelProto or torch.nn.Module
        An ``.onnx`` file or what is in one, a ``.pt2`` file of PyTorch, or a module.
    example_inputs : mapping of str to tensor, or sequence of tensors, optional
        For a module: what it is called with once, to learn its operators and results.
    trust : bool
        Load a ``.pt2`` file although that can run code of the file.

    Raises
    ------
    ModelError
        The file is missing, corrupt, or no model.
    InputError
        Example inputs are missing for a module, or given for a file.
    """
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
