# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`TensorSizes`: bytes of the results of each operator, and which results share memory."""

from __future__ import annotations

import statistics
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from xpuruntime.engines.base import Observed
from xpuruntime.engines.precision.types import FLOATS
from xpuruntime.engines.torch.names import multiplies_integers, torch_precision
from xpuruntime.engines.torch.observing.pinned_kernels import PinnedKernels
from xpuruntime.engines.torch.pinning import read_back
from xpuruntime.engines.torch.program.recording import ProgramRecorder
from xpuruntime.errors import InputError
from xpuruntime.evidence.documents import COLD, COUNTED, checkpoint
from xpuruntime.evidence.kernel_records import parse_kernel_name
from xpuruntime.evidence.memory_over_time import LiveBytes, UnitMemory, live_bytes
from xpuruntime.evidence.records import DeviceKernel, Span, Time, Timeline, Unit

if TYPE_CHECKING:
    from xpuruntime.engines.model import NodeInfo
    from xpuruntime.engines.torch.model import TorchModel

    Around = Callable[[str, Callable[[], Any]], Any]


class TensorSizes:
    """Notes the memory of results in one run of a program, operator by operator."""

    def __init__(self, module: Any, tensors: Sequence[Any]) -> None:
        held = (*module.parameters(), *module.buffers(), *tensors)
        self._given = {_memory(tensor) for tensor in held}
        #: Of the run that began last: operator to address and bytes of each result.
        self._results: dict[str, list[tuple[int, int]]] = {}

    def begin(self) -> None:
        """Forget the run before."""
        self._results.clear()

    def note_results(self, name: str, results: Sequence[Any]) -> None:
        """Note the results of an operator that has just run."""
        self._results[name] = [(_memory(result), int(result.untyped_storage().nbytes())) for result in results]

    def live(self, nodes: Mapping[str, NodeInfo], outputs: Collection[str] = ()) -> tuple[LiveBytes, ...]:
        """Return what is live around each operator that ran; nothing where one of them is not among `nodes`.

        A result at the address of something that its operator reads is a view of it: both are there at that moment.
        Several results of an operator that has one name for them count as one. A tensor that nobody reads is an output.
        """
        held: dict[str, set[int]] = {}
        steps = []
        for name, results in self._results.items():
            node = nodes.get(name)
            if node is None:
                return ()
            read = {address: input_ for input_ in node.inputs for address in held.get(input_, ())}
            makes: dict[str, int] = {}
            views: dict[str, str] = {}
            for output, series in _shared_out(node.outputs, results):
                held[output] = {address for address, _ in series}
                own = {a: size for a, size in series if a not in read and a not in self._given}
                bases = [read[a] for a, _ in series if a in read]
                if own:
                    makes[output] = sum(own.values())
                elif bases:
                    views[output] = bases[0]
                read |= dict.fromkeys(own, output)
            steps.append(UnitMemory(unit=name, reads=node.inputs, makes=makes, views=views))
        read_by_some = {name for step in steps for name in step.reads}
        unread = {make for step in steps for make in (*step.makes, *step.views)} - read_by_some
        return live_bytes(steps, {*unread, *outputs})


def _shared_out(
    outputs: Sequence[str], results: Sequence[tuple[int, int]]
) -> list[tuple[str, Sequence[tuple[int, int]]]]:
    if len(outputs) == len(results):
        return [(output, [result]) for output, result in zip(outputs, results, strict=True)]
    return [(outputs[0], results)] if outputs else []


def _memory(tensor: Any) -> int:
    return int(tensor.untyped_storage().data_ptr())


_MARK = "xpuruntime:"
#: An operator on the CPU is named for what is inside of it only with so many times the time of the next one.
_CLEAR = 2


