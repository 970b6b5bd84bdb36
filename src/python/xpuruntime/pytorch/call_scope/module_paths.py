# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Module scope of a call: the module whose forward it is part of, also in a recomputation and a backward."""

from __future__ import annotations

import re
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch.fx import traceback
from torch.nn.modules import module as torch_module

from xpuruntime import _core
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.call_scope import function_phases, module_names
from xpuruntime.pytorch.compiler.strict_exports import StrictExports
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.fast_path import fast_path
from xpuruntime.pytorch.dispatch.overrides.native import skip_in_dynamo
from xpuruntime.pytorch.method_patch import MethodPatch

#: A part of a path as Dynamo writes it: ``L['self'].layers[0]``, ``L['self']._modules['layers']``.
_SELF = "L['self']"
_ID = re.compile(r"\d+")
_STEP = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|([^\]]*))\]""")

#: What torch.compile warns of at each call of a compiled module: such hooks run once more, for the module around it.
#: That is as it should be.
_HOOKS_WARNING = r"Using `torch\.compile\(module\)` when there are global hooks"

_lock = threading.Lock()
_hooks: list[Any] = []


class _Outermost(threading.local):
    """Where the path of the outermost module begins that ran last in this thread."""

    root: weakref.ref[torch.nn.Module] | None = None


_outermost = _Outermost()


def require(root: torch.nn.Module | None = None, *, first: bool = True) -> None:
    """Follow which module runs, by hooks that all modules share; each call is undone by one `release`.

    Parameters
    ----------
    root : Module, optional
        Where paths begin meanwhile, as for `module_names.name_root`; default: at the largest module that is called.
    first : bool
    """
    with _lock:
        CONTEXT.users["module_paths"] += 1
        warnings.filterwarnings("ignore", message=_HOOKS_WARNING)  # the last entry wins, so it is made each time
        if root is not None:
            module_names.name_root(root, first=first)
        if CONTEXT.users["module_paths"] == 1:
            fast_path()  # so that the core asks the addon, where there is one
            function_phases.require()
            _CHECKPOINTS.require()
            _hooks.append(torch_module.register_module_forward_pre_hook(_enter))
            _hooks.append(torch_module.register_module_forward_hook(_leave, always_call=True))
            _hooks.append(torch_module.register_module_module_registration_hook(_register))
            _hooks.append(StrictExports())


def release(root: torch.nn.Module | None = None, *, first: bool = True) -> None:
    """Undo one `require`."""
    with _lock:
        CONTEXT.users["module_paths"] -= 1
        if root is not None:
            module_names.forget_root(root, first=first)
        if CONTEXT.users["module_paths"] == 0:
            while _hooks:
                _hooks.pop().remove()
            _CHECKPOINTS.release()
            function_phases.release()
            _remove_filter()


def _remove_filter() -> None:
    filters = cast("list[tuple[Any, ...]]", warnings.filters)
    for warning_filter in [filter_ for filter_ in filters if getattr(filter_[1], "pattern", None) == _HOOKS_WARNING]:
        filters.remove(warning_filter)


def current(*, recorded: bool | None = None) -> str:
    """Return the path of the module that a call in this thread belongs to; empty where it is not known.

    In a forward that is the innermost module that runs. In a backward it is the module in whose forward the node of
    autograd was made that runs: PyTorch numbers nodes, and it is kept at which number another module began to run. The
    last 131,072 such changes of each thread are kept.
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
    stack = _private_api.dynamo_translator().current_tx().output.current_tx.nn_module_stack
    return of_stack(stack) if stack else running()


