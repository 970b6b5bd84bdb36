# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Comparison of a rewritten model with the one it was made from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.graph import graphs
from xpuruntime.errors import AccuracyError, InputError, XpuRuntimeError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.conversion_log import ConversionLog
    from xpuruntime.engines.model_source import ModelSource
    from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting
    from xpuruntime.evidence.tolerances import ProbeResult, Tolerance

__all__ = ["check_rewriting"]

_COMPARED = "the rewritten graph was compared with the original on a probe input"
_NOT_COMPARED = "the rewritten graph was not compared with the original"


def check_rewriting(
    rewriting: Rewriting,
    request: Request,
    open_plain: Callable[[ModelSource], Any],
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    session: Any,
    log: ConversionLog,
) -> None:
    """Run the rewritten session and one without rewrites on the same probe input."""
    from xpuruntime.engines.model.shapes import with_shapes
    from xpuruntime.engines.precision import probe_feeds
    from xpuruntime.evidence.tolerances import compare_within

    info = with_shapes(request.model, request.policy)
    try:
        feeds = probe_feeds(info)
    except InputError as error:
        log.add(_NOT_COMPARED, error.reason)
        return
    narrow = [t.name for t in (*info.inputs, *info.outputs) if t.dtype == "bfloat16"]
    if narrow:
        log.add(_NOT_COMPARED, f"{narrow[0]!r} is bfloat16, which NumPy has not")
        return
    tolerance = _tolerance(rewriting)
    plain = open_plain(rewriting.before)
    try:
        expected = run(plain, feeds)
    except XpuRuntimeError as error:  # inputs that are generated may be none that a model takes
        log.add(_NOT_COMPARED, f"it refuses the probe input: {error.reason}")
        return
    result = compare_within(expected, run(session, feeds), tolerance, request.model.random_outputs)
    if result.passed:
        log.add(_NOT_COMPARED if result.inconclusive else _COMPARED, result.inconclusive or str(result))
        return
    where = _first_difference(rewriting, open_plain, run, feeds, tolerance)
    msg = (
        f"{request.model.path} on {request.device}: with xpuruntime kernels its results differ from ONNX Runtime's own "
        f"on a probe input. {where}. Of the model's outputs, {_failing(result)}. Ask for another kernel for this node, "
        "or remove the kernel key"
    )
    raise AccuracyError(msg, engine="onnxruntime", device=request.device)


def _tolerance(rewriting: Rewriting) -> Tolerance:
    """Return the tolerance of the least exact type that was rewritten."""
    from xpuruntime.engines.onnxruntime.rewriting.graph import DTYPES
    from xpuruntime.evidence.tolerances import TOLERANCES

    held = {DTYPES.get(tensor.data_type) for graph in graphs(rewriting.model) for tensor in graph.initializer}
    held |= {DTYPES.get(v.type.tensor_type.elem_type) for v in rewriting.model.graph.input}
    words: list[str] = [word for word in ("bf16", "fp16") if word in held]
    if not words and any(one.attributes.get("allow_tf32") for one in rewriting.rewrites):
        words = ["tf32"]
    return TOLERANCES[words[0] if words else "fp32"]


def _failing(result: ProbeResult) -> str:
    worst = next(one for one in result.outputs if not one.passed)
    return f"{worst.name!r} is out of tolerance: {worst.reason}"


def _first_difference(
    rewriting: Rewriting,
    open_plain: Callable[[ModelSource], Any],
    run: Callable[[Any, Mapping[str, Any]], Mapping[str, Any]],
    feeds: Mapping[str, Any],
    tolerance: Tolerance,
) -> str:
    """Name the first rewritten node, in the order of the graph, whose result differs."""
    from xpuruntime.evidence.tolerances import compare_within

    tapped = {one.output: one.node for one in rewriting.rewrites if one.graph == ""}
    order = [name for node in rewriting.model.graph.node for name in node.output if name in tapped]
    try:
        expected = run(open_plain(rewriting.sourced(rewriting.model, order)), feeds)
        got = run(open_plain(rewriting.written(rewriting.rewrites, order)), feeds)
    except XpuRuntimeError as error:
        return f"Which node it is could not be found: {error.reason}"
    for name in order:
        one = {name: expected[name]}
        result = compare_within(one, {name: got[name]}, tolerance)
        if not result.passed:
            return f"The first node that differs is {tapped[name]!r} ({_failing(result)})"
    return "No single rewritten node differs by more than the tolerance: the differences add up"
