# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model repository for Triton's Python backend, whose model opens a session of xpuruntime under the lock."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from xpuruntime.engines.native_export.native_config import NativeConfig
from xpuruntime.engines.native_export.triton_config import ModelConfig, tensor_configs
from xpuruntime.locks.export.portable import LOCK, PortableExporter

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["TritonPythonExporter"]


class TritonPythonExporter(PortableExporter):
    """Writes ``NAME/config.pbtxt`` and ``NAME/1/model.py`` with model and lock beside it."""

    targets: ClassVar[dict[str, str]] = {"triton-python": "a model repository for Triton's Python backend"}

    def write(self, target: str, folder: Path) -> NativeConfig:
        """Write the repository."""
        del target
        job = self.job
        place = folder / job.name
        names = self.copy_model(place / "1")
        self.copy_lock(place / "1")
        info = job.request.model
        cuda = job.request.device.startswith("cuda")
        config = ModelConfig(
            name=job.name,
            backend="python",
            inputs=tensor_configs(info.inputs, job.name, backend="Python"),
            outputs=tensor_configs(info.outputs, job.name, backend="Python"),
            gpus=(int(job.request.device.partition(":")[2] or 0),) if cuda else (),
        )
        config.write(folder, job.digest)
        text = _MODEL.format(name=job.name, digest=job.digest, model=names[0], lock=LOCK)
        (place / "1" / "model.py").write_text(text, encoding="utf-8")
        return NativeConfig(
            outcomes=self.outcomes("the session is opened under the lock"),
            entry=config.entry,
            command="tritonserver --model-repository=.",
            notes=(
                "the interpreter of Triton's stub needs xpuruntime and the engine: the stub of the released images is "
                "Python 3.12, another one is named by the parameter EXECUTION_ENV_PATH",
                "the lock holds on a machine like that which it was made on, and the model does not load elsewhere",
                "the repository was written after Triton's documentation; the server was not run",
            ),
        )


_MODEL = '''\
"""The model {name}, opened under the lock {digest}. Written by xrt export."""

from pathlib import Path

import numpy as np
import triton_python_backend_utils as pb_utils

import xpuruntime


class TritonPythonModel:
    def initialize(self, args):
        folder = Path(args["model_repository"]) / args["model_version"]
        self.session = xpuruntime.InferenceSession(folder / {model!r}, lock=folder / {lock!r})

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            outputs = self.session.run({{one.name(): one.as_numpy() for one in request.inputs()}})
            tensors = [pb_utils.Tensor(name, np.asarray(outputs[name])) for name in request.requested_output_names()]
        except Exception as error:
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def finalize(self):
        self.session.close()
'''
