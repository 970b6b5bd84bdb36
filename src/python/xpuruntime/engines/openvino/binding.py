# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoBinding`: fixed buffers of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.base import Binding
from xpuruntime.engines.host_model import bound_buffers, overlapping
from xpuruntime.engines.input_binding import closed_binding
from xpuruntime.engines.openvino.int_inputs import check_range
from xpuruntime.engines.openvino.slots import infer_call, passed_on, share
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.openvino.model import OpenVinoModel

__all__ = ["OpenVinoBinding"]


class OpenVinoBinding(Binding):
    """NumPy buffers bound to one request. Not for use by two threads at once.

    Where the model fixes the shape of an output, OpenVINO writes straight into its buffer. Where it does not, OpenVINO
    writes to memory that it sizes itself, since it would write past the end of a buffer that is too small; the result
    is looked at after each run, and copied where the caller gave the buffer. An output that is an input passed on has
    the memory of the input, and one whose buffer shares memory with an input would be written while that is read: both
    are copied after each run.
    """

    def __init__(self, model: OpenVinoModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        self.graph = "off"
        bound, made = bound_buffers(model, inputs, outputs)
        self._model, self._bound = model, bound
        self._shared = overlapping(bound, made, strict=model._strict, log=model._log)
        #: Tensors that OpenVINO sizes, by the position of their output; they outlive a request.
        self._sized: dict[int, Any] = {}
        self._generation: Any = None
        try:
            self._arrange(made, outputs)
        except Exception as error:
            raise model._failed(error) from None
        self.inputs, self.outputs = bound, made
        failed, pool = model._failed, model._pool
        wide = [(name, bound[name]) for _, name in model.wide]

        def run() -> None:
            try:
                if self._generation.broken:
                    self._arrange(made, outputs)
                self._call({}, True, False)
            except Exception as error:
                again(error)
            else:
                if self._generation.broken:
                    again(None)

        def again(error: Exception | None) -> None:
            """Raise, or run once more where another run may have spoiled this one."""
            if not pool.spoil(self._generation) and error is not None:
                raise failed(error) from None
            try:
                self._arrange(made, outputs)
                self._call({}, True, False)
            except Exception as second:
                pool.spoil(self._generation)
                raise failed(second) from None

        def run_checked() -> None:
            for name, array in wide:
                check_range(name, array)
            run()
            for name, tensor, shape, target in self._loose:
                if list(tensor.get_shape()) != shape:
                    msg = (
                        f"output {name!r} changed its shape from {shape} to {list(tensor.get_shape())}: it "
                        "depends on the values of the inputs, so it has no fixed buffer; use run()"
                    )
                    raise InputError(msg)
                if target is not None:
                    np.copyto(target, tensor.data)

        self.run = run_checked if self._loose or wide else run

    def _arrange(self, made: dict[str, Any], given: Mapping[str, Any]) -> None:
        """Make a request on the buffers; `made` gets the memory of outputs that OpenVINO sizes."""
        import openvino as ov

        model, bound = self._model, self._bound
        generation = model._pool.generation()
        if self._generation is not None:
            model._pool.drop(self._generation)
        self._generation = generation
        request = generation.compiled.create_infer_request()
        for port, index in enumerate(model.order):
            request.set_input_tensor(port, share(bound[model._info.inputs[index].name]))
        call = infer_call(request)
        call({}, True, False)  # shows which outputs have memory of their own
        passed = passed_on(request, bound.values())
        loose: list[tuple[str, Any, list[int], Any]] = []
        for index, port in enumerate(generation.compiled.outputs):
            name = model._outputs[index]
            target = made[name] if name in given else None
            if index in passed:
                tensor, target = request.get_output_tensor(index), made[name]
            elif port.get_partial_shape().is_static and name not in self._shared:
                request.set_output_tensor(index, share(made[name]))
                continue
            else:
                if index not in self._sized:
                    self._sized[index] = ov.Tensor(port.get_element_type(), ov.Shape(made[name].shape))
                tensor = self._sized[index]
                request.set_output_tensor(index, tensor)
                if target is None:
                    made[name] = tensor.data
            loose.append((name, tensor, list(made[name].shape), target))
        self._loose = loose
        self._kept: Any = (request, dict(made))
        self._call = call

    def close(self) -> None:
        """Release the binding; the arrays live on while you hold them."""
        self.run = closed_binding
        if self._generation is not None:
            self._model._pool.drop(self._generation)
        self._generation = self._kept = None
        self._call = closed_binding
        self._loose, self._sized, self._bound = [], {}, {}
        self.inputs, self.outputs = {}, {}
