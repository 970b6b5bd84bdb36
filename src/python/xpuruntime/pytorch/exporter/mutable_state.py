# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Mutable state: buffers that an exported program writes to when it runs."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from xpuruntime.errors import XpuRuntimeWarning
from xpuruntime.pytorch import _private_api

if TYPE_CHECKING:
    import torch

__all__ = ["warn_state_changes", "written_state"]


def written_state(program: Any) -> tuple[str, ...]:
    """Return the buffers and inputs that an exported program writes to when it runs."""
    signature = program.graph_signature
    written_names = {**signature.buffers_to_mutate, **signature.user_inputs_to_mutate}
    names = {**signature.inputs_to_buffers, **signature.inputs_to_parameters}
    for node in program.graph.nodes:
        schema = _private_api.operator_schema(node.target)
        for argument, value in zip(schema.arguments if schema is not None else (), node.args, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and getattr(value, "op", None) == "placeholder":
                written_names[value.name] = names.get(value.name, value.name)
    return tuple(dict.fromkeys(written_names.values()))


def warn_state_changes(model: torch.nn.Module, changed: tuple[str, ...], what_becomes_of_it: str) -> str:
    """Warn of state that a module writes to, and return what is said."""
    names = ", ".join(map(repr, changed[:3])) + (" and others" if len(changed) > 3 else "")
    msg = (
        f"<{type(model).__qualname__}> changes {names} when it runs, and {what_becomes_of_it}. Fix: have forward take "
        "that state as an input and return the new one"
    )
    warnings.warn(msg, XpuRuntimeWarning, stacklevel=4)
    return msg
