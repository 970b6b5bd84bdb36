# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Reference intermediates: tensors inside of a model as fp32 on the CPU computes them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from xpuruntime.engines.model import ModelInfo

__all__ = ["Inside"]

#: Types of tensors, as ONNX Runtime writes them, that come back as plain arrays.
_PLAIN = frozenset(
    f"tensor({name})"
    for name in (
        "float", "double", "float16", "bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"
    )
)  # fmt: skip


class Inside:
    """A model to look into."""

    def __init__(self, info: ModelInfo, feeds: Mapping[str, Any]) -> None:
        self.info, self.feeds = info, feeds
        self.proto = info.named_proto()
        self.nodes = list(self.proto.graph.node)
        self.outputs = {value.name for value in self.proto.graph.output}
        self.described = _described(self.proto)

    def reference(self, names: Sequence[str]) -> dict[str, Any]:
        """Return those of the tensors that are plain arrays, as fp32 on the CPU computes them."""
        from xpuruntime.engines.model_source import ModelSource
        from xpuruntime.engines.onnxruntime._private_api import raw_session
        from xpuruntime.engines.onnxruntime.failures import translate
        from xpuruntime.engines.onnxruntime.opening import open_session
        from xpuruntime.engines.onnxruntime.settings import OnnxRuntimeSettings

        proto = self._copy()
        for name in dict.fromkeys(names):
            if name not in self.outputs:
                proto.graph.output.add().name = name  # ONNX Runtime knows its type
        source = ModelSource(proto.SerializeToString(), self.info.base_dir, self.info.path)
        session = open_session(OnnxRuntimeSettings(provider="CPUExecutionProvider"), source, "cpu").session
        types = {output.name: output.type for output in session.get_outputs()}
        wanted = [name for name in dict.fromkeys(names) if types.get(name) in _PLAIN]
        try:
            arrays = raw_session(session).run(wanted, dict(self.feeds), None)
        except Exception as error:
            raise translate(error, doing=f"running {self.info.path}", device="cpu") from None
        return dict(zip(wanted, arrays, strict=True))

    def with_outputs(self, arrays: Mapping[str, Any]) -> ModelInfo:
        """Return the model with these tensors as further outputs."""
        from onnx import helper

        from xpuruntime.engines.model import inspect_edited

        proto = self._copy()
        fixed = all(isinstance(size, int) for tensor in self.info.inputs for size in tensor.shape or ("?",))
        for name, array in arrays.items():
            if name in self.outputs:
                continue
            if name in self.described:
                proto.graph.output.append(self.described[name])
                continue
            shape = list(array.shape) if fixed else [f"{name}.{axis}" for axis in range(array.ndim)]
            kind = helper.np_dtype_to_tensor_dtype(array.dtype)
            proto.graph.output.append(helper.make_tensor_value_info(name, kind, shape))
        return inspect_edited(self.info, proto)

    def _copy(self) -> Any:
        proto = type(self.proto)()
        proto.CopyFrom(self.proto)
        return proto


def _described(proto: Any) -> dict[str, Any]:
    """Return the types of tensors inside of a graph, as far as ONNX knows all of their dimensions."""
    from onnx import shape_inference

    try:
        found = shape_inference.infer_shapes(proto).graph.value_info
    except Exception:  # it refuses models that engines run: then the types are taken from the reference
        return {}
    return {
        value.name: value
        for value in found
        if value.type.tensor_type.HasField("shape")
        and all(dim.dim_param or dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim)
    }
