# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Programs and modules of PyTorch with one interface, and the names of their dynamic dimensions."""

from __future__ import annotations

import contextlib
import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.model.file import refuse
from xpuruntime.errors import InputError, ModelError, UnsupportedOperationError
from xpuruntime.evidence.metadata import DIMENSIONS_KEY
from xpuruntime.printable import error_line

if TYPE_CHECKING:
    Call = Callable[[Sequence[Any]], list[Any]]

__all__ = [
    "Call",
    "ExportedSource",
    "ModuleSource",
    "given_names",
    "leaves",
    "spelled",
]

_DTYPES = {"fp16": "float16", "bf16": "bfloat16"}


def leaves(result: Any, where: str) -> list[tuple[str, Any]]:
    """Return the tensors in a result with the names they go by, in order.

    A single tensor is ``"output"``, those of a tuple are ``"output_0"``, those of a mapping have its keys.
    """
    import torch

    from xpuruntime.pytorch._private_api import pytree

    named_leaves = []
    for path, value in pytree.tree_flatten_with_path(result)[0]:
        if value is None:
            continue
        name = "_".join(str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path)
        if not name or name[0].isdigit():
            name = f"output_{name}" if name else "output"
        if not isinstance(value, torch.Tensor):
            msg = (
                f"cannot use the model {where!r}: its result {name!r} is a {type(value).__name__}, not a tensor. "
                "Fix: return tensors only."
            )
            raise ModelError(msg)
        named_leaves.append((name, value))
    return named_leaves


class ExportedSource:
    """An exported program."""

    device: str | None = None
    examples: Mapping[str, Any] | None = None

    def __init__(
        self, program: Any, inputs: tuple[str, ...], outputs: tuple[str, ...], where: str, names: dict[str, str]
    ) -> None:
        self.names = names
        self.program = program
        self.inputs = inputs
        self.outputs = outputs
        self.where = where

    def place(self, device: str, convert: str | None) -> Any:
        """Return a graph module on `device` with weights of the type `convert`, apart from the program itself."""
        import torch

        from xpuruntime.pytorch import _private_api

        program = self.program
        if any(str(t.device) != device for t in (*program.state_dict.values(), *program.constants.values())):
            import copy

            from torch.export.passes import move_to_device_pass

            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                program = move_to_device_pass(copy.deepcopy(program), device)
        known = inspect.signature(program.module).parameters
        module = program.module(check_guards=False) if "check_guards" in known else program.module()
        _private_api.forward_pre_hooks(module).clear()  # they check the shapes once more, which the session has done
        if convert is None:
            return module
        from xpuruntime.engines.torch.program.recording import retype

        target = getattr(torch, _DTYPES[convert])
        return retype(_convert(module, target), target, self.where)

    @property
    def plain(self) -> bool:
        """Whether it is called with its tensors by position and nothing else."""
        from xpuruntime.pytorch._private_api import pytree

        return _plain_arguments(self.program.call_spec.in_spec, pytree) and not _constants(self.program)

    def located(self, module: Any) -> Any:
        """Let the operators of a placed module tell of which module of the original they are a part."""
        for node in module.graph.nodes:
            path = self.names.get(node.name, "").rpartition("/")[0] if node.op == "call_function" else ""
            if path:
                node.target = _inside(path, node.target)
        module.recompile()
        return module

    def call(self, module: Any) -> Call:
        """Return the function that calls `module` with flat tensors."""
        from xpuruntime.pytorch._private_api import pytree

        spec = self.program.call_spec.in_spec
        plain = _plain_arguments(spec, pytree)
        constants = _constants(self.program)

        def arguments(tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            inputs = iter(tensors)
            flat = [constants.get(i, _MISSING) for i in range(spec.num_leaves)]
            args, kwargs = pytree.tree_unflatten([next(inputs) if v is _MISSING else v for v in flat], spec)
            return args, kwargs

        if plain and not constants:
            return lambda tensors: _flat(module(*tensors), pytree)

        def call(tensors: Sequence[Any]) -> list[Any]:
            args, kwargs = arguments(tensors)
            return _flat(module(*args, **kwargs), pytree)

        return call


class ModuleSource:
    """A module of the caller's, with the inputs it was given as an example."""

    def __init__(
        self,
        module: Any,
        *,
        keyword: bool,
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        examples: Mapping[str, Any],
        device: str,
        where: str,
    ) -> None:
        self.module = module
        self.keyword = keyword
        self.inputs = inputs
        self.outputs = outputs
        self.examples = examples
        self.device = device
        self.where = where

    def place(self, device: str, convert: str | None) -> Any:
        """Return the module itself, or a converted copy of it."""
        del device
        if convert is None:
            return self.module
        import copy

        import torch

        try:
            module = copy.deepcopy(self.module)
        except Exception as error:
            msg = f"{self.where} cannot be copied to convert it ({error}); convert it yourself: module.half()"
            raise UnsupportedOperationError(msg, engine="torch") from None
        return _convert(module, getattr(torch, _DTYPES[convert]))

    def call(self, module: Any) -> Call:
        """Return the function that calls `module` with flat tensors."""
        from xpuruntime.pytorch._private_api import pytree

        names = self.inputs
        if self.keyword:
            return lambda tensors: _flat(module(**dict(zip(names, tensors, strict=True))), pytree)
        return lambda tensors: _flat(module(*tensors), pytree)


def _inside(path: str, target: Any) -> Callable[..., Any]:
    from xpuruntime.pytorch.call_scope.module_paths import inside

    def run(*args: Any, **kwargs: Any) -> Any:
        with inside(path):
            return target(*args, **kwargs)

    run.__name__ = run.__qualname__ = getattr(target, "__name__", "operator").replace(".", "_")
    return run


_MISSING = object()


def _convert(module: Any, target: Any) -> Any:
    """Give a module new floating-point parameters and buffers; the old ones stay as they are for others."""
    import torch

    for part in module.modules():
        for name, old in list(part.named_parameters(recurse=False, remove_duplicate=False)):
            if old.is_floating_point():
                setattr(part, name, torch.nn.Parameter(old.detach().to(target), requires_grad=False))
        for name, buffer in list(part.named_buffers(recurse=False, remove_duplicate=False)):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(target))
    return module