def of_stack(stack: Mapping[str, Any]) -> str:
    """Return the path of the module that such a record of modules ends in: ``nn_module_stack`` of what is traced now.

    As hooks name it; of a module that they have not seen, from the one that runs, or from the first of the record.
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
    """Return the path that is known of the module that a record ends in, which Dynamo keeps by its `id`."""
    number = _ID.match(str(next(reversed(list(stack)))))
    known = None if number is None else module_names.find(int(number[0]))
    if known is not None or number is None:
        return None if known is None else known.path
    root = None if _outermost.root is None else _outermost.root()
    if root is None or _core.running_module() is None:
        return None
    modules = {id(module): path for module, path, _ in module_names.walk(root)}
    return modules.get(int(number[0]))


def _by_text(stack: Mapping[str, Any]) -> str:
    levels = [(str(path), kind) for path, kind, *_ in stack.values()]
    # Of a module that is compiled itself, the record begins with what is inside of it.
    # Where hooks see no module run, it is the `self` of something else.
    is_inside = levels[0][0].startswith(_SELF) and (
        CONTEXT.users["module_paths"] == 0 or _core.running_module() is not None
    )
    start = _SELF if is_inside else levels[0][0]
    parts: list[str] = []
    before = start
    inner = ""  # what the module before keeps its wrapped one by
    for path, kind in levels:
        step = path.removeprefix(before) if path.startswith(before) else path.removeprefix(start)
        step = _STEP.sub(lambda match: "." + (match[1] or match[2] or match[3] or ""), step)
        names = [name for name in step.replace("._modules.", ".").split(".") if name]
        parts += names[1:] if inner and names[:1] == [inner] else names
        before = path
        inner = module_names.inner_name(kind) if isinstance(kind, type) else ""
    return ".".join(parts)


def running() -> str:
    """Return the path of the innermost module that runs in this thread, and take no note of it; empty: none runs."""
    return _core.running_module() or ""


def has_siblings() -> bool:
    """Say whether the module that runs in this thread has others of its class around it, in the outermost one."""
    root, path = None if _outermost.root is None else _outermost.root(), running()
    if root is None or not path:
        return False
    modules = [(name, type(part)) for part, name, _ in module_names.walk(root)]
    kinds = [kind for name, kind in modules if name == path]  # wrappers have the path of what they hold
    return any(name != path and kind is kinds[-1] for name, kind in modules) if kinds else False


class inside:  # noqa: N801 - used like a function
    """Let the calls of this thread belong to a module, given by its path, where no module runs that would say so."""

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
    return torch.compiler.is_compiling() and bool(_private_api.dispatch_modes())


# torch.compile traces into hooks. In code that it compiles they do nothing, and do not even touch their arguments: the
# module that was called stands for all inside it.
def _enter(module: torch.nn.Module, _args: Any) -> None:
    if is_traced():
        return
    outer = _core.outer_module()
    if outer is None:
        outermost = module_names.outermost(module)
        _outermost.root = outermost.root
        _core.enter_module(outermost.path, module)
        return
    root = None if _outermost.root is None else _outermost.root()
    _core.enter_module(module_names.inside(module, outer, root), module)


def _leave(module: torch.nn.Module, _args: Any, _output: Any) -> None:
    if not is_traced():
        _core.leave_module(module)


def _register(parent: torch.nn.Module, _name: str, _child: Any) -> None:
    if not is_traced():
        module_names.note_registration(parent)


# Of a module that `.compile()` has compiled, Dynamo runs the hooks by themselves, and would compile them by themselves.
for _hook in (_enter, _leave, _register):
    skip_in_dynamo(_hook.__code__)


def _recomputing(init: Callable[..., None]) -> Callable[..., None]:
    """Have a recomputation be of the module in whose forward the checkpoint was made."""
    # ``torch.utils.checkpoint`` with ``use_reentrant=False`` calls its function again where a backward needs a tensor,
    # in which no module runs. With ``use_reentrant=True`` that is inside of a node of autograd that was made in the
    # module.

    def follow(frame: Any, *args: Any, **kwargs: Any) -> None:
        init(frame, *args, **kwargs)
        path = None if torch.compiler.is_compiling() else _core.running_module()
        again = getattr(frame, "recompute_fn", None)
        if path is None or again is None:
            return

        def recompute(*inputs: Any, **kwargs: Any) -> Any:
            _core.enter_module(path)
            try:
                return again(*inputs, **kwargs)
            finally:
                _core.leave_module()

        frame.recompute_fn = recompute

    return follow


_CHECKPOINTS = MethodPatch("checkpoint_scopes", _private_api.checkpoint_frame, "__init__", _recomputing)
