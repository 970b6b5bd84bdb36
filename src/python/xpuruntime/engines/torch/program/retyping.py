# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Retyping of an exported graph whose weights have been converted to 16 bits: the types that its nodes state.

A module asks a tensor for its type; its graph has what the answer was at export. So the graph is followed once, without
computing: what makes a tensor out of nothing makes it in the new type, a conversion of what is float32 by a conversion
to float32 is one back to the new type, and operators that take one type alone are given it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Interpreter, Node

from xpuruntime.error_text import error_line
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch._private_api import pytree

__all__ = ["retype"]

_CASTS = frozenset(("to", "_to_copy", "type_as"))


def retype(module: Any, target: torch.dtype, where: str) -> Any:
    """Return a graph module whose graph states the types of its converted weights."""
    if not _needs_it(module.graph):
        return module
    for node in list(module.graph.nodes):
        if _private_api.operator_name(node.target) == "_assert_tensor_metadata":
            module.graph.erase_node(node)  # what was so at export
    examples = [node.meta.get("val") for node in module.graph.nodes if node.op == "placeholder"]
    mode = (
        next((x.fake_mode for x in examples if isinstance(x, _private_api.fake_tensor())), None)
        or _private_api.fake_tensor_mode()()
    )
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode, torch.no_grad():
            given = [_as(x, target) for x in examples]
            _Retyping(module, target, where).run(*given, enable_io_processing=False)
    finally:
        mode.allow_non_fake_inputs = before
    module.graph.lint()
    module.recompile()
    return module


def _needs_it(graph: Any) -> bool:
    return any(_stated(node) for node in graph.nodes if node.op == "call_function")


def _stated(node: Node) -> bool:
    """Say whether a node states float32, in its arguments."""
    return any(leaf is torch.float32 for leaf in pytree.tree_leaves((node.args, node.kwargs)))


def _as(value: Any, target: torch.dtype) -> Any:
    return value.to(target) if isinstance(value, torch.Tensor) and value.dtype == torch.float32 else value


class _Retyping(Interpreter):  # type: ignore[misc]
    def __init__(self, module: Any, target: torch.dtype, where: str) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._target = target
        self._where = where

    def run_node(self, n: Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        tensors = [x for x in pytree.tree_leaves(self.fetch_args_kwargs_from_env(n)) if isinstance(x, torch.Tensor)]
        floats = [x for x in tensors if x.is_floating_point()]
        name = _private_api.operator_name(n.target)
        back = name in _CASTS and any(x.dtype == torch.float32 for x in floats)
        if _stated(n) and (not tensors or back):
            n.args = _replaced(n.args, self._target)
            n.kwargs = _replaced(n.kwargs, self._target)
        try:
            return super().run_node(n)
        except (RuntimeError, NotImplementedError) as error:
            if not self._cast(n):
                raise self._refused(n, error) from error
        try:
            return super().run_node(n)
        except (RuntimeError, NotImplementedError) as error:
            raise self._refused(n, error) from error

    def _cast(self, n: Node) -> bool:
        """Convert the float32 tensors that a node takes beside others."""
        done: dict[Node, Node] = {}
        for one in n.all_input_nodes:
            value = self.env.get(one)
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                with n.graph.inserting_before(n):
                    done[one] = n.graph.call_function(torch.ops.aten.to.dtype, (one, self._target))
                self.env[done[one]] = value.to(self._target)
        for one, converted in done.items():
            n.replace_input_with(one, converted)
        return bool(done)

    def _refused(self, n: Node, error: Exception) -> UnsupportedOperationError:
        reason = error_line(error)
        kind = str(self._target).removeprefix("torch.")
        return UnsupportedOperationError(
            f"the model {self._where!r} cannot run in {kind}: PyTorch refuses {n.target}: {reason}. Fix: leave "
            "precision at 'model' or 'fp32', or export the module after converting it",
            engine="torch",
        )


def _replaced(values: Any, target: torch.dtype) -> Any:
    return pytree.tree_map(lambda one: target if one is torch.float32 else one, values)
