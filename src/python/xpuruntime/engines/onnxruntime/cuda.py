# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A model loaded by ONNX Runtime on the CUDA provider.

The session computes on a stream of its own. Each run is put between two waits: the session's stream waits for the
caller's, and the caller's waits for the session's. The host never waits, and the caller's arrays are used in the order
in which the caller wrote them. A server's host arrays are copied on other streams, see `cuda_host`; what excludes what
is in `cuda_turns`.

With an xpuruntime pool ONNX Runtime refuses a stream from outside. Then runs are put one after the other, and the
host waits for the caller's stream before each and for the device after it.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import Kind, kind_of
from xpuruntime.engines.base import Binding, LoadedModel, Observed, closed
from xpuruntime.engines.cuda_arrays import (
    DeviceArray,
    as_kind,
    caller_stream,
    device_array,
    host_copies,
    made_current,
    several_devices,
    stream_owner,
)
from xpuruntime.engines.input_binding import ConversionLog, InputValidator
from xpuruntime.engines.onnxruntime._private_api import raw_binding, raw_device, raw_session
from xpuruntime.engines.onnxruntime.cuda_host import CudaHostRunner, HostRuns
from xpuruntime.engines.onnxruntime.device_arrays import DLPackArray, as_bool, element_type, new_turn, no_capture
from xpuruntime.engines.onnxruntime.opening import Opened, translate
from xpuruntime.errors import InputError, XpuRuntimeError

if TYPE_CHECKING:
    from xpuruntime.engines.host_model import HostRunner
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.onnxruntime.options import OnnxRuntimeSettings
    from xpuruntime.evidence.records import Conversion

_GRAPH_ID = "gpu_graph_id"
_NO_CAPTURE = "-1"
_NO_SYNC = "disable_synchronize_execution_providers"
_SEEN_LIMIT = 4096


