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
        names = self.copy_model(place / "1", also=("model.py",))
        self.copy_lock(place / "1")
        info = job.request.model
        scalars = [one.name for one in info.inputs if one.shape == ()]
        cuda = job.request.device.startswith("cuda")
        config = ModelConfig(
            name=job.name,
            backend="python",
            inputs=tensor_configs(info.inputs, job.name, backend="Python"),
            outputs=tensor_configs(info.outputs, job.name, backend="Python"),
            gpus=(int(job.request.device.partition(":")[2] or 0),) if cuda else (),
        )
        config.write(folder, job.digest)
        text = _MODEL.format(
            name=job.name, digest=job.digest, model=names[0], lock=LOCK, scalars=scalars, environment=job.environment
        )
        (place / "1" / "model.py").write_text(text, encoding="utf-8")
        return NativeConfig(
            outcomes=self.outcomes("the session is opened under the lock"),
            entry=config.entry,
            command="tritonserver --model-repository=.",
            notes=(
                "the interpreter of Triton's stub needs xpuruntime and the engine: the stub of the released images is "
                "Python 3.12, another one is named by the parameter EXECUTION_ENV_PATH",
                "the lock holds on a machine like that which it was made on, with the same variables, of which Triton "
                "may set LD_LIBRARY_PATH, and the model does not load elsewhere",
                *(f"Triton has no tensors of rank 0: clients send {name!r} with the shape [1]" for name in scalars),
            ),
        )


_MODEL = '''\
"""The model {name}, opened under the lock {digest}. Written by xrt export."""

import ctypes
import os
from pathlib import Path

os.environ.update({environment})  # what the lock demands, before a library reads it

import numpy as np
import triton_python_backend_utils as pb_utils

import xpuruntime

SCALARS = {scalars}  # Triton has no tensors of rank 0: these come as [1], and outputs go as [1]


def check_numpy():
    """Refuse a backend that reads arrays of NumPy 2 as if they were of NumPy 1: tensors would have other values."""
    if int(np.__version__.partition(".")[0]) < 2:
        return
    array = np.arange(2, dtype=np.float32)
    capsule = array.__dlpack__()
    # The backend gives the capsule a name that NumPy's destructor does not know.
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    found = pb_utils.Tensor.from_dlpack("probe", capsule).as_numpy().tolist()
    if found != [0, 1]:
        raise RuntimeError(
            f"this Python backend of Triton does not read arrays of NumPy {{np.__version__}}: [0, 1] came back as "
            f"{{found}}. Fix: install numpy<2 for the interpreter of the stub, or use a newer Triton"
        )


class TritonPythonModel:
    def initialize(self, args):
        check_numpy()
        folder = Path(args["model_repository"]) / args["model_version"]
        self.session = xpuruntime.InferenceSession(folder / {model!r}, lock=folder / {lock!r})

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        try:
            inputs = {{one.name(): one.as_numpy() for one in request.inputs()}}
            inputs.update({{name: inputs[name].reshape(()) for name in SCALARS if name in inputs}})
            outputs = self.session.run(inputs)
            names = request.requested_output_names()
            tensors = [pb_utils.Tensor(name, np.atleast_1d(outputs[name])) for name in names]
        except xpuruntime.InputError as error:
            return failed(error, pb_utils.TritonError.INVALID_ARG)
        except Exception as error:
            return failed(error, pb_utils.TritonError.INTERNAL)
        return pb_utils.InferenceResponse(output_tensors=tensors)

    def finalize(self):
        self.session.close()


def failed(error, code):
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(f"{{type(error).__name__}}: {{error}}", code))
'''
