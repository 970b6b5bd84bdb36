# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Rewriting while a session is loaded: rewrite, measure what is free, compare the result with the original."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model_source import ModelSource
from xpuruntime.engines.onnxruntime._private_api import raw_session
from xpuruntime.engines.onnxruntime.failures import translate
from xpuruntime.engines.onnxruntime.opening import open_session
from xpuruntime.engines.onnxruntime.rewriting.checking import check_rewriting
from xpuruntime.engines.onnxruntime.rewriting.graph_edit import Rewriting, begin
from xpuruntime.engines.onnxruntime.rewriting.rules import session_rules
from xpuruntime.engines.onnxruntime.rewriting.tuning import measure_free

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.engines.base import Request
    from xpuruntime.engines.conversion_log import ConversionLog
    from xpuruntime.engines.onnxruntime.settings import OnnxRuntimeSettings

__all__ = ["check", "rewritten"]


def rewritten(request: Request, settings: OnnxRuntimeSettings, source: ModelSource, log: ConversionLog) -> Rewriting:
    """Return the model with xpuruntime operators as the plan says."""
    rewriting = begin(request, settings, source, log)
    if settings.tune and rewriting.found.free:
        _tune(rewriting, request, settings, log)
    if not rewriting.rewrites:
        rewriting.release()
    return rewriting


def _tune(rewriting: Rewriting, request: Request, settings: OnnxRuntimeSettings, log: ConversionLog) -> None:
    """Rewrite also what is faster as an xpuruntime operator where the policy leaves the choice."""
    copy = settings.public()
    rules = session_rules(rewriting.policy.replace(rules=(), **_NO_KERNELS), (), strict=False)

    def open_part(model: bytes) -> Callable[[], Any]:
        from xpuruntime import _core

        source = ModelSource(model, rewriting.folder, rewriting.before.label, operators=str(_core.__file__))
        return _runner(open_session(copy, source, request.device).session, request)

    times = measure_free(
        rewriting.model, rewriting.found.free, rules.key, open_part, deterministic=settings.deterministic,
        rule=request.policy.kernels.tuning, place=_place(copy, request), versions={"onnxruntime": _ort_version()},
    )  # fmt: skip
    for one in times:
        log.add(
            f"{one.rewrite.node!r} was measured as ONNX Runtime has it and as xpuruntime.{one.rewrite.op}", str(one)
        )
    rewriting.timed = tuple(times)
    rewriting.use([*rewriting.found.rewrites, *(one.rewrite for one in times if one.wins)])


def _place(settings: OnnxRuntimeSettings, request: Request) -> str:
    """Return what the times of an operation depend on beside itself: the device, and how the session is opened."""
    from xpuruntime.runtime.device import Device

    kind = request.device.partition(":")[0]
    device = Device(request.device) if kind == "cuda" else Device("cpu")
    cores = "" if device.cores is None else f" x{device.cores}"
    options = sorted({**settings.options, **settings.session}.items())
    facts = (settings.provider, options, settings.level, settings.threads)
    return f"{kind};{device.name}{cores};{facts}"


def _ort_version() -> str:
    import onnxruntime as ort

    return str(ort.__version__)


_NO_KERNELS = dict.fromkeys(("matmul", "attention", "layer_norm", "rms_norm", "conv"))


def _runner(session: Any, request: Request) -> Callable[[], Any]:
    """Return what runs a session once on inputs that lie on its device, and waits."""
    import numpy as np
    import onnxruntime as ort

    random = np.random.default_rng(0)
    binding = session.io_binding()
    kind, _, index = request.device.partition(":")
    place = (kind, int(index or 0))
    for given in session.get_inputs():
        word = given.type.removeprefix("tensor(").removesuffix(")")
        dtype = {"float": "float32", "double": "float64", "bool": "bool", "float16": "float16"}.get(word, word)
        values = random.standard_normal([int(d) for d in given.shape])
        binding.bind_ortvalue_input(given.name, _value(ort, values, dtype, place))
    for made in session.get_outputs():
        binding.bind_output(made.name, *place)

    def run() -> None:
        try:
            session.run_with_iobinding(binding)
            binding.synchronize_outputs()
        except Exception as error:
            raise translate(error, doing="measuring one operation", device=request.device) from None

    return run


def _value(ort: Any, values: Any, dtype: str, place: tuple[str, int]) -> Any:
    import numpy as np

    if dtype == "bfloat16":  # NumPy has none: the upper half of an fp32
        bits = (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, 16)
    array = values > 0 if dtype == "bool" else values.astype(dtype)
    return ort.OrtValue.ortvalue_from_numpy(np.asarray(array, order="C"), *place)


def check(
    rewriting: Rewriting, request: Request, settings: OnnxRuntimeSettings, session: Any, log: ConversionLog
) -> None:
    """Hold a rewritten session against one without rewrites; see `check_rewriting`."""
    if not rewriting.rewrites:
        return
    copy = settings.public()

    def open_plain(source: ModelSource) -> Any:
        return open_session(copy, source, request.device).session

    def run(one: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
        import onnxruntime as ort

        options = ort.RunOptions()
        if one is session and settings.options.get("enable_cuda_graph") == "1":
            options.add_run_config_entry("gpu_graph_id", "-1")  # capture none
        names = [output.name for output in one.get_outputs()]
        try:
            return dict(zip(names, raw_session(one).run(names, dict(feeds), options), strict=True))
        except Exception as error:
            doing = f"holding the rewritten graph of {request.model.path} against the original"
            raise translate(error, doing=doing, device=request.device) from None

    check_rewriting(rewriting, request, open_plain, run, session, log)
    rewriting.release()
