# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Gates: what stands for an operator, in C++, so that a call that no rule speaks of costs little.

A gate calls the native kernel where no policy holds, and where the route of the call is known and native. Everything
else is looked at by Python: calls that are not known yet, those that kernels of ours serve and that need more than the
arrays, and all calls while a thread has a policy of its own, or somebody watches.

Gates before products are called by PyTorch as its own kernels are, without Python, and call the native one in the same
way where they know a call to be native. Where that cannot be (`why_not_plain`), they call PyTorch's C functions, and
those whose arguments PyTorch hands over in C (``mm``, ``bmm``) are called without Python, too; where that cannot be
either (`why_not_direct`), all goes through Python. Norms and attention have gates of their own; see `operator_gates`.
"""

from __future__ import annotations

import functools
import re
import threading
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime import _core
from xpuruntime.pytorch.overriding.native import ALIASES
from xpuruntime.pytorch.overriding.undisturbed import find_out
from xpuruntime.runtime.forking import fork_lock

if TYPE_CHECKING:
    from collections.abc import Callable

    from xpuruntime.pytorch.overriding.native import Native

__all__ = [
    "Kernel",
    "add_thread",
    "drop_thread",
    "forget",
    "gate",
    "is_own",
    "keyset_of",
    "set_policy",
    "set_watched",
    "why_no_layout",
    "why_no_modules",
    "why_no_node_threads",
    "why_no_phases",
    "why_not_direct",
    "why_not_in_c",
    "why_not_plain",
]

_lock = fork_lock()
_routes: dict[Any, Any] | None = None
_circumstances: Callable[[], tuple[str, str]] | None = None
_phases = False
_modules = False
_threads: set[int] = set()
_watched = False


class Kernel:
    """A gate that PyTorch calls without Python, once it is placed.

    Parameters
    ----------
    native : Native
    slow : callable
        As for `gate`.
    otherwise : callable
        A gate that does the same as a kernel in Python.
    """

    def __init__(self, native: Native, slow: Callable[..., Any], otherwise: Callable[..., Any]) -> None:
        self._native = native
        self._slow = slow
        self.otherwise = otherwise

    def place(self) -> Callable[[], None] | None:
        """Put it in the operator's place, and return what takes it away again; ``None`` where PyTorch refuses it."""
        if why_not_plain():
            return self._place_boxed()
        native = self._native
        keyset = keyset_of(native.key)
        return _core.place_plain_gate(native.name, native.key, self._slow, native, keyset, self._place_below)

    def _place_boxed(self) -> Callable[[], None] | None:
        native = self._native
        if native.name not in _IN_C or why_not_in_c():
            return None
        return _core.place_kernel(native.name, native.key, self._slow, native, keyset_of(native.key))

    def _place_below(self) -> Callable[[], None]:
        """Put what serves calls with values of PyTorch's interpreter in the operator's place, in C or in Python."""
        placed = self._place_boxed()
        if placed is None:
            library = torch.library.Library("aten", "IMPL")
            library.impl(self._native.name, self.otherwise, self._native.key, allow_override=True)
            placed = library._destroy
        return placed


def gate(native: Native, slow: Callable[..., Any]) -> Callable[..., Any] | Kernel:
    """Return a gate before a native kernel. Where that says `direct` now, it is called without a keyset.

    Parameters
    ----------
    native : Native
    slow : callable
        Called with the dispatcher's keyset, then the operator's arguments. It keeps routes under `calls.call_key` of
        the native kernel's name, the operator's arrays in their order, and `out` where it is given.
    """
    if is_own(native) and not why_not_direct():
        why_no_layout()  # gates read tensors where they lie where that is known, and ask PyTorch otherwise
        direct = _core.make_direct_gate(native.name, native.key, slow, native, keyset_of(native.key))
        if direct is not None:
            native.direct = True
            return Kernel(native, slow, direct)
    return _core.make_gate(native.name, slow, native)


#: Operators that a kernel in C can stand for: PyTorch's C functions hand tensors over, and no Scalar.
_IN_C = frozenset(("mm", "mm.out", "bmm", "bmm.out"))


