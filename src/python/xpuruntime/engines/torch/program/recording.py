# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`record`: operators that a module runs, in order, by the path of the module that calls them."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Interpreter, Node

from xpuruntime.engines.model.facts import NodeInfo
from xpuruntime.engines.torch.names import op_name
from xpuruntime.engines.torch.uncovered_calls import SOFTMAX, head_width
from xpuruntime.errors import UnsupportedOperationError
from xpuruntime.printable import error_line
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch._private_api import pytree


def record(module: Any, call: Callable[[], Any]) -> tuple[Any, tuple[NodeInfo, ...]]:
    """Run `call` and return its result and one node for each operator that ran.

    A node is called ``"layers.0.attn/addmm"``; the second of the same name in one module ``"layers.0.attn/addmm_1"``.
    """
    import torch

    recorder = ProgramRecorder(module)
    with torch.no_grad(), recorder.paths(), recorder.mode():
        result = call()
    return result, tuple(recorder.nodes)


class ProgramRecorder:
    """Names operators as they run."""

    def __init__(self, module: Any, around: Callable[[str, Callable[[], Any]], Any] | None = None) -> None:
        self.nodes: list[NodeInfo] = []
        self._module = module
        self._around = around
        self._stack: list[str] = [""]
        self._names: Counter[str] = Counter()
        self._made: dict[int, str] = {}
        self._alive: list[Any] = []
        #: While attention that is made of products runs: the width of its heads.
        self._width: int | None = None

    @contextlib.contextmanager
    def paths(self) -> Iterator[None]:
        """Follow which module runs in this thread."""
        handles = []
        thread = threading.get_ident()  # in others, the same module may run meanwhile

        def enter(path: str) -> None:
            if threading.get_ident() == thread:
                self._stack.append(path)

        def leave() -> None:
            if threading.get_ident() == thread:
                self._stack.pop()

        try:
            for path, part in self._module.named_modules():
                handles.append(part.register_forward_pre_hook(lambda *_, path=path: enter(path)))
                handles.append(part.register_forward_hook(lambda *_: leave(), always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def mode(self) -> Any:
        """Return the context in which operators are recorded.

        Attention is one operator, whatever it is made of: which operators those are depends on the kernel.
        """
        from torch.nn.functional import scaled_dot_product_attention
        from torch.overrides import TorchFunctionMode

        from xpuruntime.pytorch import _private_api

        recorder = self
        stack = contextlib.ExitStack()

        class Mode(_private_api.dispatch_mode_base):  # type: ignore[misc]
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                return recorder.run(func, args, kwargs or {})

        class Functions(TorchFunctionMode):  # type: ignore[misc]
            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func is scaled_dot_product_attention:
                    return recorder.run_as_operator("aten.scaled_dot_product_attention", func, args, kwargs or {})
                with recorder.inside(head_width(func, args, kwargs or {})):
                    return func(*args, **(kwargs or {}))

        stack.enter_context(Mode())
        stack.enter_context(Functions())
        return stack

    @contextlib.contextmanager
    def inside(self, width: int | None) -> Iterator[None]:
        """Say that what runs is attention that is made of products, with heads of this width; ``None``: it is not."""
        before, self._width = self._width, width
        try:
            yield
        finally:
            self._width = before

    def run_as_operator(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a function as one operator, as it runs without a recorder, and note none of those that it is made of."""
        from xpuruntime.pytorch import _private_api

        with _private_api.without_modes():
            return self._noted(op, func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run one operator and note it."""
        return self._noted(op_name(func), func, args, kwargs)

    def _noted(self, op: str, func: Any, args: Any, kwargs: Any) -> Any:
        import torch

        from xpuruntime.pytorch._private_api import pytree

        short = op.rpartition(".")[2]
        base = f"{self._stack[-1]}/{short}" if self._stack[-1] else short
        count = self._names[base]
        self._names[base] += 1
        name = f"{base}_{count}" if count else base
        tensors = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
        result = self._around(name, lambda: func(*args, **kwargs)) if self._around else func(*args, **kwargs)
        result_tensors = [v for v in pytree.tree_leaves(result) if isinstance(v, torch.Tensor)]
        inputs = tuple(dict.fromkeys(self._made[id(t)] for t in tensors if id(t) in self._made))
        outputs = tuple(name if i == 0 else f"{name}:{i}" for i in range(len(result_tensors)))
        for tensor, output in zip(result_tensors, outputs, strict=True):
            self._made[id(tensor)] = output
        self._alive.extend(result_tensors)  # so that no id comes twice
        width = self._width if short in SOFTMAX else None
        node = NodeInfo(name=name, op=op, domain="torch", inputs=inputs, outputs=outputs, by_products=width)
        self.nodes.append(node)
        return result


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
            inputs = [_as(x, target) for x in examples]
            _Retyping(module, target, where).run(*inputs, enable_io_processing=False)
    finally:
        mode.allow_non_fake_inputs = before
    module.graph.lint()
    module.recompile()
    return module


def _needs_it(graph: Any) -> bool:
    return any(_stated(node) for node in graph.nodes if node.op == "call_function")


def _stated(node: Node) -> bool:
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
        done: dict[Node, Node] = {}
        for input_ in n.all_input_nodes:
            value = self.env.get(input_)
            if isinstance(value, torch.Tensor) and value.dtype == torch.float32:
                with n.graph.inserting_before(n):
                    done[input_] = n.graph.call_function(torch.ops.aten.to.dtype, (input_, self._target))
                self.env[done[input_]] = value.to(self._target)
        for source, converted in done.items():
            n.replace_input_with(source, converted)
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
    return pytree.tree_map(lambda dtype: target if dtype is torch.float32 else dtype, values)
