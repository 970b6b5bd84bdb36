# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The quantizers, ONNX Runtime's and NNCF, and names of tensors that they give."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.graph import fresh_name, graphs
from xpuruntime.engines.quantization.style import HEAVY, IMAGE, Style
from xpuruntime.errors import EngineError
from xpuruntime.runtime.packages import install_command
from xpuruntime.runtime.worker import Worker, WorkerFailure

if TYPE_CHECKING:
    import onnx

    from xpuruntime.engines.quantization.preparing import Prepared


class Aliases:
    """Aliases of every tensor of a graph and its subgraphs; one name has one alias wherever it stands."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        names: dict[str, None] = {}

        def note(name: str) -> str:
            names[name] = None
            return name

        _rename(proto, note)
        prefix = "t"
        while any(name.startswith(prefix) for name in names):
            prefix += "_"
        #: Alias of each name.
        self.of = {name: f"{prefix}{index}#" for index, name in enumerate(names)}
        self._name = {alias: name for name, alias in self.of.items()}
        self._pattern = re.compile(re.escape(prefix) + r"\d+#")
        self._nodes = {node.name for graph in graphs(proto) for node in graph.node}

    def apply(self, proto: onnx.ModelProto) -> onnx.ModelProto:
        """Return a copy of the model under the aliases; nodes keep their names."""
        copy = type(proto)()
        copy.CopyFrom(proto)
        _rename(copy, self.of.__getitem__)
        return copy

    def undo(self, proto: onnx.ModelProto) -> None:
        """Give tensors their names again, and what the quantizer put in names derived from those, each unique."""
        taken, names = set(self.of), dict(self._name)

        def name_of(alias: str) -> str:
            if alias not in names:
                names[alias] = fresh_name(self._plain(alias), taken)
            return names[alias]

        _rename(proto, name_of)
        nodes = set(self._nodes)
        for graph in graphs(proto):
            for node in graph.node:
                if node.name not in self._nodes:
                    node.name = fresh_name(self._plain(node.name), nodes)

    def _plain(self, derived: str) -> str:
        return self._pattern.sub(lambda match: self._name.get(match[0], match[0]), derived)


def _rename(proto: onnx.ModelProto, change: Callable[[str], str]) -> None:
    for graph in graphs(proto):
        for value in (*graph.input, *graph.output, *graph.value_info, *graph.initializer):
            value.name = change(value.name)
        for sparse in graph.sparse_initializer:
            sparse.values.name = change(sparse.values.name)
        for annotation in graph.quantization_annotation:
            annotation.tensor_name = change(annotation.tensor_name)
            for entry in annotation.quant_parameter_tensor_names:
                entry.value = change(entry.value)
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [change(name) if name else name for name in names]


def quantize_qdq(
    prepared: Prepared, samples: Iterable[dict[str, Any]], style: Style, leave: Sequence[str], folder: Path
) -> onnx.ModelProto:
    """Return the prepared graph with QuantizeLinear and DequantizeLinear around the nodes of the style."""
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    aliases = Aliases(prepared.proto)
    aliased = aliases.apply(prepared.proto)

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            self._samples: Iterator[dict[str, Any]] = iter(samples)

        def get_next(self) -> dict[str, Any] | None:
            sample = next(self._samples, None)
            return None if sample is None else {aliases.of[name]: value for name, value in sample.items()}

    types = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8, "uint16": QuantType.QUInt16}
    source, out = folder / "aliased.onnx", folder / "quantized.onnx"
    source.write_bytes(aliased.SerializeToString(deterministic=True))
    source_path = str(source)
    activations, weights = types[style.activations], types[style.weights]
    if style.tool == "qnn":
        from onnxruntime.quantization import quantize
        from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config

        overrides = _channels_of_convolutions(aliased, leave, QuantType.QInt8) if style.per_channel else None
        config = get_qnn_qdq_config(
            source_path,
            Reader(),
            activation_type=activations,
            weight_type=weights,
            init_overrides=overrides,
            add_qtype_converts=False,
            nodes_to_exclude=list(leave),
        )
        config.op_types_to_quantize = sorted(config.op_types_to_quantize)
        quantize(source_path, str(out), config)
    else:
        exclude = sorted({*leave, *_outside_images(prepared.proto)})
        quantize_static(
            source_path,
            str(out),
            Reader(),
            quant_format=QuantFormat.QDQ,
            op_types_to_quantize=list(style.ops),
            per_channel=style.per_channel,
            reduce_range=style.reduced,
            activation_type=activations,
            weight_type=weights,
            nodes_to_exclude=exclude,
            extra_options={
                "ActivationSymmetric": style.symmetric,
                "WeightSymmetric": style.weights == "int8",
                "OpTypesToExcludeOutputQuantization": list(style.float_outputs),
                "QuantizeBias": not style.float_bias,
            },
        )
    proto = onnx.load(str(out))
    aliases.undo(proto)
    return proto


def _channels_of_convolutions(
    proto: onnx.ModelProto, leave: Sequence[str], kind: Any
) -> dict[str, list[dict[str, Any]]]:
    """Return overrides that give each channel of a convolution's weights a scale of its own."""
    constant = {tensor.name for tensor in proto.graph.initializer}
    readers: dict[str, set[str]] = {}
    for node in proto.graph.node:
        for name in node.input:
            readers.setdefault(name, set()).add(node.op_type)
    axes = {"Conv": 0, "ConvTranspose": 1}
    return {
        node.input[1]: [{"quant_type": kind, "axis": axes[node.op_type], "symmetric": True}]
        for node in proto.graph.node
        if node.op_type in axes
        and node.name not in leave
        and node.input[1] in constant
        and len(readers[node.input[1]]) == 1
    }