def observe(model: TorchModel, tensors: Sequence[Any], runs: int) -> Observed:
    """Run the program `runs` times under PyTorch's profiler, after a cold run."""
    import torch

    effective = {"execution.engine": "torch", "execution.device": model.device}
    controls = {control.key: control for control in model.controls}
    effective.update(read_back(model.settings, model.switches()))
    kernels = PinnedKernels(model.pins, model.request.policy.kernels, controls, model.request.model.nodes, model.device)
    with torch.no_grad(), kernels.apart():
        if model.settings.mode == "compile":
            return _opaque(model, tensors, runs, effective, kernels)
        model.call(tensors)
        checkpoint(COLD)
        watch = _Watch(model, tensors, kernels)
        with kernels.watching():
            notes = watch.runs(tensors, runs)
        checkpoint(COUNTED)
    known = {node.name: node for node in model.request.model.nodes}
    missing = sorted(known.keys() - watch.order.keys())
    broken = bool(notes)
    if missing and not broken:
        notes.append(f"{missing[0]} and {len(missing) - 1} more did not run: the control flow depends on the inputs")
    nodes = [*known.values(), *(watch.nodes[name] for name in watch.order if name not in known and name in watch.nodes)]
    units = tuple(_unit(model, watch, node, inserted=node.name not in known) for node in nodes)
    return Observed(
        units=units,
        effective=effective,
        notes=(*notes, *kernels.notes()),
        partial=broken or bool(missing),
        keys=kernels.keys(),
        decisions=kernels.decisions(),
        run_us=tuple(watch.spent),
        units_us=() if model.device != "cpu" else tuple(sum(time for time, _ in run.values()) for run in watch.seen),
        live=watch.sizes.live({node.name: node for node in nodes}, _results(model.module)),
        timeline=watch.timeline,
    )


def _results(module: Any) -> tuple[str, ...]:
    graph = getattr(module, "graph", None)
    last = next((node for node in getattr(graph, "nodes", ()) if node.op == "output"), None)
    return tuple(node.name for node in last.all_input_nodes) if last is not None else ()


class _Watch:
    """Runs the program with a mark around each operator."""

    def __init__(self, model: TorchModel, tensors: Sequence[Any], kernels: PinnedKernels) -> None:
        self._model = model
        self.sizes = TensorSizes(model.module, tensors)
        self.kernels = kernels
        #: Of each operator in the last run: how often the device ran each kernel.
        self.launched: dict[str, Counter[str]] = {}
        #: Of the operators that ran, in their order.
        self.order: dict[str, None] = {}
        self.nodes: dict[str, NodeInfo] = {}
        self.precision: dict[str, str] = {}
        #: Of each run that finished: operator to microseconds, and to the time of each kernel in it.
        self.seen: list[dict[str, tuple[float, dict[str, float]]]] = []
        #: From the first operator of each run to the end of its last: putting the marks in place is no part of a run.
        self.spent: list[float] = []
        self._edges: list[float] = []
        self.timeline: Timeline | None = None

    def runs(self, tensors: Sequence[Any], count: int) -> list[str]:
        for number in range(count):
            try:
                self.seen.append(self.run(tensors))
            except InputError:
                raise
            except Exception as error:  # PyTorch and kernels of others raise what they like
                text = " ".join(str(error).split())[:300]
                return [f"instrumented run {number + 1} of {count} failed: {type(error).__name__}: {text}"]
        return []

    def run(self, tensors: Sequence[Any]) -> dict[str, tuple[float, dict[str, float]]]:
        import torch

        from xpuruntime.pytorch.profiling.kineto_recording import Profiler, refuse_a_second

        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._model.device != "cpu":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        refuse_a_second("what the torch engine observes")
        with Profiler(activities) as profiler, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._edges = []
            self.sizes.begin()
            self.nodes = step(self._model, tensors, self._around)
            if self._model.device != "cpu":
                torch.cuda.synchronize(self._model.device)
                self._edges.append(time.perf_counter())
        events = profiler.torch.events()
        if self._edges:
            self.spent.append((self._edges[-1] - self._edges[0]) * 1e6)
        measured: dict[str, tuple[float, dict[str, float]]] = {}
        for event in events:
            if event.name.startswith(_MARK) and str(event.device_type).endswith("CPU"):
                name = event.name[len(_MARK) :]
                measured[name] = _measured(event, cuda=self._model.device != "cpu")
                self.launched[name] = Counter(kernel.name for inner in _below(event) for kernel in inner.kernels)
                self.kernels.ran(name, [inner.name for inner in _below(event)], self.precision.get(name, ""))
        self.timeline = _timeline(events)
        return measured

    def _around(self, name: str, function: Callable[[], Any]) -> Any:
        import torch

        from xpuruntime.pytorch._private_api import pytree

        self.order[name] = None
        self.kernels.at(name)
        self._edges.append(time.perf_counter())
        with torch.profiler.record_function(_MARK + name):
            result = function()
        self._edges.append(time.perf_counter())
        self.kernels.at("")
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.sizes.note_results(name, tensors)
        kinds = {torch_precision(tensor.dtype) for tensor in tensors}
        self.precision[name] = "->".join(sorted(kinds))
        return result


