# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GraphStatus`: whether a session can run as a captured CUDA graph, and which nodes prevent it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["BlockerKind", "GraphBlocker", "GraphStatus", "named", "status_text"]

#: What can prevent a graph.
BlockerKind = Literal["placement", "copy", "control_flow", "data_dependent", "sync"]


class GraphBlocker(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that work on the device cannot be captured with.

    Attributes
    ----------
    node : str
        The source node; of what the engine inserted, its unit; of what is counted only, where it is.
    op : str
    kind : {"placement", "copy", "control_flow", "data_dependent", "sync"}
        It runs elsewhere; it copies between host and device; it decides what runs; the size of what it makes is known
        only when it has run; it waits for the device.
    reason : str
        One sentence.
    """

    node: str
    op: str
    kind: BlockerKind
    reason: str


class GraphStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a session can run as a captured CUDA graph.

    Attributes
    ----------
    status : {"not_applicable", "captured", "refused", "blocked", "possible", "unknown"}
        It runs on no CUDA device; a binding of the session captured one; the engine refused to; nodes that were
        observed prevent it; nothing that was observed does; too little was observed to tell.
    asked : {"off", "prefer", "require"}
        ``execution.cuda_graph``.
    reason : str
        One or two sentences: why, and what to do.
    blockers : tuple of GraphBlocker
        In the order in which the units ran.
    holds_for : tuple of str
        What a captured graph is tied to, such as sizes that the model leaves open.
    """

    status: Literal["not_applicable", "captured", "refused", "blocked", "possible", "unknown"]
    asked: Literal["off", "prefer", "require"]
    reason: str
    blockers: tuple[GraphBlocker, ...] = ()
    holds_for: tuple[str, ...] = ()


def status_text(status: GraphStatus) -> str:
    """Return the status in words."""
    return {"not_applicable": "does not apply"}.get(status.status, status.status)


def named(blockers: Sequence[GraphBlocker], most: int = 4) -> str:
    """Return the first nodes with their operators, and how many there are beside them."""
    told = ", ".join(f"{one.node} ({one.op})" for one in blockers[:most])
    return told + (f" and {len(blockers) - most} more" if len(blockers) > most else "")