def _flat(result: Any, pytree: Any) -> list[Any]:
    import torch

    if isinstance(result, torch.Tensor):
        return [result]
    return [value for value in pytree.tree_leaves(result) if value is not None]


def _plain_arguments(spec: Any, pytree: Any) -> bool:
    args, kwargs = pytree.tree_unflatten([_MISSING] * spec.num_leaves, spec)
    return not kwargs and all(arg is _MISSING for arg in args)


def _constants(program: Any) -> dict[int, Any]:
    constants: dict[int, Any] = {}
    position = 0
    for spec in program.graph_signature.input_specs:
        if spec.kind.name != "USER_INPUT":
            continue
        if hasattr(spec.arg, "value"):
            constants[position] = spec.arg.value
        position += 1
    return constants


@contextlib.contextmanager
def reading(where: str, fix: str) -> Any:
    """Turn whatever PyTorch raises while a model is read into a `ModelError` that names the model and the fix."""
    try:
        yield
    except (ModelError, InputError, UnsupportedOperationError):
        raise
    except Exception as error:
        raise refuse(where, error_line(error).rstrip("."), fix) from error


def given_names(metadata: Mapping[str, str], where: str) -> dict[str, str]:
    """Return symbol to name as a file of `xpuruntime.pytorch.export` carries them; nothing for other files."""
    text = metadata.get(DIMENSIONS_KEY)
    if text is None:
        return {}
    try:
        names = json.loads(text)
    except (ValueError, RecursionError):
        names = None
    if not isinstance(names, dict) or not all(isinstance(name, str) and name for name in names.values()):
        reason = f"what it carries under {DIMENSIONS_KEY} is no object of names by symbol"
        raise refuse(where, reason, "export it again with xpuruntime.pytorch.export")
    return names


def spelled(tensors: Iterable[tuple[str, Any]], spellings: Mapping[str, str]) -> Callable[[Any], str]:
    """Return the function that writes an open size in names instead of symbols.

    A symbol goes by the name it was given, else by the first tensor and axis that it is the size of, as ``"x.0"``, and
    an expression by its symbols: ``"x.0 + 1"``. Where one of these is the size of no tensor, the expression as a whole
    goes by tensor and axis. Equal sizes have one name everywhere.
    """
    places: dict[str, str] = {}
    for name, value in tensors:
        for axis, size in enumerate(value.shape):
            if not isinstance(size, int):
                places.setdefault(str(size.node.expr), f"{name}.{axis}")
    names = {**places, **spellings}

    def spell(size: Any) -> str:
        expr = size.node.expr
        if not all(str(symbol) in names for symbol in expr.free_symbols):
            return places[str(expr)]
        return str(
            expr.xreplace({symbol: type(symbol)(names[str(symbol)], integer=True) for symbol in expr.free_symbols})
        )

    return spell