class CudaModel(LoadedModel):
    """Runs on the CUDA provider. CUDA arrays in, CUDA arrays of the caller's kind out; NumPy in, NumPy out."""

    def __init__(
        self,
        opened: Opened,
        info: ModelInfo,
        *,
        device: str,
        settings: OnnxRuntimeSettings,
        stream: Any,
        allocator: Any,
        graph_refused: str | None,
        observer: Callable[[Mapping[str, Any], int], Observed],
        log: ConversionLog,
    ) -> None:
        self._session: Any = opened.session
        self.info = info
        self.device = device
        self.index = int(device.partition(":")[2] or 0)
        self.settings = settings
        self.stream = stream
        self.graph_refused = graph_refused
        self._allocator = allocator
        self._observer = observer
        self.log = log
        self.output_names = [o.name for o in self._session.get_outputs()]
        defaults = info.overridable_inputs
        self.check = InputValidator((*info.inputs, *defaults), [i.name for i in defaults])
        types = {info.name: info.dtype for info in info.outputs}
        self._booleans = [i for i, name in enumerate(self.output_names) if types.get(name) == "bool"]
        #: Outputs that are inputs: ONNX Runtime hands the caller's own memory back for them.
        self.passed = [i for i, name in enumerate(self.output_names) if name in self.check.infos]
        self._graph_ids = itertools.count(1)
        self.turn = new_turn()
        #: Whether a graph was captured, which may write wherever ONNX Runtime had memory to spare then.
        self.captured = False
        self._local = threading.local()
        self._host_options = self.run_options(sync=True)
        self.device_options = self.run_options(sync=stream is None)
        self.several = several_devices()
        self._foreign: dict[int, Any] = {}
        self._others: list[Any] = []
        self._meeting = threading.Lock()
        self.where = self._ort_device()
        self._copies: Any = None

    @property
    def graphs(self) -> bool:
        """Whether the session can capture CUDA graphs."""
        return self.settings.options.get("enable_cuda_graph") == "1"

    @property
    def session(self) -> Any:
        """The ONNX Runtime session."""
        if self._session is None:
            closed()
        return self._session

    def run_options(self, *, sync: bool, graph_id: str = _NO_CAPTURE) -> Any:
        """Return ``RunOptions``; without `sync` the host does not wait for the device."""
        import onnxruntime as ort

        options = ort.RunOptions()
        options.log_severity_level = 4
        if self.graphs:
            options.add_run_config_entry(_GRAPH_ID, graph_id)
        if not sync:
            options.add_run_config_entry(_NO_SYNC, "1")
        return options

    def next_graph_id(self) -> str:
        """Return a graph id no other binding has."""
        return str(next(self._graph_ids))

    def on_device(self) -> contextlib.AbstractContextManager[None]:
        """Make the session's device current: ONNX Runtime expects it, and does not see to it in each call."""
        return made_current(self.device, several=self.several)

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self._session is None

    def foreign(self, stream: Any, kind: Kind) -> Any:
        """Return the caller's stream as an `_core.Stream`; remembered: its reads of outputs may still be queued."""
        handle = caller_stream(stream, kind, self.index)
        known = self._foreign.get(handle)
        return known if known is not None else self._meet(handle, stream_owner(stream, kind))

    def known_stream(self, handle: int) -> Any:
        """Return a stream of torch, which never destroys one, as an `_core.Stream`."""
        known = self._foreign.get(handle)
        return known if known is not None else self._meet(handle, None)

    def _meet(self, handle: int, owner: Any) -> Any:
        from xpuruntime import _core

        with self._meeting:  # two that are met at once are both waited for
            if handle in self._foreign:
                return self._foreign[handle]
            if self.stream is not None and handle == self.stream.handle:
                self._foreign[handle] = self.stream
                return self.stream
            known = _core.Stream.wrap(stream=handle, device=self.device, owner=owner)
            self._others = [*self._others, known]
            self._foreign[handle] = known
            return known

    def own_stream(self) -> Any:
        """Return a new stream of this session's own, whose reads of results nobody has to wait for."""
        from xpuruntime import _core

        stream = _core.Stream(self.device)
        with self._meeting:
            self._foreign[stream.handle] = stream
        return stream

    def enter(self) -> None:
        """Put what follows after all work queued so far on every stream that ever received outputs."""
        for other in self._others:
            if self.stream is None:
                other.synchronize()
            else:
                self.stream.wait_stream(other)

    def leave(self, stream: Any) -> None:
        """Let the caller's stream wait for the session's; without one, the run has ended already."""
        if self.stream is not None and stream != self.stream:
            stream.wait_stream(self.stream)

    def runner(self) -> Callable[..., dict[str, Any]]:
        """Return a fast path for torch tensors; with an xpuruntime pool, where the host waits, `checked_run`."""
        if self.stream is None or self.passed:
            return self.checked_run
        from xpuruntime.engines.onnxruntime.cuda_host import torch_runner

        return torch_runner(self)

    def host_runner(self) -> HostRunner | None:
        """Return runs of a server; see `LoadedModel.host_runner`."""
        runs = HostRuns.of(self)
        return None if runs is None else CudaHostRunner(self, runs)

    def run(self, feeds: Mapping[str, Any], stream: Any = None) -> dict[str, Any]:
        """Check, run, and return results in the caller's kind; see `InferenceSession`."""
        session = self.session
        self.check.names(feeds)
        kinds = {name: kind_of(name, array) for name, array in feeds.items()}
        if any(kind != "numpy" for kind in kinds.values()):
            return self._run_device(session, feeds, kinds, stream)
        if stream is not None:
            msg = "stream= orders device arrays, and these inputs are NumPy, for which run() waits itself. Leave it out"
            raise InputError(msg)
        return self._run_host(session, feeds)

    def _run_host(self, session: Any, feeds: Mapping[str, Any]) -> dict[str, Any]:
        ready = self.hosts(feeds)
        with self.turn, self.on_device():
            self._settle()
            try:
                results = raw_session(session).run(self.output_names, ready, self._host_options)
            except Exception as error:
                raise self.failed(error) from None
        for position in self.passed:  # ONNX Runtime may read it on the device before it has arrived there
            results[position] = ready[self.output_names[position]].copy()
        return dict(zip(self.output_names, results, strict=True))

    def _settle(self) -> None:
        """Wait for the device: ONNX Runtime copies host arrays outside of our stream, into memory of earlier runs."""
        self.enter()
        if self.stream is not None:
            self.stream.synchronize()

    def _run_device(
        self, session: Any, feeds: Mapping[str, Any], kinds: Mapping[str, Kind], stream: Any
    ) -> dict[str, Any]:
        kind: Kind = next((kind for kind in kinds.values() if kind != "numpy"), "tensor")
        caller = self.foreign(stream, kind)
        binding = self.thread_binding()
        where = self.where
        with self.turn, self.on_device():
            # In the turn, since copies and waits on a stream that another thread captures would be part of its graph.
            items = {name: self._device_item(name, array, kinds[name], caller) for name, array in feeds.items()}
            self.check.admit({name: (item.dtype, item.shape) for name, item in items.items()})
            self.enter()
            try:
                for name, item in items.items():
                    if item.pointer is None:
                        self._settle()
                        binding.bind_input(name, item.owner)
                    else:
                        binding.bind_input(name, where, element_type(name, item.dtype), item.shape, item.pointer)
                for name in self.output_names:
                    binding.bind_output(name, where)
                raw_session(session).run_with_iobinding(binding, self.device_options)
                # The values live in the binding; their capsules own the memory.
                capsules = self.take(binding)
            except XpuRuntimeError:
                raise
            except Exception as error:
                raise self.failed(error) from None
            finally:
                self.leave(caller)
                binding.clear_binding_inputs()
                binding.clear_binding_outputs()
        names = self.output_names
        return {name: self.output(capsule, kind, caller) for name, capsule in zip(names, capsules, strict=True)}

    def take(self, binding: Any) -> list[Any]:
        """Return the results in `binding` as DLPack capsules, in the order of the outputs."""
        values = binding.get_outputs()
        # By index: the end of an iteration is a C++ exception there, which takes longer than the run.
        capsules = [values[i].to_dlpack() for i in range(len(self.output_names))]
        for position in self._booleans:
            as_bool(capsules[position])
        for position in range(len(capsules)) if self.captured else self.passed:
            capsules[position] = self._copied(capsules[position])
        return capsules

    def _copied(self, capsule: Any) -> Any:
        """Return a copy of a result on the device, in memory that this session alone uses again, in its own order."""
        from xpuruntime import _core

        source = _core.Tensor.from_dlpack(DLPackArray(capsule, self.index), stream=self.stream)
        if self._copies is None:
            self._copies = _core.MemoryPool(self.device, name=f"session {Path(self.info.path).name}, copied results")
        copy = _core.Tensor.empty(source.shape, source.dtype, self.device, pool=self._copies, stream=self.stream)
        copy.copy_(source, stream=self.stream)
        if self.stream is None:
            copy.synchronize()
        return copy.__dlpack__()

    def thread_binding(self) -> Any:
        """Return this thread's binding, made when first asked for."""
        held = getattr(self._local, "binding", None)
        if held is None:
            held = self._local.binding = self.session.io_binding()
        return raw_binding(held)

    def _device_item(self, name: str, array: Any, kind: Kind, caller: Any) -> DeviceArray:
        if kind != "numpy":
            order = self.stream if self.stream is not None else caller
            return self._contiguous(name, device_array(name, array, kind, self.device, order), caller)
        host = self.check.contiguous(name, array, strict=self.settings.strict, log=self.log)
        self.log.add(f"input {name!r} copied to {self.device}", "it was a NumPy array among device arrays")
        return DeviceArray(None, host.dtype.name, host.shape, True, host)

    @staticmethod
    def remember_in(seen: set[tuple[Any, ...]], key: tuple[Any, ...]) -> None:
        """Add `key`; forget all of `seen` first when it has grown large."""
        if len(seen) >= _SEEN_LIMIT:
            seen.clear()
        seen.add(key)

    def hosts(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return checked, contiguous arrays of the host."""
        return self.check.on_host(feeds, strict=self.settings.strict, log=self.log)

    def _contiguous(self, name: str, item: DeviceArray, caller: Any) -> DeviceArray:
        if item.contiguous:
            return item
        if self.settings.strict:
            msg = f"input {name!r} is not C-contiguous and the policy is strict. Fix: pass x.contiguous()"
            raise InputError(msg)
        from xpuruntime import _core

        self.log.add(f"input {name!r} copied once", "it was not C-contiguous")
        order = caller
        if self.stream is not None:
            order = self.stream
            order.wait_stream(caller)  # which may write the input still
        tensor = _core.Tensor.from_dlpack(item.owner, stream=order).contiguous(stream=order)
        return DeviceArray(tensor.data_ptr, tensor.dtype, tuple(tensor.shape), True, tensor)

    def output(self, capsule: Any, kind: Kind, caller: Any) -> Any:
        """Return a DLPack capsule of a result on the device in the caller's kind, without a copy."""
        if kind == "torch":
            return sys.modules["torch"].from_dlpack(capsule)
        from xpuruntime import _core

        exported = DLPackArray(capsule, self.index)
        if kind == "cupy":
            return sys.modules["cupy"].from_dlpack(exported)
        return as_kind(_core.Tensor.from_dlpack(exported, stream=caller), kind)

    def _ort_device(self) -> Any:
        import onnxruntime as ort

        return raw_device(ort.OrtDevice.make("cuda", self.index))

    def failed(self, error: Exception) -> XpuRuntimeError:
        """Return `error` as an xpuruntime error, with the reason of the xpuruntime pool where that refused."""
        hint = ""
        if self._allocator is not None:
            reason = self._allocator.take_failure()
            hint = f"The pool said: {reason}." if reason else ""
        return translate(error, doing=f"running {self.info.path}", device=self.device, hint=hint)

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Bind device buffers; see `InferenceSession.bind`."""
        from xpuruntime.engines.onnxruntime.cuda_binding import CudaBinding

        return CudaBinding(self, inputs or {}, outputs or {}, stream)

    def observe(self, feeds: Mapping[str, Any], runs: int) -> Observed:
        """Run an instrumented copy; see `LoadedModel.observe`. Device arrays are copied to the host first."""
        host = host_copies(feeds)
        with no_capture(), self.on_device():
            return self._observer(self.hosts(host), runs)

    def conversions(self) -> Sequence[Conversion]:
        """Return what was copied so far."""
        return self.log.records()

    def memory(self) -> dict[str, int]:
        """Return bytes the provider holds in xpuruntime's pool; empty when it uses its own arena."""
        return {} if self._allocator is None else {"engine": int(self._allocator.stats().current)}

    def graph_refusal(self) -> str | None:
        """Return why the session was opened without CUDA graphs although the policy prefers them, or ``None``."""
        return self.graph_refused

    def close(self) -> None:
        """Drop the session; runs in other threads finish first, since they hold it."""
        with no_capture(), self.on_device():
            self._session = None
            self._local = threading.local()
        if self._allocator is not None:
            self.enter()  # what the pool takes back is used again only after the caller's reads
            self._allocator = None
        self._foreign.clear()
        self._others = []
