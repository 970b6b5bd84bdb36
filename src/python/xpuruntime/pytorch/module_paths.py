# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which module's forward a call belongs to, in the forward itself and in the backward of it."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
import weakref
from collections import OrderedDict
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import traceback
from torch.nn.modules import module as torch_module

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["current", "give_back", "in_dynamo", "inside", "of_stack", "plain", "require", "running", "traced"]

#: Nodes of autograd whose forward is remembered. A step has thousands; older ones are forgotten.
_MOST = 1 << 17
#: Prefixes that wrappers put before the names of the model's own modules.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

#: A part of a path as Dynamo writes it: ``L['self'].layers[0]``, ``L['self']._modules['layers']``.
_SELF = "L['self']"
_STEP = re.compile(r"\[['\"]?([^'\"\]]+)['\"]?\]")

_lock = threading.Lock()
_users = 0
_hooks: list[Any] = []
_roots: weakref.WeakKeyDictionary[torch.nn.Module, Mapping[int, str]] = weakref.WeakKeyDictionary()
#: Sequence number of an autograd node to the path of the module that made it.
_nodes: OrderedDict[int, str] = OrderedDict()


class _Stack(threading.local):
    def __init__(self) -> None:
        self.paths: list[str] = []
        self.root: torch.nn.Module | None = None


_stack = _Stack()


def require() -> None:
    """Follow which module runs, by hooks that all modules share; each call is undone by one `give_back`."""
    global _users
    with _lock:
        _users += 1
        # torch.compile says at each call of a compiled module that such hooks run once more, for the module around it.
        # That is as it should be, and the last entry wins, so it is made each time.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        if _users == 1:
            _hooks.append(torch_module.register_module_forward_pre_hook(_enter))
            _hooks.append(torch_module.register_module_forward_hook(_leave, always_call=True))


def give_back() -> None:
    """Undo one `require`."""
    global _users
    with _lock:
        _users -= 1
        if _users == 0:
            while _hooks:
                _hooks.pop().remove()
            _nodes.clear()


def current(*, recorded: bool | None = None) -> str:
    """Return the path of the module that a call in this thread belongs to; empty where it is not known.

    In a forward that is the innermost module that runs, named from the outermost one that was called. In a backward it
    is the module whose forward made the node of autograd that runs, where an overridden operator made it.

    Parameters
    ----------
    recorded : bool, optional
        Whether the call has just made a node of autograd; default: whether gradients are being recorded.
    """
    node = torch._C._current_autograd_node()
    paths = _stack.paths
    if node is not None and not paths:
        return _nodes.get(node._sequence_nr(), "")
    path = paths[-1] if paths else ""
    if path and (torch.is_grad_enabled() if recorded is None else recorded):
        # The node of this call was made just before it; its number is the one before the next.
        _nodes[torch.autograd._get_sequence_nr() - 1] = path
        if len(_nodes) > _MOST:
            with contextlib.suppress(KeyError):  # another thread has cleared it
                _nodes.popitem(last=False)
    return path


def traced() -> str:
    """Return the path of the module whose code is traced now, for ``torch.compile`` or an export; empty if none is.

    Named from the outermost module that is running or traced.
    """
    stack = traceback.get_current_meta().get("nn_module_stack") if traceback.has_preserved_node_meta() else None
    return of_stack(stack) if stack else ""


def in_dynamo() -> str:
    """Return the path of the module whose code Dynamo follows now, as `traced` does; the outer one if it follows none.

    For what Dynamo itself calls while it traces.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    stack = InstructionTranslator.current_tx().output.current_tx.nn_module_stack
    return of_stack(stack) if stack else running()


def of_stack(stack: Mapping[str, Any]) -> str:
    """Return the path of the module that such a record of modules ends in: ``nn_module_stack`` of what is traced."""
    first, last = (str(path) for path, *_ in (next(iter(stack.values())), next(reversed(list(stack.values())))))
    # Of a module that is compiled itself, the record begins with what is inside of it.
    inner = last.removeprefix(_SELF if first.startswith(_SELF) else first)
    inner = _STEP.sub(r".\1", inner).replace("._modules.", ".").lstrip(".")
    outer = _stack.paths[-1] if _stack.paths else ""
    return f"{outer}.{plain(inner)}".strip(".")


def running() -> str:
    """Return the path of the innermost module that runs in this thread, and take no note of it; empty: none runs."""
    paths = _stack.paths
    return paths[-1] if paths else ""


class inside:  # noqa: N801 - used like a function
    """Let the calls of this thread belong to a module, given by its path, where no module runs that would say so.

    Parameters
    ----------
    path : str
    """

    __slots__ = ("_path",)

    def __init__(self, path: str) -> None:
        self._path = path

    def __enter__(self) -> None:
        _stack.paths.append(self._path)

    def __exit__(self, *_: object) -> None:
        _stack.paths.pop()


# torch.compile traces into hooks. In code that it compiles they do nothing, and do not even touch their arguments: the
# module that was called stands for all inside it.
def _enter(module: torch.nn.Module, _args: Any) -> None:
    if torch.compiler.is_compiling():
        return
    stack = _stack
    if not stack.paths:
        stack.root = module
        stack.paths.append("")
        return
    root = stack.root
    assert root is not None
    names = _roots.get(root)
    name = None if names is None else names.get(id(module))
    if name is None:
        names = _roots[root] = {id(part): plain(path) for path, part in root.named_modules()}
        name = names.get(id(module), f"{stack.paths[-1]}.{type(module).__name__}".lstrip("."))
    stack.paths.append(name)


def _leave(_module: torch.nn.Module, _args: Any, _output: Any) -> None:
    if not torch.compiler.is_compiling() and _stack.paths:
        _stack.paths.pop()


def plain(path: str) -> str:
    """Return a path as the model has it, without what wrappers put into it."""
    for prefix in _WRAPPERS:
        path = path.replace(prefix, "") if path.startswith(prefix) or f".{prefix}" in path else path
    for prefix in _WRAPPERS:  # what a wrapper holds is the wrapper itself
        path = "" if path == prefix[:-1] else path.removesuffix("." + prefix[:-1])
    return path
