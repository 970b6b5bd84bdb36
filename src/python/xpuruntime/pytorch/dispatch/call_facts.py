# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`facts_of_call`: the `CallFacts` of one call in PyTorch, recorded, routed or only foreseen."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.policies.call_facts import UNKNOWN, CallFacts, Fact, unknown_sizes
from xpuruntime.pytorch.dispatch import call_state

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["facts_of_call"]


def facts_of_call(
    op: str,
    *,
    device: torch.device | str | None,
    dtype: torch.dtype | str | None,
    phase: Fact[str],
    module: str,
    node: str | None = None,
    sizes: Mapping[str, int] | None = None,
) -> CallFacts:
    """Return the facts of a call.

    Parameters
    ----------
    op : str
        Operation of a `KernelPolicy`.
    device : torch.device or str or None
        ``"cuda"`` for a CUDA device of unknown index; ``None`` where nothing of it is known.
    dtype : torch.dtype or str or None
        A type of PyTorch, or the word that policies have for it; ``None`` where it is not known.
    phase : str or None or Unknown
    module : str
        Path of the module that calls; empty outside of all modules.
    node : str, optional
        Name of the node of an exported program; default: the path of the module, which rules by node match as well.
    sizes : mapping of str to int, optional
        All that the call has; without them, those of the operation are unknown.
    """
    kind, arch = _device(device)
    word: Any = UNKNOWN
    if isinstance(dtype, torch.dtype):
        word = call_state.DTYPES.get(dtype)
    elif dtype:
        word = dtype
    known: dict[str, Any] = {**(unknown_sizes(op) if sizes is None else sizes)}
    return CallFacts(
        op=op,
        dtype=word,
        device=kind,
        arch=arch,
        phase=phase or None,
        module=module or None,
        node=node or module or None,
        **known,
    )


def _device(device: torch.device | str | None) -> tuple[Fact[str], Fact[str]]:
    """Return a device and its architecture as rules name them."""
    if not device:
        return UNKNOWN, UNKNOWN
    if device == "cuda":
        return device, UNKNOWN
    made = torch.device(device)
    if made.type != "cuda":
        return made.type, None
    return f"cuda:{made.index or 0}", call_state.arch_of(made)
