# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What `torch.compile` has to know of the policy in force, and what of compiled code a policy does not reach."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import PolicyError, XpuRuntimeWarning
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention import flex_choices
from xpuruntime.pytorch.escaping import Escape, escapes_of_graph, escapes_of_package, escapes_of_settings
from xpuruntime.pytorch.importing import WhenImported
from xpuruntime.runtime.forking import fork_lock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from xpuruntime.policies import Policy
    from xpuruntime.pytorch.held import Held

__all__ = ["policy_changed", "say"]

_TAG = "xpuruntime-"

#: Inductor's setting for passes over the graphs of forward and backward, before its own.
_PASSES = "post_grad_custom_pre_pass"
#: Where PyTorch has what runs a package of AOTInductor.
_PACKAGES = "torch.export.pt2_archive._package"

_lock = fork_lock()
#: What compiled code depends on, of the policy that held last.
_last: tuple[Any, ...] | None = None
_watched: list[_Watched | WhenImported] = []
_said: set[tuple[int, Escape]] = set()


def policy_changed(held: Held | None) -> None:
    """Have code compiled from now on follow another policy, and forget what was compiled for the former.

    Products are looked up whenever compiled code runs, so that a policy that only says other kernels for them has
    nothing compiled again, unless its rules ask for what the code has to state of itself. What a policy says of the
    rest is built into the code: that becomes part of the key under which Inductor and AOTAutograd keep it on disk, so
    that no process meets the code of another policy.
    """
    global _last
    built_in = "" if held is None else _built_in(held.policy)
    depends = (built_in, *(() if held is None else (held.strict, held.ops, *_stated(held).items())))
    with _lock:
        if held is None:
            while _watched:
                _watched.pop().remove()
            _said.clear()
        elif not _watched:
            _watch()
        before, _last = _last, depends
    if before == depends or (before is None and held is None):
        return
    config = torch.compiler.config
    rest = config.cache_key_tag.partition(_TAG)[0]
    if built_in:
        from xpuruntime import __version__

        built_in += __version__  # its operators are in the code that is kept, with their arguments
    config.cache_key_tag = rest + (_TAG + hashlib.sha256(built_in.encode()).hexdigest()[:16] if built_in else "")
    flex_choices.forget()
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _built_in(policy: Policy) -> str:
    """Return as text what compiled code has built in of a policy; nothing where that is as without one."""
    kernels = policy.kernels
    rules = [rule for rule in kernels.rules if rule.match.op != "matmul"]
    rest = policy.replace(kernels=kernels.remove("matmul").replace(rules=rules)).to_dict()
    rest.pop("mode", None)
    if set(rest) <= {"schema"}:
        return ""
    return json.dumps(rest, sort_keys=True)


def _stated(held: Held) -> dict[str, tuple[bool, bool]]:
    """Return the operations whose calls in compiled code have to state their phase or module, and whether each does."""
    asked = {op: (held.names_phases(op), held.names_modules(op)) for op in sorted(held.ops)}
    return {op: flags for op, flags in asked.items() if any(flags)}


def say(escapes: list[Escape], held: Held) -> None:
    """Warn of what a policy does not reach, once for each policy, or refuse it where the policy is strict."""
    fresh = [escape for escape in dict.fromkeys(escapes) if (held.number, escape) not in _said]
    if held.strict and escapes:
        shown = "; ".join(f"{one.what}: {one.reason}. Fix: {one.fix}" for one in dict.fromkeys(escapes))
        msg = f"the policy is strict, and compiled code would escape it. {shown}"
        raise PolicyError(msg)
    if not fresh:
        return
    _said.update((held.number, escape) for escape in fresh)
    shown = "; ".join(f"{one.what}: {one.reason} ({one.fix})" for one in fresh)
    warnings.warn(f"compiled code escapes the policy. {shown}", XpuRuntimeWarning, stacklevel=3)


class _Watched:
    """A function of PyTorch's, with ours around it until `remove`.

    Parameters
    ----------
    owner, name
        Where it is.
    check : callable
        Called with the policy and the arguments, before it. What it returns stands for the first argument, if anything.
    """

    def __init__(self, owner: Any, name: str, check: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._before = before = getattr(owner, name)

        @functools.wraps(before)
        def around(*args: Any, **kwargs: Any) -> Any:
            from xpuruntime.pytorch.held import current

            held = current()
            first = None if held is None else check(held, *args, **kwargs)
            return before(*args, **kwargs) if first is None else before(first, *args[1:], **kwargs)

        self._ours = around
        setattr(owner, name, around)

    def remove(self) -> None:
        if getattr(self._owner, self._name) is self._ours:  # else somebody is around ours, which then does nothing
            setattr(self._owner, self._name, self._before)


def _watch() -> None:
    """See what is compiled while a policy holds. There is no official place where options and graph are both known."""
    _watched.append(_Watched(_private_api.compile_wrapper, "__call__", _check_compile))
    for name, watch in (("torch._inductor", _watch_aot), (_PACKAGES, _watch_packages)):
        loaded = sys.modules.get(name)
        if loaded is None:
            _watched.append(WhenImported(name, watch))
        else:
            watch(loaded)


def _watch_aot(module: Any) -> None:
    _watched.append(_Watched(module, "aot_compile", _check_aot))


def _watch_packages(module: Any) -> None:
    if hasattr(module, "AOTICompiledModel"):
        _watched.append(_Watched(module.AOTICompiledModel, "__call__", _check_package))


def _check_compile(held: Held, wrapper: Any, graph: Any, *args: Any, **more: Any) -> Any:
    """Return the compiler to take instead, whose code states what rules ask for."""
    del args
    options = {**wrapper.config, **(more.get("config_patches") or {})}
    say([*escapes_of_settings(held, options), *escapes_of_graph(held, graph)], held)
    _private_api.graph_trees()  # imported in this thread before a reset of Dynamo does so in another
    asked = _stated(held)
    if not asked:
        return None

    from xpuruntime.pytorch.compiled_calls import Stating

    earlier = options.get(_PASSES, getattr(_private_api.inductor_config(), _PASSES))
    other = copy.copy(wrapper)
    other.config = {**wrapper.config, _PASSES: Stating(asked, graph, earlier)}
    return other


def _check_aot(held: Held, graph: Any, *args: Any, options: Mapping[str, Any] | None = None, **more: Any) -> None:
    del args, more
    whole = {**(options or {}), "aot_inductor": True}
    say([*escapes_of_settings(held, whole), *escapes_of_graph(held, graph)], held)


def _check_package(held: Held, *args: Any, **more: Any) -> None:
    del args, more
    say(escapes_of_package(held), held)
