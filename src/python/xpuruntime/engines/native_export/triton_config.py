# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ModelConfig`: the ``config.pbtxt`` of a model in a repository of Triton, as text."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec

from xpuruntime.errors import UnsupportedOperationError

if TYPE_CHECKING:
    from pathlib import Path

    from xpuruntime.engines.model.facts import TensorInfo

#: Starts Triton on a repository, with the configuration as it is written.
TRITON_COMMAND = "tritonserver --model-repository=. --disable-auto-complete-config"

_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "bfloat16": "TYPE_BF16",
    "string": "TYPE_STRING",
}


class TensorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One input or output: name, Triton's type, and its dimensions, -1 for those that are open; [1] for a scalar."""

    name: str
    data_type: str
    dims: tuple[int, ...]


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What ``config.pbtxt`` says. Batches are as the model takes them: ``max_batch_size`` is 0."""

    name: str
    backend: str
    inputs: tuple[TensorConfig, ...]
    outputs: tuple[TensorConfig, ...]
    gpus: tuple[int, ...] = ()
    graph_level: int | None = None
    accelerator: tuple[str, dict[str, str]] | None = None
    parameters: dict[str, str] = {}
    model_file: str = ""

    @property
    def entry(self) -> str:
        """The file's place in its repository."""
        return f"{self.name}/config.pbtxt"

    def write(self, repository: Path, digest: str) -> None:
        """Write the file into a repository that has the model's folder."""
        (repository / self.entry).write_text(self.text(digest), encoding="utf-8")

    def text(self, digest: str) -> str:
        """Return the text of the file; `digest` is that of the lock, for a comment."""
        lines = [f"# Written by xrt export from the lock {digest}", f"name: {_quoted(self.name)}"]
        lines += [f"backend: {_quoted(self.backend)}", "max_batch_size: 0"]
        if self.model_file:
            lines.append(f"default_model_filename: {_quoted(self.model_file)}")
        for word, tensors in (("input", self.inputs), ("output", self.outputs)):
            lines += [f"{word} {{\n{_tensor(tensor)}\n}}" for tensor in tensors]
        kind = "KIND_GPU" if self.gpus else "KIND_CPU"
        gpus = f" gpus: [ {', '.join(map(str, self.gpus))} ]" if self.gpus else ""
        lines.append(f"instance_group {{ count: 1 kind: {kind}{gpus} }}")
        lines += self._optimization()
        lines += [_parameter(name, value) for name, value in sorted(self.parameters.items())]
        return "\n".join(lines) + "\n"

    def _optimization(self) -> list[str]:
        inside = []
        if self.graph_level is not None:
            inside.append(f"  graph {{ level: {self.graph_level} }}")
        if self.accelerator is not None:
            name, values = self.accelerator
            inside.append(f"  execution_accelerators {{\n    gpu_execution_accelerator {{\n      name: {_quoted(name)}")
            inside += [
                f"      parameters {{ key: {_quoted(key)} value: {_quoted(value)} }}"
                for key, value in sorted(values.items())
            ]
            inside.append("    }\n  }")
        return ["optimization {", *inside, "}"] if inside else []


def tensor_configs(
    tensors: Iterable[TensorInfo],
    model: str,
    *,
    backend: str,
    without: Iterable[str] = ("bfloat16",),
    scalars: bool = True,
) -> tuple[TensorConfig, ...]:
    """Return the tensors of a model as Triton states them."""
    configs = []
    for tensor in tensors:
        kind = _TYPES.get(tensor.dtype)
        if tensor.dtype in without:
            raise UnsupportedOperationError(
                f"{tensor.name!r} of {model} has the type {tensor.dtype}, which Triton's {backend} backend does not "
                "take. Fix: put a Cast at it into the model, for example to float32, and lock that; or serve it with "
                "`xrt serve`"
            )
        if kind is None or tensor.shape is None or getattr(tensor, "kind", "tensor") != "tensor":
            what = "an unknown rank" if kind is not None else f"the type {tensor.dtype}"
            raise UnsupportedOperationError(
                f"{tensor.name!r} of {model} has {what}, which Triton's configuration cannot express. Fix: "
                "export the model with tensors of a known rank and of a type that Triton has"
            )
        if not tensor.shape and not scalars:
            raise UnsupportedOperationError(
                f"{tensor.name!r} of {model} has rank 0. Triton has no such tensors, and its {backend} backend is not "
                "known to take [1] for one. Fix: give it the shape [1] in the model, or export to triton-python"
            )
        dims = tuple(size if isinstance(size, int) else -1 for size in tensor.shape) or (1,)
        configs.append(TensorConfig(name=tensor.name, data_type=kind, dims=dims))
    return tuple(configs)


def _tensor(config: TensorConfig) -> str:
    dims = ", ".join(map(str, config.dims))
    return f"  name: {_quoted(config.name)}\n  data_type: {config.data_type}\n  dims: [ {dims} ]"


def _parameter(name: str, value: str) -> str:
    return f"parameters {{ key: {_quoted(name)} value: {{ string_value: {_quoted(value)} }} }}"


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=True) if text.isascii() else '"' + _escaped(text) + '"'


def _escaped(text: str) -> str:
    return "".join(
        chr(byte) if 32 <= byte < 127 and byte not in (34, 92) else f"\\{byte:03o}" for byte in text.encode()
    )
