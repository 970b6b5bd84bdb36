# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`quantize`: a float model and samples to a model that an engine computes in integers."""

from __future__ import annotations

import contextlib
import logging
import threading
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.engines.model.check import complaint_about
from xpuruntime.engines.model.file import refuse
from xpuruntime.engines.model.graph import graphs, set_node_names, sort_nodes
from xpuruntime.engines.quantization.style import HEAVY, STYLES, Style, for_this_cpu, without_kernel
from xpuruntime.errors import EngineError, XpuRuntimeError
from xpuruntime.files.scratch import ScratchFolder

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.quantization.calibration import Calibration
    from xpuruntime.engines.quantization.preparing import Prepared

_QDQ = ("QuantizeLinear", "DequantizeLinear")


class LeftNode(msgspec.Struct, frozen=True, kw_only=True):
    """A node with a product in it that stays in floats, and why.

    `by_rule`: the caller's patterns name it. `unserved`: the engine has no integer kernel for it.
    """

    name: str
    op: str
    reason: str
    by_rule: bool = False
    unserved: bool = False


class QuantizedModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model after `quantize`. Its inputs and outputs have the dtypes they had before."""

    data: bytes
    style: Style
    tool: str
    samples: int
    calibration: str
    quantized_nodes: tuple[str, ...]
    left_nodes: tuple[LeftNode, ...]
    regions: dict[str, tuple[str, ...]]
    notes: tuple[str, ...]


def quantize(
    model: ModelInfo, calibration: Calibration, style: str | Style, *, keep_fp32: Sequence[str] = ()
) -> QuantizedModel:
    """Quantize a float32 model.

    Nothing is written but a temporary folder, which is gone afterwards.
    """
    chosen = for_this_cpu(STYLES[style] if isinstance(style, str) else style)
    try:
        with ScratchFolder("quantizing") as name, quiet():
            return _quantize(model, calibration, chosen, tuple(keep_fp32), Path(name))
    except XpuRuntimeError:
        raise
    except OSError as error:
        raise EngineError(
            f"cannot quantize {model.path!r}: the temporary folder cannot be used ({error.strerror or error}). "
            "Fix: make room, or point TMPDIR at a folder with some times the model's size free"
        ) from None
    except ModuleNotFoundError as error:
        raise EngineError(
            f"cannot quantize {model.path!r}: {error}, which the quantizer needs. Fix: pip install onnxruntime-gpu"
        ) from None
    except Exception as error:  # the quantizers raise anything
        raise EngineError(
            f"cannot quantize {model.path!r}: {type(error).__name__} in the quantizer: "
            f"{' '.join(str(error).split())[:300]}. Fix: keep the node at fault in floats by a rule with match.node "
            "and precision: fp32, or use precision fp16"
        ) from None


def _quantize(
    model: ModelInfo, calibration: Calibration, style: Style, keep: tuple[str, ...], folder: Path
) -> QuantizedModel:
    from xpuruntime.engines.quantization.preparing import prepare
    from xpuruntime.engines.quantization.quantizers import nncf_version, quantize_nncf, quantize_qdq

    if style.tool == "nncf":
        tool = f"nncf {nncf_version()}"
    else:
        import onnxruntime

        tool = f"onnxruntime {onnxruntime.__version__}"
    prepared = prepare(model, style, folder)
    leave, unserved = prepared.matching(keep), without_kernel(prepared.proto, style)
    if style.tool == "nncf":
        proto = quantize_nncf(prepared, calibration, style, leave, folder)
    else:
        proto = quantize_qdq(prepared, calibration, style, (*leave, *unserved), folder)
    sort_nodes(proto.graph)  # quantizers append what they insert, behind subgraphs that read it
    _tidy(proto)
    quantized, left = _account(prepared, proto, leave, unserved)
    if not quantized:
        raise refuse(
            model.path,
            f"nothing in it can be quantized: {_why_nothing(prepared, leave, unserved)}",
            "use precision: fp32, or fp16, which also converts what is inside of If, Loop and Scan",
        )
    _check(proto, model.path)
    notes = [
        f"{len(quantized)} of {len(prepared.proto.graph.node)} nodes were quantized by {tool} ({style}) from "
        f"{calibration.count} samples of {calibration.origin}, sha256 {calibration.digest[:12]}",
        *prepared.notes,
        *_folded(prepared),
    ]
    for (op, reason), count in Counter((node.op, node.reason) for node in left).most_common(20):
        notes.append(f"left in floats: {op}: {reason}" + (f" ({count} nodes)" if count > 1 else ""))
    names = [node.name for node in model.nodes]
    notes += [
        f"the pattern {p!r} names no node of the model" for p in keep if not any(fnmatchcase(n, p) for n in names)
    ]
    return QuantizedModel(
        data=bytes(proto.SerializeToString(deterministic=True)),
        style=style,
        tool=tool,
        samples=calibration.count,
        calibration=calibration.digest,
        quantized_nodes=tuple(dict.fromkeys(s for name in quantized for s in prepared.regions[name])),
        left_nodes=tuple(left),
        regions=_regions(prepared, proto),
        notes=tuple(notes),
    )


def _regions(prepared: Prepared, proto: onnx.ModelProto) -> dict[str, tuple[str, ...]]:
    """Return node to source nodes; an activation that is gone is with the node before it."""
    there = {node.name for node in proto.graph.node}
    makers = {output: node for node in prepared.proto.graph.node for output in node.output if output}
    regions: dict[str, list[str]] = {}
    for node in prepared.proto.graph.node:
        holder = node
        while holder.name not in there and holder.input and holder.input[0] in makers:
            holder = makers[holder.input[0]]
        regions.setdefault(holder.name, []).extend(prepared.regions[node.name])
    return {name: tuple(dict.fromkeys(sources)) for name, sources in regions.items() if sources}


def _why_nothing(prepared: Prepared, leave: Sequence[str], unserved: set[str]) -> str:
    """Say why no node became quantized: rules, operands, or control flow, with the numbers of each."""
    inside = Counter(
        node.op_type
        for graph in graphs(prepared.proto)
        if graph is not prepared.proto.graph
        for node in graph.node
        if node.op_type in HEAVY
    )
    outside = [node for node in prepared.proto.graph.node if node.op_type in HEAVY]
    reasons = []
    ruled = sum(node.name in leave for node in outside)
    if ruled and ruled == len(outside) and not inside:
        return "rules keep every node in floats"
    if ruled:
        reasons.append(f"rules keep {ruled} of its products in floats")
    counted = Counter(node.op_type for node in outside if node.name in unserved and node.name not in leave)
    if counted:
        reasons.append(f"the engine has no integer kernel for {_counted(counted)} of the outer graph")
    counted = Counter(node.op_type for node in outside if node.name not in (*leave, *unserved))
    if counted:
        reasons.append(f"{_counted(counted)} of the outer graph cannot be, such as products of two activations")
    if inside:
        reasons.append(f"{_counted(inside)} are inside of If, Loop or Scan, whose nodes the quantizers leave in floats")
    return ", and ".join(reasons) or f"it has no {', '.join(HEAVY)} with constant weights"


def _counted(ops: Counter[str]) -> str:
    return ", ".join(f"{count} {op}" for op, count in ops.most_common())


def _tidy(proto: onnx.ModelProto) -> None:
    set_node_names(proto)
    del proto.metadata_props[:]


def _account(
    prepared: Prepared, proto: onnx.ModelProto, leave: Sequence[str], unserved: set[str]
) -> tuple[list[str], list[LeftNode]]:
    """Return the prepared nodes that read quantized values, and the products that do not."""
    op_by_output = {output: node.op_type for node in proto.graph.node for output in node.output}
    constant = {tensor.name for tensor in prepared.proto.graph.initializer}
    after = {node.name: node for node in proto.graph.node}
    quantized: list[str] = []
    left: list[LeftNode] = []
    for node in prepared.proto.graph.node:
        now = after.get(node.name)
        if now is None:  # an activation that the range of the quantized value before it stands for
            quantized.append(node.name)
            continue
        heavy = node.op_type in HEAVY
        read = [op_by_output.get(name) == "DequantizeLinear" for name in (now.input[:2] if heavy else now.input)]
        if node.name not in unserved and (all(read) if heavy else any(read)):
            quantized.append(node.name)
        elif heavy:
            ruled = node.name in leave
            weight = len(node.input) > 1 and node.input[1] in constant
            reason = (
                "a rule keeps it so"
                if ruled
                else "the engine has no integer kernel for it"
                if node.name in unserved
                else "the quantizer left it so"
                if weight
                else "its second operand is no constant"
            )
            left += [
                LeftNode(name=s, op=node.op_type, reason=reason, by_rule=ruled, unserved=node.name in unserved)
                for s in prepared.regions[node.name]
            ]
    return quantized, left


def _folded(prepared: Prepared) -> list[str]:
    several = {region for region in prepared.regions.values() if len(region) > 1}
    if not several:
        return []
    count, first = sum(len(region) for region in several), max(several, key=len)
    return [f"{count} nodes were folded into {len(several)} before, such as {' and '.join(sorted(first)[:3])}"]


def _check(proto: onnx.ModelProto, where: str) -> None:
    reason = complaint_about(proto)
    if reason is not None:
        raise refuse(
            where,
            f"quantizing gave an invalid graph: {reason}",
            "keep the node in floats by a rule, or use precision: fp32",
        )
    assert any(node.op_type in _QDQ for graph in graphs(proto) for node in graph.node)


#: `warnings` and the severity of ONNX Runtime's log belong to the whole process.
_LOCK = threading.RLock()
_WARNING, _FATAL = 2, 4


class _Mine(logging.Filter):
    """Drops records of one thread that come from ONNX Runtime's package."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        foreign = "onnxruntime" in record.pathname and "xpuruntime" not in record.pathname.rpartition("onnxruntime")[2]
        return not (record.thread == self._thread and foreign)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence ONNX Runtime's quantizer in this thread. It logs through the root logger, which is left as it was."""
    import onnxruntime as ort

    root, mine, nowhere = logging.getLogger(), _Mine(), logging.NullHandler()
    with _LOCK:
        root.addFilter(mine)
        root.addHandler(nowhere)  # or the first line would install a handler that stays
        ort.set_default_logger_severity(_FATAL)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield
        finally:
            ort.set_default_logger_severity(_WARNING)
            root.removeHandler(nowhere)
            root.removeFilter(mine)
