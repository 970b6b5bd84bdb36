# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Hooks of `torch.compile`: recompilation when the policy changes, and coverage gaps of compiled code."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import hashlib
import importlib
import json
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.policies import KernelPolicy
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.attention import flash_impl
from xpuruntime.pytorch.compiler.constant_masks import simplify_masks
from xpuruntime.pytorch.coverage.gaps import gaps_in_graph, gaps_in_package, gaps_in_settings, report_gaps
from xpuruntime.pytorch.dispatch import context, tuning
from xpuruntime.pytorch.dispatch.context import CONTEXT, active_policy
from xpuruntime.pytorch.import_hook import WhenImported

if TYPE_CHECKING:
    from xpuruntime.policies import Policy
    from xpuruntime.pytorch.dispatch.compiled_policy import CompiledPolicy

_TAG = "xpuruntime-"

#: Inductor's setting for passes over the graphs of forward and backward, before its own.
_PASSES = "post_grad_custom_pre_pass"
#: Where PyTorch has what runs a package of AOTInductor.
_PACKAGES = "torch.export.pt2_archive._package"

#: Policies whose compiled code is kept.
_MOST_KEPT = 8


_lock = threading.Lock()


def policy_changed(active: CompiledPolicy | None) -> None:
    """Have code compiled from now on follow another policy, and code that was compiled for it before run again.

    Products are looked up whenever compiled code runs. What a policy says of the rest is built into the code: Dynamo
    compares `DispatchContext.compiled_for` with what it was at compilation, and the same is part of the key under which
    Inductor and AOTAutograd keep code on disk, so that no process meets the code of another policy. Code of the last
    few policies is kept; with one more, all is compiled again.
    """
    built_in = "" if active is None else _built_in(active.policy)
    stated = {} if active is None else _stated(active)
    key = f"{built_in};{stated}" if stated else built_in
    if active is not None:
        key += f"\n{active.strict} {sorted(active.ops)}"  # on which depends what is reported of the code
    with _lock:
        if active is None:
            while CONTEXT.compile_hooks:
                CONTEXT.compile_hooks.pop().remove()
            CONTEXT.reported_gaps.clear()
        elif not CONTEXT.compile_hooks:
            _watch()
        before = CONTEXT.compiled_for
        if key == before or (CONTEXT.kept_compiled and key.partition("\n")[0] == before.partition("\n")[0]):
            return
        CONTEXT.compiled_for = key
        CONTEXT.compiled_keys.add(key)
        drops = CONTEXT.unguarded or (len(CONTEXT.compiled_keys) > _MOST_KEPT and not CONTEXT.kept_compiled)
    config = torch.compiler.config
    rest = config.cache_key_tag.partition(_TAG)[0]
    if built_in:
        from xpuruntime import __version__

        built_in += __version__  # its operators are in the code that is kept, with their arguments
        if active is not None and active.tunes and "attention" in active.ops:  # measured while code is compiled
            devices = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
            built_in += str([tuning.held_by("attention", device) for device in devices])
    config.cache_key_tag = rest + (_TAG + hashlib.sha256(built_in.encode()).hexdigest()[:16] if built_in else "")
    if drops and _dynamo_is_loaded():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PyTorch's own, of its deprecated parts
            torch.compiler.reset()
        CONTEXT.unguarded = not CONTEXT.guards_added


def _dynamo_is_loaded() -> bool:
    """Whether Dynamo can have compiled anything: who waits for its import in another thread may wait for itself."""
    module = sys.modules.get("torch._dynamo")
    return module is not None and not getattr(module.__spec__, "_initializing", False)


@contextlib.contextmanager
def keep_compiled() -> Iterator[None]:
    """Let policies come and go in the block without compiling again what they would have compiled alike.

    However many they are, the code of each is kept. Coverage gaps of such code are not reported anew, so this is for
    code that is only measured.
    """
    with _lock:
        CONTEXT.kept_compiled += 1
    try:
        yield
    finally:
        with _lock:
            CONTEXT.kept_compiled -= 1


def guards_policies() -> bool:
    """Say whether Dynamo can be told that code holds for one policy alone, so that that of several is kept."""
    importlib.import_module(_private_api.DYNAMO_GRAPHS[0])
    return bool(CONTEXT.guards_added)


def _built_in(policy: Policy) -> str:
    """Return as text what compiled code has built in of a policy; nothing where that is as without one."""
    kernels = policy.kernels
    rules = [rule for rule in kernels.rules if rule.match.op != "matmul"]
    others = kernels.remove("matmul").replace(rules=rules)
    if not others.preferences and not rules:
        others = KernelPolicy()  # how the fastest is chosen is of no use to nothing
    rest = policy.replace(kernels=others).to_dict()
    rest.pop("mode", None)
    if set(rest) <= {"schema"}:
        return ""
    return json.dumps(rest, sort_keys=True)


def _stated(active: CompiledPolicy) -> dict[str, tuple[bool, bool]]:
    flags_by_op = {op: (active.names_phases(op), active.names_modules(op)) for op in sorted(active.ops)}
    return {op: flags for op, flags in flags_by_op.items() if any(flags)}