def keyset_of(key: str) -> Any:
    """Return the set of one dispatch key, with which a kernel at it is called."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def is_own(native: Native) -> bool:
    """Say whether the native kernel is PyTorch's, and not another library's over it, which may do other things."""
    own = rf"Register({native.key}|CompositeImplicitAutograd)(_\d+)?\.cpp:"
    line = re.compile(rf"^{ALIASES.get(native.key, native.key)}: registered at .*/{own}", re.MULTILINE)
    return line.search(torch._C._dispatch_dump_table(f"aten::{native.name}")) is not None


def why_not_direct() -> str:
    """Return why no gate calls PyTorch's C functions in this process; empty where they do."""
    return find_out(_core.open_torch)


@functools.cache
def why_not_in_c() -> str:
    """Return why no kernel in C can be placed, found by placing one: whether Python's errors pass through PyTorch."""
    return find_out(_why_not_raised)


def _why_not_raised() -> str:
    space, name = "_xpuruntime_probe", "raises"
    library = torch.library.Library(space, "DEF")
    library.define(f"{name}(Tensor x) -> Tensor")
    remove = _core.place_raising_kernel(space, name)
    if remove is None:
        return "this PyTorch takes no kernel in C"
    try:
        torch.ops._xpuruntime_probe.raises(torch.empty(0, device="cpu"))
    except LookupError:
        return ""
    except RuntimeError:
        return "an error of Python's does not pass through this PyTorch"
    finally:
        remove()
        library._destroy()
    return "an error of Python's is lost in this PyTorch"


@functools.cache
def why_not_plain() -> str:
    """Return why no gate stands in PyTorch's dispatcher as its own kernels do in this process; empty where they do."""
    why = why_not_direct() or find_out(_core.open_torch_dispatcher) or find_out(_why_not_as_known)
    return why or find_out(_why_not_tried)


#: The operators that gates are written for, as PyTorch says them.
_KNOWN = {
    "mm": "(Tensor self, Tensor mat2) -> Tensor",
    "mm.out": "(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)",
    "bmm": "(Tensor self, Tensor mat2) -> Tensor",
    "bmm.out": "(Tensor self, Tensor mat2, *, Tensor(a!) out) -> Tensor(a!)",
}
_ADDS = {
    "addmm": "(Tensor self, Tensor mat1, Tensor mat2, *, Scalar beta=1, Scalar alpha=1{}",
    "baddbmm": "(Tensor self, Tensor batch1, Tensor batch2, *, Scalar beta=1, Scalar alpha=1{}",
}
_KNOWN |= {name: form.format(") -> Tensor") for name, form in _ADDS.items()}
_KNOWN["sspaddmm"] = _KNOWN["addmm"]  # for the trial
_KNOWN |= {f"{name}.out": form.format(", Tensor(a!) out) -> Tensor(a!)") for name, form in _ADDS.items()}


def _why_not_as_known() -> str:
    """Return which operator of this PyTorch has other arguments than gates are written for."""
    for name, form in _KNOWN.items():
        packet, _, overload = name.partition(".")
        found = str(getattr(getattr(torch.ops.aten, packet), overload or "default")._schema)
        if found != f"aten::{name}{form}":
            return f"this PyTorch has {found}, and gates are for {form}"
    return ""


def _why_not_tried() -> str:
    """Return what is other than it should be with a gate over an operator that has the arguments of addmm.

    It is one of sparse tensors, which refuses others: nobody calls it with such tensors meanwhile.
    """
    seen: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    answer: list[Any] = [None]

    def asked(*args: Any, **more: Any) -> Any:
        seen.append((args, more))
        if answer[0] is LookupError:
            raise LookupError("raised by xpuruntime, to see whether it arrives")
        return answer[0]

    remove = _core.place_trial(asked)
    if remove is None:
        return "this PyTorch's addmm has no kernel for the CPU that can be called without Python"
    try:
        return _try_out(seen, answer)
    except RuntimeError as error:
        return f"a gate without Python failed in this PyTorch: {error}"
    finally:
        remove()


