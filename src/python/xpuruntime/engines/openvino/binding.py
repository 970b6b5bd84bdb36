# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoBuffers`: fixed buffers of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.binding import HostBuffers
from xpuruntime.engines.input_binding import closed_binding, empty_host_array
from xpuruntime.engines.openvino.int_inputs import check_range
from xpuruntime.engines.openvino.slots import infer_call, passed_on, share

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.openvino.model import OpenVinoModel

__all__ = ["OpenVinoBuffers"]


class OpenVinoBuffers(HostBuffers):
    """NumPy buffers of one request.

    Where the model fixes the shape of an output, OpenVINO writes straight into its buffer, from the second run on: the
    first shows which outputs have memory of their own. Where the model does not, OpenVINO writes to memory that it
    sizes itself, since it would write past the end of a buffer that is too small; the result is looked at after each
    run, and copied where there is a buffer. An output that is an input passed on has the memory of the input, and one
    whose buffer shares memory with an input would be written while that is read: both are copied after each run.
    """

    def __init__(self, model: OpenVinoModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self._pool, self._failed = model._pool, model._failed
        self._names = [model._info.inputs[index].name for index in model.order]
        self._wide = tuple(name for _, name in model.wide)
        ports = self._pool.compiled.outputs
        self._ports = dict(zip(model._outputs, ports, strict=True))
        self._static = {name for name, port in self._ports.items() if port.get_partial_shape().is_static}
        #: Tensors that OpenVINO sizes: those whose memory is that of an output, and those that are copied.
        self._tensors: dict[str, Any] = {}
        self._sized: dict[str, Any] = {}
        self._generation: Any = None
        self._set: dict[str, Any] = {}
        #: Outputs in the memory of an input, ``None`` before the first run of a request.
        self._passed: set[str] | None = None
        super().__init__(model, inputs, outputs)

    def _made(self, name: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
        if name in self._static:
            return super()._made(name, shape)
        held = self.outputs.get(name)
        tensor = self._tensors.get(name)
        if tensor is None or held is None or held.shape != shape or self._is_input(held):
            empty_host_array(name, shape, np.uint8)  # raises where there is no room
            self._tensors[name] = tensor = self._tensor(name, shape)
            tensor.data.fill(0)
        array: np.ndarray[Any, Any] = tensor.data
        return array

    def _tensor(self, name: str, shape: tuple[int, ...] = (0,)) -> Any:
        import openvino as ov

        port = self._ports[name]
        return ov.Tensor(port.get_element_type(), port.get_shape() if name in self._static else ov.Shape(shape))

    def arrange(self) -> None:
        """Hand buffers to the request; make another where it cannot be used, or has outputs in memory of an input."""
        if self._generation is None or self._generation.broken or self._passed:
            self._drop()
            self._generation = self._pool.generation()
            self._request = self._generation.compiled.create_infer_request()
            self._call = infer_call(self._request)
            self._set, self._passed = {}, None
        try:
            for port, name in enumerate(self._names):
                if self._set.get(name) is not self.inputs[name]:
                    self._request.set_input_tensor(port, share(self.inputs[name]))
                    self._set[name] = self.inputs[name]
            self._set_outputs()
        except Exception as error:
            raise self._failed(error) from None

    def _set_outputs(self) -> None:
        """Choose the memory of outputs, once a run has shown which are in that of an input."""
        self._fresh, self._copies = [], []
        for index, name in enumerate(self._model._outputs):
            if self._passed is None or name in self._passed:
                self._copies.append((index, name, None))
            elif name not in self.fixed:
                self._fresh.append((index, name))
            elif name in self._static and name not in self.copied:
                self._request.set_output_tensor(index, share(self.outputs[name]))
            elif name in self.given or name in self.copied:
                if name not in self._sized:
                    self._sized[name] = self._tensor(name, self.outputs[name].shape)
                self._request.set_output_tensor(index, self._sized[name])
                self._copies.append((index, name, self._sized[name]))
            else:
                self._request.set_output_tensor(index, self._tensors[name])
                self._copies.append((index, name, self._tensors[name]))

    def run(self) -> None:
        """Run, and take what OpenVINO made."""
        for name in self._wide:
            check_range(name, self.inputs[name])
        if self.changed:
            self.place()
        try:
            if self._generation.broken:
                self.arrange()
            self._infer()
        except Exception as error:
            self._again(error)
        else:
            if self._generation.broken:
                self._again(None)
        self._take()

    def _take(self) -> None:
        for _, name, tensor in self._new:
            self.outputs[name] = tensor.data
        known = len(self.fixed)
        for index, name, tensor in self._copies:
            data = (self._request.get_output_tensor(index) if tensor is None else tensor).data
            if tensor is None or tensor is not self._tensors.get(name):
                self.copy_result(name, data)
            elif data.shape != self.outputs[name].shape:
                self.untrue(name, data.shape)
                self.outputs[name] = data.copy()
        if self._passed is None:
            passed = passed_on(self._request, self.inputs.values())
            self._passed = {name for index, name in enumerate(self._model._outputs) if index in passed}
            self._set_outputs()
        elif len(self.fixed) != known:
            self._set_outputs()

    def _again(self, error: Exception | None) -> None:
        """Raise, or run once more where another run may have spoiled this one."""
        if not self._pool.spoil(self._generation) and error is not None:
            raise self._failed(error) from None
        try:
            self.arrange()
            self._infer()
        except Exception as second:
            self._pool.spoil(self._generation)
            raise self._failed(second) from None

    def _infer(self) -> None:
        self._new = [(index, name, self._tensor(name)) for index, name in self._fresh]
        for index, _, tensor in self._new:
            self._request.set_output_tensor(index, tensor)
        self._call({}, True, False)

    def _drop(self) -> None:
        if self._generation is not None:
            self._pool.drop(self._generation)
        self._generation = None

    def close(self) -> None:
        """Forget the buffers and the request."""
        super().close()
        self._drop()
        self._request, self._call = None, closed_binding
        self._set, self._tensors, self._sized, self._copies, self._new = {}, {}, {}, [], []
