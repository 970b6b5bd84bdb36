# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`OpenVinoBinding`: fixed buffers of one request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.base import Binding
from xpuruntime.engines.feeds import closed_binding
from xpuruntime.engines.host_model import bound_buffers
from xpuruntime.engines.openvino.integers import check_range
from xpuruntime.engines.openvino.slots import infer_call, share
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from xpuruntime.engines.openvino.model import OpenVinoModel

__all__ = ["OpenVinoBinding"]


class OpenVinoBinding(Binding):
    """NumPy buffers bound to one request. Not for use by two threads at once.

    Where the model fixes the shape of an output, OpenVINO writes straight into its buffer. Where it does not, OpenVINO
    writes to memory that it sizes itself, since it would write past the end of a buffer that is too small; the result
    is looked at after each run, and copied where the caller gave the buffer.
    """

    def __init__(self, model: OpenVinoModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> None:
        import openvino as ov

        compiled = model._handle
        self.graph = "off"
        bound, made = bound_buffers(model, inputs, outputs)
        request = compiled.create_infer_request()
        for port, index in enumerate(model.order):
            request.set_input_tensor(port, share(bound[model._info.inputs[index].name]))
        loose: list[tuple[str, Any, Any, Any]] = []
        for index, port in enumerate(compiled.outputs):
            name = model._outputs[index]
            if port.get_partial_shape().is_static:
                request.set_output_tensor(index, share(made[name]))
                continue
            tensor = ov.Tensor(port.get_element_type(), ov.Shape(made[name].shape))
            request.set_output_tensor(index, tensor)
            if name not in outputs:
                made[name] = tensor.data
            loose.append((name, tensor, tensor.get_shape(), made[name] if name in outputs else None))
        self.inputs, self.outputs = bound, made
        self._kept: Any = (request, dict(bound), dict(made))
        call, failed = infer_call(request), model._failed
        wide = [(name, bound[name]) for _, name in model.wide]

        def run() -> None:
            try:
                call({}, True, False)
            except Exception as error:
                raise failed(error) from None

        def run_checked() -> None:
            for name, array in wide:
                check_range(name, array)
            run()
            for name, tensor, shape, target in loose:
                if tensor.get_shape() != shape:
                    msg = (
                        f"output {name!r} changed its shape from {list(shape)} to {list(tensor.get_shape())}: it "
                        "depends on the values of the inputs, so it has no fixed buffer; use run()"
                    )
                    raise InputError(msg)
                if target is not None:
                    np.copyto(target, tensor.data)

        self.run = run_checked if loose or wide else run

    def close(self) -> None:
        """Release the binding; the arrays live on while you hold them."""
        self.run = closed_binding
        self._kept = None
        self.inputs, self.outputs = {}, {}