def _outside_images(proto: onnx.ModelProto) -> set[str]:
    """Return the additions, multiplications and poolings that stand between other things than convolutions."""
    # Between two convolutions the values are integers already. Elsewhere, as beside the products of a transformer, they
    # would only lose digits.
    makers = {output: node for node in proto.graph.node for output in node.output if output}
    inside: dict[str, bool] = {}

    def from_convolution(name: str) -> bool:
        node = makers.get(name)
        if node is None or node.op_type not in _IMAGE_PATH:
            return False
        if node.name not in inside:
            inside[node.name] = False
            inside[node.name] = node.op_type in _CONVOLUTIONS or all(
                from_convolution(input_) for input_ in node.input if input_ in makers
            )
        return inside[node.name]

    return {
        node.name
        for node in proto.graph.node
        if node.op_type in IMAGE and not (any(n in makers for n in node.input) and from_convolution(node.output[0]))
    }


_CONVOLUTIONS = ("Conv", "ConvTranspose")
_IMAGE_PATH = frozenset({*_CONVOLUTIONS, *IMAGE, "Relu", "Clip", "Concat", "MaxPool"})
assert set(_CONVOLUTIONS) <= set(HEAVY)


def nncf_version() -> str:
    """Return the installed version."""
    from importlib import metadata

    if find_spec("nncf") is None:
        raise EngineError(
            f"quantizing with NNCF was asked for, and it is not installed. Fix: {install_command('nncf')}, or "
            "leave the option out: then ONNX Runtime's quantizer is used",
            engine="openvino",
        )
    return metadata.version("nncf")


def quantize_nncf(
    prepared: Prepared, samples: Iterable[dict[str, Any]], style: Style, leave: Sequence[str], folder: Path
) -> onnx.ModelProto:
    """Return the prepared graph quantized by NNCF. Slow: a process is started for it.

    Of the style it obeys `reduced`.
    """
    import numpy as np
    import onnx

    nncf_version()
    for index, sample in enumerate(samples):
        np.savez(folder / f"sample-{index:06}.npz", **sample)
    ops = {node.op_type for node in prepared.proto.graph.node}
    try:
        with Worker(environment={"NNCF_CI": "1"}, timeout=math.inf) as worker:  # no telemetry
            worker.call(
                f"{__name__}:quantize_folder", folder=str(folder), leave=list(leave), reduced=style.reduced,
                transformer="LayerNormalization" in ops and "Conv" not in ops,
            )  # fmt: skip
    except WorkerFailure as failure:
        raise EngineError(
            f"NNCF cannot quantize this model: {(failure.error or failure.reason)[:300]}. "
            "Fix: leave the option out, so that ONNX Runtime's quantizer is used",
            engine="openvino",
        ) from failure
    return onnx.load(str(folder / "quantized.onnx"))


def quantize_folder(folder: str, leave: list[str], *, reduced: bool, transformer: bool) -> None:
    """Quantize the model in a folder, which has a file for each sample: what the process does."""
    import nncf
    import numpy as np
    import onnx

    room = Path(folder)

    def load(path: Path) -> dict[str, Any]:
        with np.load(path) as arrays:
            return dict(arrays)

    files = sorted(room.glob("sample-*.npz"))
    quantized = nncf.quantize(
        onnx.load(room / "prepared.onnx"),
        nncf.Dataset(files, load),
        subset_size=len(files),
        ignored_scope=nncf.IgnoredScope(names=leave) if leave else None,
        model_type=nncf.ModelType.TRANSFORMER if transformer else None,
        advanced_parameters=nncf.AdvancedQuantizationParameters(
            overflow_fix=nncf.OverflowFix.ENABLE if reduced else nncf.OverflowFix.DISABLE,
            disable_bias_correction=True,
            smooth_quant_alphas=nncf.AdvancedSmoothQuantParameters(matmul=-1),
        ),
    )
    (room / "quantized.onnx").write_bytes(quantized.SerializeToString(deterministic=True))
