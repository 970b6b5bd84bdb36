# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Calls of a PyTorch program: without mutated inputs or aliased results, with static buffers, as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import kind_of, torch_dtype_name
from xpuruntime.engines.base import Binding
from xpuruntime.engines.input_binding import ConversionLog, closed_binding, fixed_shape, known_outputs
from xpuruntime.engines.torch.names import from_numpy, to_numpy, torch_dtype
from xpuruntime.errors import EngineFailed, InputError
from xpuruntime.printable import error_line

if TYPE_CHECKING:
    from xpuruntime.engines.torch.model import TorchModel
    from xpuruntime.engines.torch.program.sources import Call

#: Operators made of others whose results are new tensors all the same.
_COMPOSITES = frozenset({
    "conv1d", "conv2d", "conv3d", "cosine_similarity", "einsum", "layer_norm", "linear", "log_softmax", "matmul",
    "multi_head_attention", "scaled_dot_product_attention", "softmax",
})  # fmt: skip
#: Operators whose schemas do not say that their results are views.
_VIEWS = frozenset({"_reshape_alias", "_unsafe_view", "lift_fresh"})


class GuardedCall:
    """Calls a program; copies inputs that it writes, and results that share memory with something else.

    The graph of an exported program shows whether it writes anything and whether its results can be views. What writes,
    and any module, is called with copies the first time, which shows the inputs that it writes; results that can be
    views are looked at in each call.
    """

    def __init__(
        self, call: Call, source: Any, module: Any, names: Sequence[str], *, converted: bool, log: ConversionLog
    ) -> None:
        program = getattr(source, "program", None)
        self._raw = call
        self._inputs, self._names, self._log = tuple(source.inputs), tuple(names), log
        self._watch = self._untried = program is None or _writes(program)
        self._written: frozenset[int] = frozenset()
        #: Addresses of the memory of weights.
        self._held = frozenset(filter(None, map(_address, _tensors(module))))
        #: `call` for callers that copy the results themselves.
        self.unowned: Call = self._protected if self._watch else call
        new = program is not None and not converted and _makes_new_results(program)
        self.call: Call = self.unowned if new else self._owned

    def protected(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return the inputs with copies in place of those that the program writes."""
        if self._untried:
            return [tensor.clone() for tensor in tensors]
        written = self._written
        for index in written:
            self._log.add(f"input {self._inputs[index]!r} copied before a run", "the program writes into it")
        return [tensor.clone() if index in written else tensor for index, tensor in enumerate(tensors)]

    def _protected(self, tensors: Sequence[Any]) -> list[Any]:
        inputs = self.protected(tensors) if self._untried or self._written else tensors
        before = [_version(tensor) for tensor in inputs]
        results = self._raw(inputs)
        written = {i for i, tensor in enumerate(inputs) if _version(tensor) != before[i]}
        self._untried = False
        if not written <= self._written:
            self._written |= written
        return results

    def _owned(self, tensors: Sequence[Any]) -> list[Any]:
        results = self.unowned(tensors)
        taken = set(map(_address, tensors))
        for index, result in enumerate(results):
            address = _address(result)
            if address and (address in taken or address in self._held):
                results[index] = result.clone()
                self._log.add(
                    f"result {self._names[index]!r} copied",
                    "it shares memory with an input, a weight or another result",
                )
            else:
                taken.add(address)
        return results


def _address(tensor: Any) -> int:
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


def _version(tensor: Any) -> int:
    from xpuruntime.pytorch import _private_api

    try:
        return int(_private_api.tensor_version(tensor))
    except RuntimeError:  # made in inference mode: PyTorch lets nobody write it outside
        return 0


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _tensors(module: Any) -> Iterator[Any]:
    for part in module.modules():
        yield from part.parameters(recurse=False)
        yield from part.buffers(recurse=False)
        yield from filter(_is_tensor, vars(part).values())


def _writes(program: Any) -> bool:
    """Whether an exported program writes anything in place: an input, or what might be a view of one."""
    from xpuruntime.pytorch import _private_api

    if program.graph_signature.user_inputs_to_mutate:
        return True
    return any(
        argument.alias_info is not None and argument.alias_info.is_write
        for node in program.graph.nodes
        for argument in getattr(_private_api.operator_schema(node.target), "arguments", ())
    )


def _makes_new_results(program: Any) -> bool:
    """Whether each result of an exported program is made by an operator of its own that never returns a view."""
    from torch.fx import Node

    output = next(iter(reversed(program.graph.nodes)))
    results = [node for node in output.all_input_nodes if isinstance(node, Node)]
    flat = [node for node in _leaves(output.args) if isinstance(node, Node)]
    return len(flat) == len(results) and all(map(_makes_new, results))


def _leaves(value: Any) -> list[Any]:
    from xpuruntime.pytorch._private_api import pytree

    return list(pytree.tree_leaves(value))


def _makes_new(node: Any) -> bool:
    from xpuruntime.pytorch import _private_api

    target = node.target
    if node.op != "call_function" or not isinstance(target, _private_api.operator_class) or target.namespace != "aten":
        return False
    schema = _private_api.operator_schema(target)
    name = schema.name.partition("::")[2]
    if name in _COMPOSITES:
        return True
    composite = _private_api.has_kernel(target.name(), "CompositeImplicitAutograd")
    aliases = any(result.alias_info is not None for result in schema.returns)
    return not composite and not aliases and name not in _VIEWS


_WARM_UP = 3


class TorchBinding(Binding):
    """Buffers bound to one `TorchModel`: NumPy views on the CPU, tensors of torch on CUDA and where one was given.

    Each run copies the results into the output buffers, since PyTorch makes new ones; a captured graph does so inside.
    Where a buffer of an output shares memory with an input, results that are views are copied first.
    """

    def __init__(self, model: TorchModel, inputs: Mapping[str, Any], outputs: Mapping[str, Any], stream: Any) -> None:
        import torch

        self._torch = torch
        self._model = model
        check = model.check
        check.names({**dict.fromkeys(check.required), **inputs})
        known_outputs(outputs, model.outputs)
        buffers = [v for v in (*inputs.values(), *outputs.values()) if v is not None and not isinstance(v, tuple)]
        numpy = model.device == "cpu" and not any(kind_of("buffer", v) == "torch" for v in buffers)
        self._stream = model._stream(stream)
        with self._stream:
            self._inputs = {name: self._input(name, inputs.get(name)) for name in model.names}
        for name, tensor in self._inputs.items():
            check.check(name, torch_dtype_name(tensor.dtype), tuple(tensor.shape))
        check.symbols({name: tuple(tensor.shape) for name, tensor in self._inputs.items()})
        with torch.no_grad(), self._stream:
            try:
                results = model.call(list(self._inputs.values()))
            except Exception as error:
                raise model.failed(error) from None
            self._outputs = {
                name: self._output(name, result, outputs.get(name))
                for name, result in zip(model.outputs, results, strict=True)
            }
        self._overlaps = _overlaps(self._inputs, self._outputs)
        self.inputs = {n: inputs[n] if _is_array(inputs.get(n)) else _shown(t, numpy) for n, t in self._inputs.items()}
        self.outputs = {n: outputs[n] if n in outputs else _shown(t, numpy) for n, t in self._outputs.items()}
        self.graph = "off"
        self.run = self._runner()

    def _runner(self) -> Callable[[], None]:
        model, torch, around = self._model, self._torch, self._stream
        ins, outs = list(self._inputs.values()), list(self._outputs.items())
        call = model.guard.call if self._overlaps else model.call
        failed, no_grad = model.failed, torch.no_grad

        def compute() -> None:
            try:
                for (name, target), result in zip(outs, call(ins), strict=True):
                    if target.shape != result.shape or target.dtype != result.dtype:
                        raise _changed(name, target, result)
                    target.copy_(result)
            except Exception as error:
                raise failed(error) from None

        def run() -> None:
            with no_grad(), around:
                compute()

        if model.settings.graph == "off":
            return run
        try:
            with no_grad(), around:
                graph = self._capture(compute)
        except Exception as error:
            if model.settings.graph == "require":
                text = error_line(error)
                raise EngineFailed(
                    f"{model.request.model.path} cannot be captured as a CUDA graph: {text}. "
                    "State cuda_graph: prefer to run it without",
                    engine="torch",
                    device=model.device,
                ) from None
            self.graph = error_line(error)
            return run
        self.graph = "captured"

        def replay() -> None:
            with around:
                graph.replay()

        return replay

    def _capture(self, compute: Callable[[], None]) -> Any:
        from xpuruntime.pytorch.capture.graph_recorder import CudaRecorder

        # It repairs what PyTorch leaves behind when a capture fails, such as generators that refuse to draw.
        self._recorder = CudaRecorder(self._torch.device(self._model.device))
        with self._recorder.warming():
            for _ in range(_WARM_UP):
                compute()
        return self._recorder.record(compute, []).graph

    def _input(self, name: str, buffer: Any) -> Any:
        model, torch = self._model, self._torch
        info = model.check.infos[name]
        if buffer is None or isinstance(buffer, tuple):
            shape = fixed_shape(info, buffer)
            return torch.zeros(shape, dtype=torch_dtype(info.dtype), device=model._where)
        if kind_of(name, buffer) == "numpy":
            if model.device != "cpu":
                msg = (
                    f"input {name!r} is a NumPy array, whose memory cannot be bound on {model.device}. "
                    "Fix: pass its shape, "
                    "or a CUDA tensor"
                )
                raise InputError(msg)
            if not buffer.flags.c_contiguous:
                msg = (
                    f"input {name!r} is not C-contiguous, so its memory cannot be bound. Fix: pass "
                    "np.ascontiguousarray(x), or its shape"
                )
                raise InputError(msg)
        return model.tensor(name, buffer)

    def _output(self, name: str, result: Any, buffer: Any) -> Any:
        torch = self._torch
        if buffer is None:
            return torch.empty_like(result, memory_format=torch.contiguous_format)
        if not hasattr(buffer, "__dlpack__"):
            msg = (
                f"output {name!r} is given as a {type(buffer).__name__}. "
                "Fix: pass an array to write into, or leave it out"
            )
            raise InputError(msg)
        if kind_of(name, buffer) == "numpy" and not (buffer.flags.c_contiguous and buffer.flags.writeable):
            raise InputError(
                f"output {name!r} must be C-contiguous and writable to be bound. Fix: pass np.empty(shape, dtype)"
            )
        kind = kind_of(name, buffer)
        tensor = buffer if kind == "torch" else from_numpy(buffer) if kind == "numpy" else torch.from_dlpack(buffer)
        if tensor.dtype != result.dtype or tensor.shape != result.shape:
            msg = (
                f"output {name!r} is {torch_dtype_name(result.dtype)} {list(result.shape)} for these inputs, got "
                f"{torch_dtype_name(tensor.dtype)} {list(tensor.shape)}. "
                "Fix: pass such a tensor, or leave the output out"
            )
            raise InputError(msg)
        if tensor.device != result.device:
            msg = (
                f"output {name!r} is on {tensor.device}, but this session runs on {result.device}. "
                "Fix: pass a tensor of "
                "that device, or leave the output out"
            )
            raise InputError(msg)
        return tensor

    def close(self) -> None:
        """Release the buffers and the captured graph."""
        self.run = closed_binding
        self._inputs, self._outputs = {}, {}
        self.inputs, self.outputs = {}, {}


def _overlaps(inputs: Mapping[str, Any], outputs: Mapping[str, Any]) -> bool:
    spans = {name: _span(tensor) for name, tensor in outputs.items() if tensor.is_contiguous()}
    for name, (start, end) in spans.items():
        for other, (least, most) in spans.items():
            if other != name and start < most and least < end:
                raise InputError(f"the buffers of outputs {name!r} and {other!r} share memory. Fix: give each its own")
    places = [_span(tensor) for tensor in outputs.values()]
    return any(start < most and least < end for start, end in map(_span, inputs.values()) for least, most in places)


def _span(tensor: Any) -> tuple[int, int]:
    start = tensor.data_ptr()
    if not tensor.numel():
        return start, start
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return start, start + (last + 1) * tensor.element_size()


def _changed(name: str, target: Any, result: Any) -> InputError:
    before, now = (f"{torch_dtype_name(t.dtype)} {list(t.shape)}" for t in (target, result))
    msg = f"output {name!r} changed from {before} to {now}, which its buffer cannot hold"
    return InputError(msg, fix="results = session.run(inputs), which binds no buffer")


def _is_array(value: Any) -> bool:
    return value is not None and not isinstance(value, tuple)


def _shown(tensor: Any, numpy: bool) -> Any:
    return to_numpy(tensor) if numpy else tensor