def _timeline(events: Iterable[Any]) -> Timeline | None:
    """Return when operators ran on threads of the host, and kernels on devices; PyTorch's other events are left out."""
    spans, threads = [], dict[int, str]()
    for event in sorted(events, key=lambda event: event.time_range.start):
        start, us = event.time_range.start, event.time_range.elapsed_us()
        if str(event.device_type).endswith("CPU"):
            if event.name.startswith(_MARK):
                name = event.name[len(_MARK) :]
                lane = threads.setdefault(event.thread, f"thread {len(threads) + 1}")
                spans.append(Span(name=name, unit=name, kind="unit", lane=lane, start_us=start, us=us))
        elif not event.name.startswith(_MARK):
            lane = f"cuda:{event.device_index} stream {getattr(event, 'device_resource_id', 0)}"
            spans.append(Span(name=event.name, kind=_work_kind(event.name), lane=lane, start_us=start, us=us))
    if not spans or len(spans) > Timeline.MOST_SPANS:
        return None
    begin = spans[0].start_us
    spans = [msgspec.structs.replace(span, start_us=span.start_us - begin) for span in spans]
    return Timeline(run_us=max(span.start_us + span.us for span in spans), spans=tuple(spans))


def _work_kind(name: str) -> Literal["kernel", "copy", "fill"]:
    return "copy" if name.startswith("Memcpy") else "fill" if name.startswith("Memset") else "kernel"


def _measured(event: Any, *, cuda: bool) -> tuple[float, dict[str, float]]:
    kernels: dict[str, float] = defaultdict(float)
    for inner in _below(event):
        if cuda:
            for kernel in inner.kernels:
                kernels[kernel.name] += kernel.duration
        else:
            kernels[inner.name] += inner.self_cpu_time_total
    return (sum(kernels.values()) if cuda else event.time_range.elapsed_us()), dict(kernels)


def _ranked(runs: Sequence[Mapping[str, float]], *, cuda: bool) -> tuple[list[str], bool]:
    """Return the kernels of one operator, the one with the most time of its own first, and whether it clearly is."""
    # On the CPU they are PyTorch's operators; those that only call others are left out, unless there are no others. The
    # least of the runs counts: what else a machine does only adds.
    names = dict.fromkeys(name for run in runs for name in run)
    least = {name: min(run.get(name, 0.0) for run in runs) for name in names}
    computing = list(names) if cuda else [name for name in names if not _only_calls(name)] or list(names)
    order = sorted(computing, key=lambda name: -least[name])
    return order, cuda or len(order) < 2 or least[order[0]] >= _CLEAR * least[order[1]]


def _device_kernels(runs: Sequence[Mapping[str, float]], counts: Mapping[str, int]) -> tuple[DeviceKernel, ...]:
    kernels = []
    for name in dict.fromkeys(name for run in runs for name in run):
        said = parse_kernel_name(name)
        kernels.append(
            DeviceKernel(
                name=name,
                kind=_work_kind(name),
                count=counts.get(name, 1),
                us=float(statistics.median(run.get(name, 0.0) for run in runs)),
                runs=len(runs),
                tensor_cores=said.tensor_cores,
                precision=said.precision,
            )
        )
    return tuple(sorted(kernels, key=lambda step: -step.us))


def _only_calls(name: str) -> bool:
    from xpuruntime.pytorch import _private_api

    try:
        return bool(_private_api.has_kernel(name, "CompositeImplicitAutograd"))
    except RuntimeError:  # no operator of PyTorch's: a mark of somebody's
        return False


def _below(event: Any) -> Iterator[Any]:
    for child in event.cpu_children:
        yield child
        yield from _below(child)


def _unit(
    model: TorchModel,
    watch: _Watch,
    node: NodeInfo,
    *,
    inserted: bool,
) -> Unit:
    cuda = model.device != "cpu"
    times = [run[node.name][0] for run in watch.seen if node.name in run]
    kernels, clear = _ranked([run[node.name][1] for run in watch.seen if node.name in run], cuda=cuda)
    xrt_kernel = watch.kernels.kernel(node.name)
    on_device = [run[node.name][1] for run in watch.seen if node.name in run] if cuda else []
    ran = watch.precision.get(node.name) or None
    floats = sorted(FLOATS.intersection((ran or "").split("->")))
    requested = (model.settings.convert or (floats[0] if len(floats) == 1 else ran)) if floats else ran
    if multiplies_integers(node.op):
        requested = ran = "int8"
    elif ran == "int8":  # integers that are moved or converted: no arithmetic of the model's
        requested = None
    kind: Literal["device", "wall"] = "device" if cuda else "wall"
    return Unit(
        id=node.name,
        op=node.op,
        relation="inserted" if inserted else "exact",
        source_nodes=() if inserted else (node.name,),
        outputs=node.outputs,
        engine="torch",
        device=model.device,
        kernel=xrt_kernel or ", ".join(kernels if cuda else kernels[:1]) or None,
        kernel_source="reported" if xrt_kernel or (kernels and clear) else "inferred" if kernels else "unknown",
        precision_requested=requested,
        precision_run=ran,
        device_kernels=_device_kernels(on_device, watch.launched.get(node.name, Counter())),
        time=Time(value=float(statistics.median(times)), unit="us", kind=kind, runs=len(times)) if times else None,
        status="honoured" if times else "unobservable",
    )


