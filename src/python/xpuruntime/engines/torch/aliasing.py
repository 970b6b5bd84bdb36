# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GuardedCall`: a program run without mutated inputs and without results that alias them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from xpuruntime.engines.input_binding import ConversionLog
    from xpuruntime.engines.torch.program.sources import Call

__all__ = ["GuardedCall"]

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
    """Return where the memory of a tensor begins, 0 where it has none."""
    try:
        return int(tensor.untyped_storage().data_ptr())
    except (NotImplementedError, RuntimeError):  # sparse tensors
        return 0


def _version(tensor: Any) -> int:
    """Return a number that changes when the tensor is written."""
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
