# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Lazy public names: a package loads the module of a name when the name is first used (PEP 562)."""

from __future__ import annotations

import _thread
import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

_ONE_MODULE = "use xpuruntime._core, one module without parts"
_LOADABLE = "[engine.name for engine in xpuruntime.engines.default_registry() if engine.probe().loadable]"
#: Names of the original design, and of ONNX Runtime, that are spelled otherwise, and how.
REPLACED = {
    "xpuruntime.ExecutionMode": "use xpuruntime.Policy(execution={'provider_options': {'onnxruntime': "
    "{'inter_op_num_threads': 2}}})",
    "xpuruntime.GraphOptimizationLevel": "use xpuruntime.Policy(execution={'provider_options': {'onnxruntime': "
    "{'graph_optimization_level': 'all'}}}), or 'layout', 'extended', 'basic', 'disable'",
    "xpuruntime.IOBinding": "use xpuruntime.InferenceSession.bind: binding = session.bind({name: array})",
    "xpuruntime.OrtValue": "use arrays of any device, which xpuruntime.InferenceSession.run takes through DLPack",
    "xpuruntime.RunOptions": "leave them out: xpuruntime.InferenceSession.run takes stream= and outputs=, and "
    "the policy states the rest",
    "xpuruntime.SessionOptions": "use a policy: xpuruntime.InferenceSession(model, policy={'execution': {'threads': 4, "
    "'provider_options': {'onnxruntime': {'graph_optimization_level': 'all'}}}})",
    "xpuruntime.get_all_providers": "use xpuruntime.engines.default_registry().names()",
    "xpuruntime.get_available_providers": f"use {_LOADABLE}, or the command xrt devices",
    "xpuruntime.get_device": "use xpuruntime.get_all_devices()",
    "xpuruntime.set_default_logger_severity": "use logging.getLogger(xpuruntime.__name__).setLevel('DEBUG')",
    "xpuruntime.Session": "use xpuruntime.InferenceSession(model)",
    "xpuruntime.bench": "use the command xrt bench MODEL, or xpuruntime.InferenceSession(model).explain().latency",
    "xpuruntime.compare": "use xpuruntime.compare_engines(model, ['onnxruntime', 'openvino'])",
    "xpuruntime.compile": "use xpuruntime.compile_model(model, folder)",
    "xpuruntime.explain": "use xpuruntime.InferenceSession(model).explain()",
    "xpuruntime.run": "use xpuruntime.InferenceSession(model).run({name: array})",
    "xpuruntime.BackendRegistry": "use xpuruntime.engines.EngineRegistry for engines and xpuruntime.ops.kernels for "
    "kernels",
    "xpuruntime.DeviceInfo": "use xpuruntime.Device",
    "xpuruntime.Dispatcher": "use xpuruntime.use_policy to choose kernels and xpuruntime.decisions to see which were "
    "chosen",
    "xpuruntime.EngineRegistry": "use xpuruntime.engines.EngineRegistry",
    "xpuruntime.KernelRegistry": "use xpuruntime.ops.kernels",
    "xpuruntime.MemoryStats": "use xpuruntime.runtime.MemoryStats",
    "xpuruntime.MemoryType": "use xpuruntime.MemoryPool(device, kind='caching'), or the kind 'direct', 'driver' or "
    "'pinned'",
    "xpuruntime.Profiler": "use xpuruntime.profile",
    "xpuruntime._core.AutoSelectStrategy": "use xpuruntime.KernelPolicy(auto_strategy='first_supported'), or "
    "'best_performance'",
    "xpuruntime._core.BackendRegistry": "use xpuruntime._core.KernelRegistry",
    "xpuruntime._core.CudaError": "use xpuruntime.errors.CudaError",
    "xpuruntime._core.KernelPolicy": "use xpuruntime.KernelPolicy",
    "xpuruntime._core.MemoryType": "use xpuruntime.MemoryPool(device, kind='caching'), or the kind 'direct', 'driver' "
    "or 'pinned'",
    "xpuruntime._core.OutOfMemoryError": "use xpuruntime.errors.OutOfMemoryError",
    "xpuruntime._core.Profiler": "use xpuruntime.profile for a recording and xpuruntime.runtime.profiled for a range",
    "xpuruntime._core.UnsupportedOperationError": "use xpuruntime.errors.UnsupportedOperationError",
    "xpuruntime._core.XpuRuntimeError": "use xpuruntime.errors.XpuRuntimeError",
    **{
        f"xpuruntime._core.{part}": _ONE_MODULE
        for part in ("device", "dispatcher", "kernel", "memory", "profiler", "stream")
    },
    "xpuruntime._core.disable_pytorch_allocator": "use xpuruntime.pytorch.reset_allocator",
    "xpuruntime._core.enable_pytorch_allocator": "use xpuruntime.pytorch.set_allocator",
    "xpuruntime._core.flash_attention_forward": "use xpuruntime.pytorch.ops.fused_attention or "
    "xpuruntime.ops.attention",
    "xpuruntime._core.fused_layernorm_forward": "use xpuruntime.pytorch.ops.fused_layernorm or "
    "xpuruntime.ops.layer_norm",
    "xpuruntime._core.set_precision_hint": "use xpuruntime.pytorch.autocast",
    "xpuruntime.pytorch.CUDAGraphWrapper": "use xpuruntime.pytorch.capture_graph: step = capture_graph(fn), or "
    "`with capture_graph() as graph` and graph.replay()",
    "xpuruntime.pytorch.XpuRuntimeAllocator": "use xpuruntime.pytorch.set_allocator and "
    "xpuruntime.pytorch.reset_allocator",
    "xpuruntime.pytorch.extension": "use xpuruntime.pytorch",
    "xpuruntime.pytorch.fused_attention": "use xpuruntime.pytorch.ops.fused_attention",
    "xpuruntime.pytorch.fused_layernorm": "use xpuruntime.pytorch.ops.fused_layernorm",
    "xpuruntime.pytorch.graph": "use xpuruntime.pytorch.capture_graph",
    "xpuruntime.pytorch.ops.layernorm": "use xpuruntime.pytorch.ops.norms",
}


