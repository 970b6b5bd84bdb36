# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Placing a program of PyTorch on its device, eager or compiled."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.conversion_log import ConversionLog
from xpuruntime.engines.torch.aliasing import GuardedCall
from xpuruntime.engines.torch.compiling import compiled, compiling_apart
from xpuruntime.engines.torch.failures import translate
from xpuruntime.engines.torch.model import TorchModel
from xpuruntime.engines.torch.pinning import Pins
from xpuruntime.engines.torch.switches import hold

if TYPE_CHECKING:
    from xpuruntime.engines.base import Judgement, LoadedModel, Request
    from xpuruntime.engines.torch.program.sources import Call
    from xpuruntime.engines.torch.settings import TorchSettings

__all__ = ["load_model"]


def load_model(request: Request, judgement: Judgement[TorchSettings]) -> LoadedModel:
    """Return the loaded model; leaves nothing behind when it fails."""
    settings, log = judgement.settings, ConversionLog()
    switches = hold(settings, request)
    pins: Pins | None = None
    try:
        pins = Pins(request.policy, request.model.nodes, _not_held(judgement))
        source: Any = request.model.source
        module = source.place(request.device, settings.convert)
        if pins.by_module and settings.mode == "eager" and request.model.format == "pt2":
            module = source.located(module)
        if settings.convert is not None:
            log.add(f"weights converted to {settings.convert}", "inputs and outputs keep their types")
        called = compiled(module, settings) if settings.mode == "compile" else module
        call = source.call(called)
        if settings.convert is not None:
            call = _converted(call, request, settings.convert)
        if settings.mode == "compile":
            call = compiling_apart(call, pins)
        call = _pinned(call, pins)
        names = [info.name for info in request.model.outputs]
        guard = GuardedCall(call, source, module, names, converted=settings.convert is not None, log=log)
        model = TorchModel(request, judgement, module=module, guard=guard, switches=switches, pins=pins, log=log)
        if settings.mode == "compile":
            _compile_now(model, request)
        return model
    except Exception as error:
        if pins is not None:
            pins.release()
        switches.release()
        raise translate(error, doing=f"loading {request.model.path}", device=request.device) from None


def _compile_now(model: TorchModel, request: Request) -> None:
    """Compile for the shapes of probe inputs, so that the first run of a caller does not wait for it."""
    from xpuruntime.engines.precision import probe_feeds

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of the compiler about itself
        model.run(probe_feeds(request.model))


def _not_held(judgement: Judgement[TorchSettings]) -> set[str]:
    """Return the kernel keys that the plan calls unsupported; under ``strict`` there are none."""
    return {control.key for control in judgement.controls if control.enforceability == "unsupported"}


def _pinned(call: Call, pins: Pins) -> Call:
    """Let the session's kernels hold for each call, and no policy of the process."""
    from xpuruntime.pytorch.dispatch.context import active_policy

    own = pins.held

    def run(tensors: Any) -> list[Any]:
        if active_policy() is own:  # nothing, most often
            return call(tensors)
        with pins.hold():
            return call(tensors)

    return run


def _converted(call: Call, request: Request, convert: str) -> Call:
    """Let floating inputs enter, and outputs leave, in the types that the model states."""
    import torch

    inside = {"fp16": torch.float16, "bf16": torch.bfloat16}[convert]
    outside = [getattr(torch, info.dtype, None) for info in request.model.outputs]

    def run(tensors: Any) -> list[Any]:
        given = [t.to(inside) if t.is_floating_point() else t for t in tensors]
        return [
            t.to(dtype) if dtype is not None and t.is_floating_point() else t
            for t, dtype in zip(call(given), outside, strict=True)
        ]

    return run