class _Watched:
    """A function of PyTorch's, wrapped until `remove`."""

    def __init__(self, owner: Any, name: str, check: Callable[..., Any]) -> None:
        self._owner = owner
        self._name = name
        self._before = before = getattr(owner, name)

        @functools.wraps(before)
        def around(*args: Any, **kwargs: Any) -> Any:
            active = active_policy()
            first = None if active is None else check(active, *args, **kwargs)
            return before(*args, **kwargs) if first is None else before(first, *args[1:], **kwargs)

        self._wrapper = around
        setattr(owner, name, around)

    def remove(self) -> None:
        if getattr(self._owner, self._name) is self._wrapper:  # else another wrapper is around it, and it does nothing
            setattr(self._owner, self._name, self._before)


def _watch() -> None:
    """See what is compiled while a policy holds. There is no official place where options and graph are both known."""
    CONTEXT.compile_hooks.append(_Watched(_private_api.compile_wrapper, "__call__", _check_compile))
    for name, watch in (("torch._inductor", _watch_aot), (_PACKAGES, _watch_packages)):
        hook = _when_imported(name, watch)
        if hook is not None:
            CONTEXT.compile_hooks.append(hook)


def _when_imported(name: str, then: Callable[[Any], None]) -> WhenImported | None:
    loaded = sys.modules.get(name)
    if loaded is None:
        return WhenImported(name, then)
    then(loaded)
    return None


def _watch_aot(module: Any) -> None:
    CONTEXT.compile_hooks.append(_Watched(module, "aot_compile", _check_aot))


def _watch_packages(module: Any) -> None:
    if hasattr(module, "AOTICompiledModel"):
        CONTEXT.compile_hooks.append(_Watched(module.AOTICompiledModel, "__call__", _check_package))


def _check_compile(active: CompiledPolicy, wrapper: Any, graph: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the compiler to take instead, whose code states what rules ask for."""
    del args
    if "attention" in active.overrides:
        simplify_masks(graph.graph)
    options = {**wrapper.config, **(kwargs.get("config_patches") or {})}
    report_gaps([*gaps_in_settings(active, options), *gaps_in_graph(active, graph)], active)
    flags_by_op = _stated(active)
    if not flags_by_op:
        return None

    from xpuruntime.pytorch.compiler.inductor_annotation_pass import InductorAnnotationPass  # imports Inductor

    earlier = options.get(_PASSES, getattr(_private_api.inductor_config(), _PASSES))
    other = copy.copy(wrapper)
    other.config = {**wrapper.config, _PASSES: InductorAnnotationPass(flags_by_op, graph, earlier)}
    return other


def _check_aot(
    active: CompiledPolicy, graph: Any, *args: Any, options: Mapping[str, Any] | None = None, **kwargs: Any
) -> None:
    del args, kwargs
    all_options = {**(options or {}), "aot_inductor": True}
    report_gaps([*gaps_in_settings(active, all_options), *gaps_in_graph(active, graph)], active)


def _check_package(active: CompiledPolicy, *args: Any, **kwargs: Any) -> None:
    del args, kwargs
    report_gaps(gaps_in_package(active), active)


def _forget_with_code(module: Any) -> None:
    """Whoever resets Dynamo, forget with the code what is known of it."""
    before = module.reset

    @functools.wraps(before)
    def reset() -> None:
        before()
        with _lock:
            CONTEXT.compiled_keys = {CONTEXT.compiled_for}
        flash_impl.forget()

    module.reset = reset


def _guard_graphs(module: Any) -> None:
    """Have all code that Dynamo compiles hold for the policy alone that it was compiled for, or for none."""
    graphs = getattr(module, _private_api.DYNAMO_GRAPHS[1], None)
    if graphs is None:
        CONTEXT.unguarded = True
        return
    CONTEXT.guards_added = True
    before = graphs.__init__

    @functools.wraps(before)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        before(self, *args, **kwargs)
        _private_api.guard_on_attribute(self, context, "CONTEXT", "compiled_for")

    graphs.__init__ = init


def _scale_limit(module: Any) -> None:
    """Have the limit of compiled variants of a code hold for each policy, and not for all of them together."""
    name = _private_api.DYNAMO_LIMIT[1]
    before = getattr(module, name, None)
    if before is None:
        return

    @functools.wraps(before)
    def exceeds(*args: Any, **kwargs: Any) -> Any:
        config = _private_api.dynamo_config()
        with config.patch(recompile_limit=config.recompile_limit * max(len(CONTEXT.compiled_keys), 1)):
            return before(*args, **kwargs)

    setattr(module, name, exceeds)


def _share_graph_trees(module: Any) -> None:
    """Let all threads record CUDA graphs of compiled code, as PyTorch does since 2.13."""
    # Before, only the one that imports the module can, and those of autograd that it starts; a change of the policy
    # resets Dynamo, which imports it, in a thread of its own.
    containers, locks = _private_api.GRAPH_TREES[1:]
    if hasattr(module, "_initialize_tls"):
        return
    before = module.get_obj

    @functools.wraps(before)
    def get_obj(local: Any, name: str) -> Any:
        if not hasattr(local, name) and not _private_api.is_in_state_of_thread(name):
            for key, value in ((containers, {}), (locks, collections.defaultdict(threading.Lock))):
                setattr(local, key, value)
                _private_api.keep_in_state_of_thread(key, value)
        return before(local, name)

    module.get_obj = get_obj


CONTEXT.unguarded = _private_api.DYNAMO_GRAPHS[0] in sys.modules
_when_imported("torch._dynamo", _forget_with_code)
_when_imported(_private_api.DYNAMO_GRAPHS[0], _guard_graphs)
_when_imported(_private_api.DYNAMO_LIMIT[0], _scale_limit)
_when_imported(_private_api.GRAPH_TREES[0], _share_graph_trees)
