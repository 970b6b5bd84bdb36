# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernel decisions for the nodes of a session, by the dispatcher and by the rewriting when the model was loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from xpuruntime.evidence.kernel_records import KernelCandidate, KernelDecision, merged

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting
    from xpuruntime.engines.onnxruntime.rewriting.loading import Timed
    from xpuruntime.engines.onnxruntime.rewriting.rules import Rewrite, UnrewrittenNode
    from xpuruntime.evidence.kernel_records import DecisionSource
    from xpuruntime.ops.decision_log import Decision

__all__ = ["rewrite_decisions", "unreplaced_decisions"]

_OWN = "onnxruntime"


def rewrite_decisions(
    rewriting: Rewriting, decisions: Mapping[str, Sequence[Decision]], device: str
) -> tuple[KernelDecision, ...]:
    """Return the decisions of one instrumented pass."""
    return merged(_all(rewriting, decisions, device))


def unreplaced_decisions(left: Iterable[UnrewrittenNode], device: str) -> tuple[KernelDecision, ...]:
    """Return why nodes that xpuruntime kernels are asked for stay with ONNX Runtime."""
    return merged(_left(node, device) for node in left)


def _left(left: UnrewrittenNode, device: str) -> KernelDecision:
    candidates = tuple(
        KernelCandidate(id=word, config=config, accepted=False, reason=left.reason, measured_us=None)
        for word, _, config in (word.partition("@") for word in left.words)
    )
    return _by_own(left, device, left.key, "fallback", candidates)


def _by_own(
    node: UnrewrittenNode | Rewrite,
    device: str,
    asked_by: str,
    source: DecisionSource,
    candidates: tuple[KernelCandidate, ...],
    *notes: str,
) -> KernelDecision:
    """Return that ONNX Runtime's own operator serves a node."""
    return KernelDecision(
        op=node.kind,
        description=f"{node.kind} on {device}, by ONNX Runtime",
        nodes=(node.node,),
        module="",
        shapes={},
        dtype="",
        device=device,
        phase="",
        asked=node.words,
        asked_by=asked_by,
        source=source,
        chosen=None,
        config="",
        candidates=candidates,
        notes=notes,
        count=None,
    )


def _all(rewriting: Rewriting, decisions: Mapping[str, Sequence[Decision]], device: str) -> Iterator[KernelDecision]:
    from xpuruntime.ops.decision_log import as_record

    timed = {measured.rewrite.node: measured for measured in rewriting.timed if measured.replacement is not None}
    for rewrite in rewriting.rewrites:
        for decision in decisions.get(rewrite.node, ()):
            record = as_record(decision, (rewrite.node,))
            yield _with_own(record, timed[rewrite.node]) if rewrite.node in timed else record
    for left in rewriting.matches.left:
        yield _left(left, device)
    for loser in timed.values():
        if not loser.wins:
            yield _stays(loser, device)


def _with_own(record: KernelDecision, timed: Timed) -> KernelDecision:
    """Add what ONNX Runtime's own operator took when the session was loaded."""
    slower = timed.stock / timed.xpuruntime
    own = KernelCandidate(
        id=_OWN,
        config="",
        accepted=True,
        reason=f"takes {slower:.2f} times as long as xpuruntime's, as an operator alone",
        measured_us=timed.stock,
    )
    note = f"measured when the session was loaded, as operators alone: {timed}"
    return msgspec.structs.replace(record, candidates=(*record.candidates, own), notes=(*record.notes, note))


def _stays(timed: Timed, device: str) -> KernelDecision:
    """Return that ONNX Runtime's own operator was measured to be no slower than xpuruntime's."""
    ratio = timed.xpuruntime / timed.stock
    candidates = (
        KernelCandidate(id=_OWN, config="", accepted=True, reason="", measured_us=timed.stock),
        KernelCandidate(
            id=f"xpuruntime.{timed.rewrite.op}",
            config="",
            accepted=True,
            reason=f"takes {ratio:.2f} times as long as ONNX Runtime's own, as an operator alone",
            measured_us=timed.xpuruntime,
        ),
    )
    note = "measured when the session was loaded, as operators alone"
    return _by_own(timed.rewrite, device, "kernels.auto_strategy", "tuned", candidates, note)