def _try_out(seen: list[tuple[tuple[Any, ...], dict[str, Any]]], answer: list[Any]) -> str:
    # Tensors without gradients go to the kernel for their device at once.
    with torch.inference_mode():
        c, a, b = (torch.arange(float(size), device="cpu") for size in (2, 6, 6))
        a, b = a.reshape(2, 3), b.reshape(3, 2)
        for more in ({}, {"beta": 2}, {"alpha": 0.5}, {"beta": True, "alpha": -3}, {"beta": 2.5, "alpha": 2**62}):
            answer[0] = None
            found = torch.sspaddmm(c, a, b, **more)
            args, told = seen.pop() if seen else ((), {})
            if list(map(id, args)) != list(map(id, (c, a, b))) or told != more:
                return "this PyTorch calls kernels with other arguments than it is told"
            if not torch.equal(found, torch.addmm(c, a, b, **more)):
                return "this PyTorch's own kernel gives another result than the operator"
            answer[0] = a
            if torch.sspaddmm(c, a, b, **more) is not a:
                return "a tensor of a gate does not arrive in this PyTorch"
        answer[0] = None
        if _refusal(torch.sspaddmm, c, a) != _refusal(torch.addmm, c, a):
            return "an error of this PyTorch's own kernel does not pass through a gate as it is"
        answer[0] = LookupError
        try:
            torch.sspaddmm(c, a, b)
        except LookupError:
            return ""
        return "an error of Python's is lost in this PyTorch"


def _refusal(op: Callable[..., Any], c: Any, a: Any) -> str:
    """Return what PyTorch says of a product of matrices that do not fit."""
    try:
        op(c, a, a)
    except RuntimeError as error:
        return str(error)
    return ""


#: Dispatch keys of tensors that are nothing but tensors.
_PLAIN_KEYS = ("CPU", "CUDA", "ADInplaceOrView", "AutogradCPU", "AutogradCUDA", "AutocastCPU", "AutocastCUDA")


@functools.cache
def why_no_layout() -> str:
    """Return why gates do not know where tensors keep shape, type and device in this process; empty where they do."""

    def opened() -> str:
        keys = functools.reduce(lambda one, other: one | other, map(keyset_of, _PLAIN_KEYS))
        return why_not_direct() or _core.open_tensor_layout(int(keys.raw_repr()))

    return find_out(opened)


@functools.cache
def why_no_phases() -> str:
    """Return why gates do not tell the phase of a call by themselves in this process; empty where they do.

    What they say is compared with `calls.phase`, once for each phase under a policy, and again when somebody watches.
    """
    return find_out(_core.open_phases)


@functools.cache
def why_no_modules() -> str:
    """Return why gates do not tell the module of a call by themselves in this process; empty where they do."""
    why_no_node_threads()
    return why_no_phases() or find_out(_core.open_modules)


@functools.cache
def why_no_node_threads() -> str:
    """Return why it is not known which thread has made a node of autograd; empty where it is.

    Threads number their nodes each by itself. Where it is not known, and nodes of several threads with one number are
    of several modules, none of these is taken for the module of such a node.
    """
    return find_out(_open_node_threads)


def _open_node_threads() -> str:
    made: list[Any] = []

    def make() -> None:
        leaf = torch.ones(1, device="cpu", requires_grad=True)
        made.append(([leaf.clone().grad_fn for _ in range(4)], _core.node_thread()))

    make()
    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    (here, _), (there, other) = made
    return _core.open_node_threads(here, there[-1], other)


def forget() -> None:
    """Have all gates look anew which calls are native, since a route that was kept is another one now."""
    _core.forget_native_calls()


def set_policy(
    routes: dict[Any, Any] | None,
    circumstances: Callable[[], tuple[str, str]] | None = None,
    *,
    phases: bool = False,
    modules: bool = False,
) -> None:
    """Say what routes the policy of the process has, under which keys. ``None``: no policy.

    Parameters
    ----------
    routes : dict, optional
    circumstances : callable, optional
        Gives phase and module of the call that runs, where they are parts of the keys.
    phases, modules : bool
        Which of these are, where gates tell all that are by themselves; only where `why_no_phases` and
        `why_no_modules` are empty.
    """
    global _routes, _circumstances, _phases, _modules
    with _lock:
        _routes, _circumstances, _phases, _modules = routes, circumstances, phases, modules
        _tell()


def add_thread(who: object) -> None:
    """Say that a thread has a policy of its own, until `drop_thread` with the same object. Idempotent, as that."""
    with _lock:
        _threads.add(id(who))
        _tell()


def drop_thread(who: object) -> None:
    """Undo `add_thread`."""
    with _lock:
        _threads.discard(id(who))
        _tell()


def set_watched(watched: bool) -> None:
    """Say whether every call is watched."""
    global _watched
    with _lock:
        _watched = watched
        _tell()


def _tell() -> None:
    _core.set_gates(_routes, _watched or bool(_threads), _circumstances, _phases, _modules)