def _opaque(
    model: TorchModel,
    tensors: Sequence[Any],
    runs: int,
    effective: dict[str, str],
    kernels: PinnedKernels,
) -> Observed:
    import torch

    cuda = model.device != "cpu"
    model.call(tensors)
    checkpoint(COLD)
    times = []
    with kernels.watching():
        model.call(tensors)
    for _ in range(runs):
        start = time.perf_counter()
        model.call(tensors)
        if cuda:
            torch.cuda.synchronize(model.device)
        times.append((time.perf_counter() - start) * 1e6)
    checkpoint(COUNTED)
    kinds = {torch_precision(p.dtype) for p in model.module.parameters() if p.is_floating_point()}
    ran = kinds.pop() if len(kinds) == 1 else None
    for node in model.request.model.nodes:
        kernels.attended(node.name, ran or "")
    unit = Unit(
        id="compiled",
        op="torch.compile",
        relation="opaque",
        source_nodes=tuple(node.name for node in model.request.model.nodes),
        outputs=model.outputs,
        engine="torch",
        device=model.device,
        precision_requested=model.settings.convert or ran,
        precision_run=ran,
        time=Time(value=float(statistics.median(times)), unit="us", kind="wall", runs=len(times)),
    )
    note = "torch.compile fuses operators; which of its kernels serves which operator is not reported"
    return Observed(
        units=(unit,),
        effective=effective,
        notes=(note, *kernels.notes()),
        keys=kernels.keys(),
        decisions=kernels.decisions(),
        run_us=tuple(times),
        units_us=tuple(times),
    )


def step(model: TorchModel, tensors: Sequence[Any], around: Around) -> dict[str, NodeInfo]:
    """Run the program once, under the session's kernels, with `around` called for each operator."""
    source: Any = model.request.model.source
    inputs = _inside(model, model.guard.protected(tensors))
    with model.pins.hold():
        if model.request.model.format == "pt2":
            source.call(_interpreted(model.module, source.names, around))(inputs)
            return {}
        recorder = ProgramRecorder(model.module, around)
        with recorder.paths(), recorder.mode():
            source.call(model.module)(inputs)
        return {node.name: node for node in recorder.nodes}


def intermediates(model: TorchModel, tensors: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return tensors inside of the program by name, copied; those that were not made are left out."""
    import torch

    from xpuruntime.pytorch._private_api import pytree

    wanted = set(names)
    known = {node.name: node.outputs for node in model.request.model.nodes}
    values: dict[str, Any] = {}

    def around(name: str, run: Callable[[], Any]) -> Any:
        result = run()
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs = known.get(name, ())
        if len(outputs) == len(tensors):
            for output, tensor in zip(outputs, tensors, strict=True):
                if output in wanted:
                    values[output] = tensor.clone()
        return result

    with torch.no_grad():
        step(model, tensors, around)
    return values


def _inside(model: TorchModel, tensors: Sequence[Any]) -> list[Any]:
    import torch

    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(model.settings.convert or "")
    return [t.to(kind) if kind is not None and t.is_floating_point() else t for t in tensors]


def _interpreted(module: Any, names: Mapping[str, str], around: Around) -> Any:
    from torch.fx import Interpreter

    from xpuruntime.pytorch._private_api import pytree

    class Marked(Interpreter):  # type: ignore[misc]
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            run = super().call_function
            return around(names[self.current.name], lambda: run(target, args, kwargs))

        def run_node(self, n: Any) -> Any:
            self.current = n
            return super().run_node(n)

    graph = module.graph

    def call(*args: Any, **kwargs: Any) -> Any:
        flat = pytree.tree_leaves((args, kwargs), is_leaf=lambda leaf: leaf is None)
        return graph.process_outputs(Marked(module).run(*flat, enable_io_processing=False))

    return call