def lazy(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a package, by the modules that have its public names."""
    module = sys.modules[package]
    return partial(load_name, package, modules=modules), lambda: sorted({*vars(module), *module.__all__})


def load_name(package: str, name: str, modules: Mapping[str, str]) -> Any:
    """Return a public name of a package, or a module in it, which the package has from then on."""
    module = modules.get(name)
    if module is not None:
        value = getattr(import_part(f"{package}.{module}"), name)
        setattr(sys.modules[package], name, value)
        return value
    if name == "__path__":  # of the core, so that Python asks `_ReplacedNames` for what is imported from it
        return []
    fix = REPLACED.get(f"{package}.{name}")
    if fix is None and _has_part(package, name):
        return import_part(f"{package}.{name}")
    if fix is None and not name.startswith("_"):
        import difflib

        near = difflib.get_close_matches(name, vars(sys.modules[package]).get("__all__", ()), n=1)
        fix = f"use {package}.{near[0]}" if near else None
    msg = f"module {package!r} has no attribute {name!r}"
    raise AttributeError(msg if fix is None else f"{msg}. Fix: {fix}")


class _ReplacedNames:
    """A finder that Python asks last: it refuses ``from package import name`` with what replaced the name."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        del path, target
        fix = REPLACED.get(re.sub(r"\.training(\.pytorch_ext)?\.", ".pytorch.", fullname))
        if fix is not None:
            package, _, name = fullname.rpartition(".")
            raise ImportError(f"cannot import name {name!r} from {package!r}. Fix: {fix}", name=package)


sys.meta_path.append(_ReplacedNames)


def _has_part(package: str, name: str) -> bool:
    if name.startswith("__") or not hasattr(sys.modules[package], "__path__"):
        return False
    return importlib.util.find_spec(f"{package}.{name}") is not None


class _WithoutExtensions:
    """Importer that says, to the thread that makes it, that there is no `typing_extensions`."""

    def __init__(self) -> None:
        self._thread = _thread.get_ident()

    def find_spec(self, name: str, *_: object) -> None:
        if name == "typing_extensions" and _thread.get_ident() == self._thread:
            raise ModuleNotFoundError(name)


def import_msgspec() -> None:
    """Import msgspec without `typing_extensions`, which takes as long as the rest of it.

    msgspec wants three names of it and else takes those of `typing`; from Python 3.11 on they are the same.
    """
    if "msgspec" in sys.modules:
        return
    sys.meta_path.insert(0, hidden := _WithoutExtensions())
    try:
        importlib.import_module("msgspec")
    finally:
        sys.meta_path.remove(hidden)


def import_part(module: str) -> ModuleType:
    """Import a module of this package."""
    known = len(sys.modules)
    try:
        return importlib.import_module(module)
    except Exception as error:
        refuse_rest(module, known, error)
        raise


def refuse_rest(module: str, known: int, error: Exception) -> None:
    """Raise where a module cannot be imported because of what an interrupted import of a library has left.

    NumPy, PyTorch and others register what they have with their C parts, and can be imported once in a process. Python
    forgets the package whose import was cut off, and not the modules in it that were complete.
    """
    ran, trace = set(), error.__traceback__
    while trace is not None:
        ran.add(str(trace.tb_frame.f_globals.get("__name__")).partition(".")[0])
        trace = trace.tb_next
    before = list(sys.modules)[:known]
    others = ran - sys.stdlib_module_names - {__name__.partition(".")[0]}
    cut = sorted(other for other in others if _is_cut_off(other, before))
    if not cut:
        return
    raise ImportError(
        f"{module} cannot be imported: an earlier import of {' and '.join(cut)} in this process was cut off, "
        "as by Ctrl-C, and the rest of it cannot be imported a second time. Fix: start a new process; in a notebook, "
        "restart the kernel",
        name=module,
    ) from error


def _is_cut_off(package: str, modules: list[str]) -> bool:
    """Say whether modules, in the order of their imports, have one in a package before the package itself."""
    inner = next((index for index, name in enumerate(modules) if name.startswith(f"{package}.")), None)
    return inner is not None and package not in modules[:inner]
