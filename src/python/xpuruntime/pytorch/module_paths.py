# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Which module's forward a call belongs to, in the forward itself and in the backward of it."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import traceback
from torch.nn.modules import module as torch_module

from xpuruntime import _core
from xpuruntime.pytorch.overriding.native import leave_alone
from xpuruntime.runtime.forking import fork_lock

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "current", "from_running", "give_back", "in_dynamo", "inside", "is_one_of_many", "is_traced", "of_stack", "plain",
    "require", "running", "traced",
]  # fmt: skip

#: Prefixes that wrappers put before the names of the model's own modules.
_WRAPPERS = ("module.", "_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")

#: A part of a path as Dynamo writes it: ``L['self'].layers[0]``, ``L['self']._modules['layers']``.
_SELF = "L['self']"
_ID = re.compile(r"\d+")
_STEP = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|([^\]]*))\]""")

_lock = fork_lock()
_users = 0
_hooks: list[Any] = []
_roots: weakref.WeakKeyDictionary[torch.nn.Module, Mapping[int, str]] = weakref.WeakKeyDictionary()


class _Outermost(threading.local):
    """The outermost module that ran last in this thread, and the paths of what is in it, by `id`."""

    module: weakref.ref[torch.nn.Module] | None = None
    names: Mapping[int, str] = MappingProxyType({})


_outermost = _Outermost()


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


def current(*, recorded: bool | None = None) -> str:
    """Return the path of the module that a call in this thread belongs to; empty where it is not known.

    In a forward that is the innermost module that runs, named from the outermost one that was called. In a backward it
    is the module whose forward made the node of autograd that runs, where an overridden operator made it: of that a
    note is taken in the forward, since the node of a call is made just before it. A step has thousands of nodes; one is
    forgotten for another that was made 131,072 later.

    Parameters
    ----------
    recorded : bool, optional
        Whether the call has just made a node of autograd; default: whether gradients are being recorded.
    """
    return _core.call_module(recorded)


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
    """Return the path of the module that such a record of modules ends in: ``nn_module_stack`` of what is traced now.

    As hooks name it: from the outermost module that runs; where none does, from the first of the record.
    """
    known = _known(stack)
    return f"{running()}.{_by_text(stack)}".strip(".") if known is None else known


def from_running(stack: Mapping[str, Any]) -> str:
    """Return the same path from the innermost module that runs now, in which such a record was made."""
    known, outer = _known(stack), running()
    if known is None or not f"{known}.".startswith(f"{outer}." if outer else ""):
        return _by_text(stack)
    return known.removeprefix(outer).lstrip(".")


def _known(stack: Mapping[str, Any]) -> str | None:
    """Return the path that hooks have for the module that a record ends in, which Dynamo keeps by its `id`."""
    found = _ID.match(str(next(reversed(list(stack)))))
    root = _root()
    if found is None or root is None or _core.running_module() is None:
        return None
    number = int(found[0])
    return _outermost.names.get(number) or _names_anew(root).get(number)


def _by_text(stack: Mapping[str, Any]) -> str:
    first, last = (str(path) for path, *_ in (next(iter(stack.values())), next(reversed(list(stack.values())))))
    # Of a module that is compiled itself, the record begins with what is inside of it.
    # Where hooks see no module run, it is the `self` of something else.
    is_inside = first.startswith(_SELF) and (_users == 0 or _core.running_module() is not None)
    inner = last.removeprefix(_SELF if is_inside else first)
    inner = _STEP.sub(lambda step: "." + (step[1] or step[2] or step[3] or ""), inner)
    return plain(inner.replace("._modules.", ".").lstrip("."))


def running() -> str:
    """Return the path of the innermost module that runs in this thread, and take no note of it; empty: none runs."""
    return _core.running_module() or ""


def is_one_of_many() -> bool:
    """Say whether the module that runs in this thread has others of its class around it, in the outermost one."""
    root, path = _root(), running()
    if root is None or not path:
        return False
    modules = [(plain(name), type(part)) for name, part in root.named_modules()]
    kinds = [kind for name, kind in modules if name == path]  # wrappers have the path of what they hold
    return any(name != path and kind is kinds[-1] for name, kind in modules) if kinds else False


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
        _core.enter_module(self._path)

    def __exit__(self, *_: object) -> None:
        _core.leave_module()


def is_traced() -> bool:
    """Say whether the hook of a module that asks is traced, in this thread; PyTorch says so while any thread compiles.

    Dynamo takes the first for a constant.
    """
    if torch.compiler.is_dynamo_compiling():
        return True
    return torch.compiler.is_compiling() and bool(torch._C._len_torch_dispatch_stack())


# torch.compile traces into hooks. In code that it compiles they do nothing, and do not even touch their arguments: the
# module that was called stands for all inside it.
def _enter(module: torch.nn.Module, _args: Any) -> None:
    if is_traced():
        return
    outer = _core.outer_module()
    if outer is None:
        _outermost.module, _outermost.names = weakref.ref(module), _roots.get(module) or {}
        _core.enter_module("", module)
        return
    name = _outermost.names.get(id(module))
    _core.enter_module(_named_anew(module, outer) if name is None else name, module)


def _named_anew(module: torch.nn.Module, outer: str) -> str:
    root = _root()
    names = {} if root is None else _names_anew(root)
    return names.get(id(module), f"{outer}.{type(module).__name__}".lstrip("."))


def _names_anew(root: torch.nn.Module) -> Mapping[int, str]:
    found = _outermost.names = _roots[root] = {id(part): plain(path) for path, part in root.named_modules()}
    return found


def _leave(module: torch.nn.Module, _args: Any, _output: Any) -> None:
    if not is_traced():
        _core.leave_module(module)


def _root() -> torch.nn.Module | None:
    return None if _outermost.module is None else _outermost.module()


# Of a module that `.compile()` has compiled, Dynamo runs the hooks by themselves, and would compile them by themselves.
for _hook in (_enter, _leave):
    leave_alone(_hook.__code__)


def plain(path: str) -> str:
    """Return a path as the model has it, without what wrappers put into it."""
    for prefix in _WRAPPERS:
        path = path.replace(prefix, "") if path.startswith(prefix) or f".{prefix}" in path else path
    for prefix in _WRAPPERS:  # what a wrapper holds is the wrapper itself
        path = "" if path == prefix[:-1] else path.removesuffix("." + prefix[:-1])
    return path
