# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Known silent errors of engines: operators that a version computes otherwise than ONNX defines them, without an error.

The rows are data, in ``known_errors.json`` beside each engine's adapter; tests run each row's model on the installed
version and fail where the row and the version no longer agree.
"""

from __future__ import annotations

import contextlib
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from xpuruntime.engines.model.graph import normal_domain, subgraphs
from xpuruntime.engines.saturation import saturates_on, saturating_nodes
from xpuruntime.evidence.records import Control

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    import onnx

    from xpuruntime.engines.model import ModelInfo

__all__ = ["KEY", "KnownError", "applies_to", "control_of", "known_errors", "nodes_with_errors"]

#: The key under which plans and reports name such nodes; it is in no policy file.
KEY = "execution.operators"
_NAMED = 4


class KnownError(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One silent error, and the nodes that it concerns.

    Attributes
    ----------
    id : str
    ops : tuple of str
        Operators of the ONNX standard.
    wrong : str
        What the engine computes, as the end of a sentence that opens with the node.
    first, last : str
        Versions that are known to be wrong, both included; ``"2026.4"`` stands for all of 2026.4.
    devices : tuple of str
        Kinds of devices; empty: all.
    opsets : (int, int) or None
        First and last version of the ONNX standard.
    attributes : dict of str to list
        Attributes and the values with which they are wrong; one that is left out of a node is right.
    nonzero : tuple of str
        Attributes that must have an element other than zero.
    inputs : tuple of int
        Optional inputs that must be there.
    inner_axis : bool
        Whether the attribute ``axis``, which defaults to 1, must be another one than the last of at least three.
    where : {"anywhere", "subgraph"}
        ``"subgraph"``: in the main graph the adapter avoids it.
    dequantised : bool
        Whether its first input must be what a DequantizeLinear makes: the engine computes it in integers.
    saturates : bool
        Whether it is about 8-bit products of a processor that cuts their sums off, see `saturating_nodes`.
    reference : str
        An issue of the engine's tracker, or the case of the ONNX backend tests that shows it.
    """

    id: str
    ops: tuple[str, ...]
    wrong: str
    first: str
    last: str
    reference: str
    devices: tuple[str, ...] = ()
    opsets: tuple[int, int] | None = None
    attributes: dict[str, list[int | str]] = {}
    nonzero: tuple[str, ...] = ()
    inputs: tuple[int, ...] = ()
    inner_axis: bool = False
    where: Literal["anywhere", "subgraph"] = "anywhere"
    dequantised: bool = False
    saturates: bool = False


@cache
def known_errors(engine: str) -> tuple[KnownError, ...]:
    """Return the rows of an engine; empty for one without a table."""
    path = Path(__file__).parent / engine / "known_errors.json"
    if not engine.isidentifier() or not path.is_file():
        return ()
    return msgspec.json.decode(path.read_bytes(), type=tuple[KnownError, ...])


def applies_to(error: KnownError, version: str | None, device: str) -> bool:
    """Whether a row is about a version of its engine and a device. A version that is not known may be any."""
    if error.devices and device.partition(":")[0] not in error.devices:
        return False
    if version is None:
        return True
    here = _numbers(version)
    first, last = _numbers(error.first), _numbers(error.last)
    return first <= here and here[: len(last)] <= last


def nodes_with_errors(
    model: ModelInfo, errors: tuple[KnownError, ...], features: Collection[str] = ()
) -> list[tuple[str, KnownError]]:
    """Return the nodes of a model that rows are about, by name, with their row.

    Parameters
    ----------
    model : ModelInfo
    errors : tuple of KnownError
    features : collection of str
        Of the processor.
    """
    ops = {name.rpartition(":")[2] for name in model.ops}
    saturating = [one for one in errors if one.saturates] if saturates_on(features) else []
    saturated = [(name, error) for error in saturating for name in saturating_nodes(model)]
    wanted = [one for one in errors if not one.saturates and ops.intersection(one.ops)]
    if not wanted:
        return saturated
    proto = model.named_proto()
    opset = next((int(o.version) for o in proto.opset_import if normal_domain(o.domain) == ""), 1)
    ranks = _ranks(proto) if any(one.inner_axis for one in wanted) else {}
    nodes = list(_nodes(proto.graph))
    integers = {name for node, _ in nodes if node.op_type == "DequantizeLinear" for name in node.output}
    return saturated + [
        (str(node.name), error)
        for node, inside in nodes
        for error in wanted
        if node.op_type in error.ops and not normal_domain(node.domain) and _concerns(error, node, opset, ranks, inside)
        if not error.dequantised or node.input[0] in integers
    ]


def control_of(
    engine: str, version: str | None, device: str, model: ModelInfo, features: Collection[str]
) -> Control | None:
    """Return what a plan says of nodes that the engine is known to compute wrongly; ``None`` where there are none."""
    errors = tuple(one for one in known_errors(engine) if applies_to(one, version, device))
    found = nodes_with_errors(model, errors, features)
    if not found:
        return None
    named = "; ".join(f"{name!r} {error.wrong} ({error.reference})" for name, error in found[:_NAMED])
    which = engine if version is None else f"{engine} {version}"
    more = f"; and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return Control(
        key=KEY,
        requested="as ONNX defines them",
        resolved="-",
        enforceability="unsupported",
        reason=f"{which} is known to compute some nodes wrongly, and without an error: {named}{more}",
        fix="use another engine, or export the model with other operators",
    )


def _concerns(error: KnownError, node: onnx.NodeProto, opset: int, ranks: dict[str, int], inside: bool) -> bool:
    """Whether a node has the opset, place, attributes and inputs with which a row is wrong."""
    if error.where == "subgraph" and not inside:
        return False
    if error.opsets is not None and not error.opsets[0] <= opset <= error.opsets[1]:
        return False
    given = {one.name: one for one in node.attribute}
    for name, values in error.attributes.items():
        if name not in given or _value(given[name]) not in values:
            return False
    if error.nonzero and not any(any(given[name].ints) for name in error.nonzero if name in given):
        return False
    if not all(place < len(node.input) and node.input[place] for place in error.inputs):
        return False
    if error.inner_axis:
        rank = ranks.get(node.input[0])
        axis = int(given["axis"].i) if "axis" in given else 1
        return rank is None or (rank > 2 and axis % rank != rank - 1)
    return True


def _value(attribute: onnx.AttributeProto) -> int | str:
    return attribute.s.decode("utf-8", "replace") if attribute.s else int(attribute.i)


def _nodes(graph: onnx.GraphProto, *, inside: bool = False) -> Iterator[tuple[onnx.NodeProto, bool]]:
    for node in graph.node:
        yield node, inside
        for _, inner in subgraphs(node):
            yield from _nodes(inner, inside=True)


def _ranks(proto: onnx.ModelProto) -> dict[str, int]:
    """Return the rank of every tensor for which it is known."""
    import onnx

    with contextlib.suppress(RuntimeError, ValueError, TypeError, onnx.shape_inference.InferenceError):
        proto = onnx.shape_inference.infer_shapes(proto)
    found: dict[str, int] = {}
    waiting = [proto.graph]
    for graph in waiting:
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.HasField("tensor_type") and value.type.tensor_type.HasField("shape"):
                found[value.name] = len(value.type.tensor_type.shape.dim)
        for tensor in graph.initializer:
            found[tensor.name] = len(tensor.dims)
        waiting.extend(inner for node in graph.node for _, inner in subgraphs(node))
    return found


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.match(r"\d+(?:\.\d+)*", version)[0].split("."))  # type: ignore[index]
