# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`step`: a PyTorch program run operator by operator, under the names of its nodes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from xpuruntime.engines.torch.program.recording import ProgramRecorder

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from xpuruntime.engines.model import NodeInfo
    from xpuruntime.engines.torch.model import TorchModel

    #: ``around(name, run) -> result`` runs one operator.
    Around = Callable[[str, Callable[[], Any]], Any]

__all__ = ["intermediates", "step"]


def step(model: TorchModel, tensors: Sequence[Any], around: Around) -> dict[str, NodeInfo]:
    """Run the program once, under the session's kernels, with `around` called for each operator."""
    source: Any = model.request.model.source
    given = _inside(model, model.guard.protected(tensors))
    with model.pins.hold():
        if model.request.model.format == "pt2":
            source.call(_interpreted(model.module, source.names, around))(given)
            return {}
        recorder = ProgramRecorder(model.module, around)
        with recorder.paths(), recorder.mode():
            source.call(model.module)(given)
        return {node.name: node for node in recorder.nodes}


def intermediates(model: TorchModel, tensors: Sequence[Any], names: Sequence[str]) -> dict[str, Any]:
    """Return tensors inside of the program by name, copied; those that were not made are left out."""
    import torch

    from xpuruntime.pytorch._private_api import pytree

    wanted = set(names)
    known = {node.name: node.outputs for node in model.request.model.nodes}
    found: dict[str, Any] = {}

    def around(name: str, run: Callable[[], Any]) -> Any:
        result = run()
        made = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        outputs = known.get(name, ())
        if len(outputs) == len(made):
            for output, tensor in zip(outputs, made, strict=True):
                if output in wanted:
                    found[output] = tensor.clone()
        return result

    with torch.no_grad():
        step(model, tensors, around)
    return found


def _inside(model: TorchModel, tensors: Sequence[Any]) -> list[Any]:
    import torch

    kind = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(model.settings.convert or "")
    return [t.to(kind) if kind is not None and t.is_floating_point() else t for t in tensors]


def _interpreted(module: Any, names: Mapping[str, str], around: Around) -> Any:
    """Return what runs a graph module node by node."""
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
