# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A program of PyTorch, ready to run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import device_of, from_host, kind_of, torch_dtype_name
from xpuruntime.engines.base import Binding, Judgement, LoadedModel, Observed, Request, closed
from xpuruntime.engines.input_binding import ConversionLog, InputValidator, refuse_stream, type_name
from xpuruntime.engines.torch.binding import GuardedCall
from xpuruntime.engines.torch.names import TorchSettings, from_numpy, to_numpy, translate
from xpuruntime.engines.torch.pinning import Pins, hold
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from xpuruntime.engines.torch.program.sources import Call
    from xpuruntime.evidence.records import Conversion
    from xpuruntime.pytorch.switches.shared_switches import SwitchClaim


class TorchModel(LoadedModel):
    """Runs with autograd off. Tensors of torch in and out on the session's device; NumPy in, NumPy out."""

    def __init__(
        self,
        request: Request,
        judgement: Judgement[TorchSettings],
        *,
        module: Any,
        guard: GuardedCall,
        switches: SwitchClaim,
        pins: Pins,
        log: ConversionLog,
    ) -> None:
        import torch

        self.request = request
        self.settings = judgement.settings
        self.controls = judgement.controls
        self.module = module
        self.device = request.device
        self.pins = pins
        self.log = log
        self.check = InputValidator(request.model.inputs, equal=True)
        self.names = tuple(info.name for info in request.model.inputs)
        self.outputs = tuple(info.name for info in request.model.outputs)
        #: Of results that belong to the caller.
        self._call: Call | None = guard.call
        self.guard = guard
        self._switches = switches
        self._threads_after: int | None = None
        self._torch = torch
        self._where = torch.device(self.device)

    @property
    def call(self) -> Call:
        """The program, for flat tensors on the device; its results may share memory with inputs and weights."""
        if self._call is None:
            closed()
        return self.guard.unowned

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return `run` with a short way for tensors of torch in shapes that were checked before."""
        slow, seen, names, results = self.checked_run, self.check._seen, self.names, self.outputs
        torch = self._torch
        tensor, no_grad, where = torch.Tensor, torch.no_grad, self._where
        count = len(names)

        def run(
            feeds: Any = None, stream: Any = None, outputs: Sequence[str] | None = None, **other: Any
        ) -> dict[str, Any]:
            call = self._call
            if call is None or stream is not None or outputs is not None or other or type(feeds) is not dict:
                return slow(feeds, stream, outputs, **other)
            if len(feeds) != count:
                return slow(feeds)
            try:
                tensors = [feeds[name] for name in names]
            except KeyError:
                return slow(feeds, stream)
            key = []
            for input_ in tensors:
                if type(input_) is not tensor or input_.device != where or input_.requires_grad:
                    return slow(feeds, stream)
                key.append((input_.shape, input_.dtype))
            if tuple(key) not in seen:
                slow_results = slow(feeds)
                self.check.remember(tuple(key))
                return slow_results
            try:
                with no_grad():
                    return dict(zip(results, call(tensors), strict=True))
            except Exception as error:
                raise self.failed(error) from None

        return run

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Check, run, and return results in the caller's kind; see `InferenceSession`."""
        call = self._call
        if call is None:
            closed()
        self.check.names(feeds)
        kinds = {name: kind_of(name, array) for name, array in feeds.items()}
        host = all(device_of(name, array, kinds[name]) == "cpu" for name, array in feeds.items())
        cuda = self.device != "cpu"
        if stream is not None and (host or not cuda):
            refuse_stream(stream)
        tensors = self.tensors(feeds)
        torch = self._torch
        try:
            with torch.no_grad(), self._stream(stream):
                results = call(tensors)
        except Exception as error:
            raise self.failed(error) from None
        kind = next((k for k in kinds.values() if k != "numpy"), "numpy")
        back = cuda and host
        named = zip(self.outputs, results, strict=True)
        return {name: self._result(result.cpu() if back else result, kind) for name, result in named}

    def tensors(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Return the inputs as tensors on the device, in order, checked one by one and together."""
        tensors = [self.tensor(name, feeds[name]) for name in self.names]
        self.check.symbols({name: tuple(t.shape) for name, t in zip(self.names, tensors, strict=True)})
        return tensors

    def tensor(self, name: str, array: Any) -> Any:
        """Return one input as a tensor on the device, checked."""
        torch = self._torch
        kind = kind_of(name, array)
        if kind == "torch":
            tensor = array
            if tensor.requires_grad:
                raise InputError(f"input {name!r} is a torch tensor that requires grad. Fix: pass x.detach()")
        elif kind == "numpy":
            info = self.check.infos[name]
            self.check.check(name, type_name(array, info), array.shape)
            ready = self.check.contiguous(name, array, strict=self.settings.strict, log=self.log)
            tensor = from_numpy(ready)
        else:
            tensor = torch.from_dlpack(array)
        self.check.check(name, torch_dtype_name(tensor.dtype), tuple(tensor.shape))
        if tensor.device != self._where:
            if tensor.device.type == "cpu" and kind == "numpy":
                return tensor.to(self._where)
            msg = f"input {name!r} is on {tensor.device}, but this session runs on {self.device}; move it first"
            raise InputError(f"{msg} (torch: x.to({self.device!r}))")
        return tensor

    def _stream(self, stream: Any) -> Any:
        torch = self._torch
        if stream is None:
            return _NOTHING
        if isinstance(stream, torch.cuda.Stream):
            return torch.cuda.stream(stream)
        from xpuruntime.engines.cuda_arrays import caller_stream

        handle = caller_stream(stream, "torch", self._where.index)
        return torch.cuda.stream(torch.cuda.ExternalStream(handle, device=self._where))

    def _result(self, tensor: Any, kind: Any) -> Any:
        if kind == "torch":
            return tensor
        if tensor.device.type == "cpu":
            return from_host(to_numpy(tensor), kind)
        from xpuruntime import _core

        if kind == "cupy":
            return sys.modules["cupy"].from_dlpack(tensor)
        return _core.Tensor.from_dlpack(tensor)

    def failed(self, error: Exception) -> Exception:
        """Return `error` as an xpuruntime error."""
        return translate(error, doing=f"running {self.request.model.path}", device=self.device)

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind buffers; see `InferenceSession.bind`."""
        from xpuruntime.engines.torch.binding import TorchBinding

        if self._call is None:
            closed()
        if self.device == "cpu":
            refuse_stream(stream)
        return TorchBinding(self, inputs or {}, outputs or {}, stream)

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run under PyTorch's profiler; see `LoadedModel.observe`."""
        from xpuruntime.engines.torch.observing.instrumented_run import observe

        if self._call is None:
            closed()
        with self._torch.autocast(self._where.type, enabled=False):
            return observe(self, self.tensors(feeds), runs)

    def intermediates(self, feeds: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any] | None:
        """Run operator by operator, as the program is before `torch.compile`; see `LoadedModel.intermediates`."""
        from xpuruntime.engines.torch.observing.instrumented_run import intermediates

        if self._call is None:
            closed()
        kinds = [kind_of(name, array) for name, array in feeds.items()]
        kind = next((k for k in kinds if k != "numpy"), "numpy")
        with self._torch.autocast(self._where.type, enabled=False):
            values = intermediates(self, self.tensors(feeds), names)
        back = self.device != "cpu" and kind == "numpy"
        return {name: self._result(value.cpu() if back else value, kind) for name, value in values.items()}

    def switches(self) -> dict[str, Any]:
        """Return the process-wide switches that this session holds, as they are now."""
        return self._switches.values()

    def conversions(self) -> Sequence[Conversion]:
        """Return what was converted or copied so far."""
        return self.log.records()

    def memory(self) -> dict[str, int]:
        """Return the bytes of parameters and buffers."""
        held = {t.data_ptr(): t.numel() * t.element_size() for t in (*self.module.parameters(), *self.module.buffers())}
        return {"weights": sum(held.values())}

    def close(self) -> None:
        """Drop the program; runs in other threads finish first, since they hold it."""
        self._call = None
        self.check.forget()
        self.pins.release()
        threads = "num_threads" in self._switches.values()
        self._switches.release()
        if threads:
            self._threads_after = self._torch.get_num_threads()

    def restore_thread(self) -> None:
        """Give the calling thread the number of threads of the process, which OpenMP keeps for each thread."""
        threads, self._threads_after = self._threads_after, None
        if threads is not None:
            self._torch.set_num_threads(threads)


class _Nothing:
    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


_NOTHING = _Nothing()


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
        call = _pinned(call, pins, request.device)
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
    return {control.key for control in judgement.controls if control.enforceability == "unsupported"}


def _pinned(call: Call, pins: Pins, device: str) -> Call:
    """Let the session's kernels and types hold for each call, and no policy or `torch.autocast` of the process."""
    import torch

    from xpuruntime.pytorch.dispatch.context import active_policy

    own, kind, casts = pins.held, device.partition(":")[0], torch.is_autocast_enabled

    def run(tensors: Any) -> list[Any]:
        if casts(kind):
            with torch.autocast(kind, enabled=False):
                return run(tensors)
        if active_policy() is own:  # nothing, most often
            return call(tensors)
        with pins.hold():
            return call(tensors)

    return run


def _converted(call: Call, request: Request, convert: str) -> Call:
    import torch

    inside = {"fp16": torch.float16, "bf16": torch.bfloat16}[convert]
    outside = [getattr(torch, info.dtype, None) for info in request.model.outputs]

    def run(tensors: Any) -> list[Any]:
        inputs = [t.to(inside) if t.is_floating_point() else t for t in tensors]
        return [
            t.to(dtype) if dtype is not None and t.is_floating_point() else t
            for t, dtype in zip(call(inputs), outside, strict=True)
        ]

    return run


_numbers = itertools.count(1)
#: Held while PyTorch's key of what it keeps on disk is another one.
_tagging = threading.RLock()


def compiled(module: Any, settings: TorchSettings) -> Any:
    """Return a module for `torch.compile`, with code of its own: PyTorch keeps compiled code by code object."""
    import torch

    def run(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    run.__code__ = run.__code__.replace(co_name=f"session_{next(_numbers)}")
    return torch.compile(run, **settings.compile_options)


def compiling_apart(call: Call, pins: Pins) -> Call:
    """Let what is compiled for a shape be kept on disk under the session's own kernels.

    A graph has kernels built in that PyTorch's own key of it does not tell.
    """
    seen: set[Any] = set()
    tag = ""
    if pins.held is not None:
        text = json.dumps(pins.held.policy.to_dict(), sort_keys=True)
        tag = f"xpuruntime-session-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def run(tensors: Any) -> list[Any]:
        key = tuple((tensor.shape, tensor.dtype) for tensor in tensors)
        if key in seen:
            return call(tensors)
        with _tagged(tag):
            results = call(tensors)
        seen.add(key)
        return results

    return run


@contextlib.contextmanager
def _tagged(tag: str) -> Iterator[None]:
    import torch

    config = torch.compiler.config
    with _tagging:
        before = config.cache_key_tag
        config.cache_key_tag = before.partition("xpuruntime-")[0] + tag
        try:
            yield
        finally:
            config.cache_key_tag = before
