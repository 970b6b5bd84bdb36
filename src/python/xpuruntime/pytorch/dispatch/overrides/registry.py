# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Registry of overrides: placed with the first policy that needs them, removed with the last."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
import threading
import warnings
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.overrides.fast_kernels import FastKernel
from xpuruntime.pytorch.dispatch.overrides.native import (
    CLASSES,
    HIGHER_ORDER,
    IN_PYTHON,
    TRACING,
    Native,
    Override,
    has_native_kernel,
    never_compile,
    qualified,
    skip_in_dynamo,
)
from xpuruntime.pytorch.import_hook import WhenImported

#: What can be required, each with the modules here that have its overrides: operations of a KernelPolicy, and beside
#: `scaled_dot_product_attention` the other functions for attention.
_MODULES = {
    "matmul": ("matmul", "report_only"),
    "attention": ("attention",),
    "layer_norm": ("norms", "traced_norms"),
    "rms_norm": ("norms", "traced_norms"),
    "conv": ("conv",),
    "varlen_attn": ("report_only",),
    "flex_attention": ("report_only",),
    "flex_options": ("flex_options",),
    "multi_head_attention": ("report_only",),
    "eager_attention": ("xpuruntime.pytorch.adapters.eager_attention", "xpuruntime.pytorch.adapters.flash_words"),
    "norm_classes": ("xpuruntime.pytorch.adapters.norm_classes",),
    "gated_units": ("xpuruntime.pytorch.adapters.gated_units",),
    "swiglu": ("xpuruntime.pytorch.adapters.gated_units",),
    "geglu": ("xpuruntime.pytorch.adapters.gated_units",),
    "rope": ("xpuruntime.pytorch.adapters.rotary",),
    "softmax": ("xpuruntime.pytorch.adapters.rows",),
    "cross_entropy": ("xpuruntime.pytorch.adapters.rows",),
    "linear_cross_entropy": ("xpuruntime.pytorch.adapters.language_heads",),
    "grouped_matmul": ("xpuruntime.pytorch.adapters.rows",),
    "cache_update": ("xpuruntime.pytorch.adapters.static_caches",),
}
#: All that sees what runs. The rest only says what a policy does not reach, adapts classes of models to a policy, or is
#: in the way of code that is being compiled alone, which would be compiled anew for it.
RUNNING = tuple(
    name
    for name, modules in _MODULES.items()
    if name not in ("flex_options", "multi_head_attention") and "adapters" not in modules[0]
)

#: Before an operation: all operators that compute it and that nothing can stand in for, which ``strict`` refuses.
_UNSERVED = "unserved_"

_lock = threading.RLock()
#: Modules of overrides that were found; one that is not may be installed later.
_found: set[str] = set()
_COMPOSITE = _private_api.dispatch_key("CompositeImplicitAutograd")


class _Placed:
    """One override at one dispatch key, in place until `remove`."""

    def __init__(self, override: Override, key: str) -> None:
        self.override = override
        self.key = key
        self.native = Native(override.name, key, self._again)
        never_compile(override.make)
        self.function: Any = override.make(self.native)
        self._take_away: Callable[[], None] | None = None
        self.place()

    def place(self) -> None:
        function = self.function
        if isinstance(function, FastKernel):
            self._take_away = function.place()
            if self._take_away is not None:
                return
            function = function.otherwise
        namespace, _, name = qualified(self.override.name).partition("::")
        library = torch.library.Library(namespace, "IMPL")
        library.impl(name, function, self.key, with_keyset=True, allow_override=True)
        self._take_away = functools.partial(_private_api.remove_library, library)

    @property
    def title(self) -> str:
        return f"{qualified(self.override.name)} [{self.key}]"

    def remove(self) -> None:
        self._lift()
        # Python cannot see through a fast kernel in C++, which holds the native kernel, which holds this object.
        self.function = None

    def _lift(self) -> None:
        take_away, self._take_away = self._take_away, None
        if take_away is not None:
            take_away()

    def _again(self, native: Native) -> None:
        with _lock:
            self._lift()
            native.take()
            if self.function is not None:  # else it has been removed, and a thread was still inside
                self.place()


class _Traced:
    """One override for code that is being compiled, in place until `remove`."""

    # PyTorch's dispatcher asks Python for kernels while Dynamo and AOTAutograd trace, and never otherwise, so that a
    # call in eager code costs what it did.

    def __init__(self, override: Override, key: str) -> None:
        self.override = override
        self.key = key
        packet, _, overload = override.name.partition(".")
        self._op: Any = getattr(getattr(torch.ops.aten, packet), overload or "default")
        self._before = _private_api.python_kernels(self._op).get(_COMPOSITE)
        self._place(override.make(self._native))

    def _native(self, *args: Any, **kwargs: Any) -> Any:
        if self._before is not None:
            return self._before(*args, **kwargs)
        return _private_api.call_kernel_at(self._op, _COMPOSITE, *args, **kwargs)

    def _place(self, function: Any) -> None:
        if function is None:
            _private_api.python_kernels(self._op).pop(_COMPOSITE, None)
        else:
            _private_api.python_kernels(self._op)[_COMPOSITE] = function
        _private_api.forget_dispatch(self._op)

    @property
    def title(self) -> str:
        return f"{qualified(self.override.name)} [{self.key}]"

    def remove(self) -> None:
        self._place(self._before)


def _module(name: str) -> Any:
    return importlib.import_module(name if "." in name else f"xpuruntime.pytorch.dispatch.overrides.{name}")


def overrides_of(op: str, operators: tuple[str, ...] | None = None) -> tuple[Override, ...]:
    """Return the overrides of one thing that can be required; those that this PyTorch knows.

    Of `operators`, those that are registered now, an operation that is unserved has some.
    """
    if op.startswith(_UNSERVED):
        names = _operators() if operators is None else operators
        overrides: tuple[Override, ...] = _module("report_only").overrides_of_operators(
            op.removeprefix(_UNSERVED), names
        )
        return overrides
    return tuple(
        override
        for module in map(_module, _MODULES[op])
        for override in module.OVERRIDES
        if (override.group or override.op) == op and _exists(override)
    )


def _operators() -> tuple[str, ...]:
    return tuple(_private_api.operator_names())


def require(ops: Iterable[str]) -> tuple[str, ...]:
    """Put the overrides of some operations in place; each call is undone by one `release` with what it returns.

    Notes
    -----
    PyTorch's dispatcher does not wait for threads that are inside a kernel, or on their way into one, when that is
    replaced or taken away: they may crash. While others compute, only what is in place already may be required.
    """
    wanted = tuple(dict.fromkeys(ops))
    with _lock:
        quiet_override_warning()
        done: list[str] = []
        try:
            standing = [placed for op in wanted if CONTEXT.users[op] for placed in CONTEXT.placed[op]]
            for refresh in {placed.refresh for placed in standing if hasattr(placed, "refresh")}:
                refresh()
            operators = _operators() if any(op.startswith(_UNSERVED) for op in wanted) else None
            for op in wanted:
                if not CONTEXT.users[op]:
                    CONTEXT.placed[op] = _place_all(op, operators)
                CONTEXT.users[op] += 1
                done.append(op)
        except BaseException:
            release(done)
            raise
    return wanted


# Where a policy is activated inside of code that is being compiled: what is tried is to run, and not to be traced.
skip_in_dynamo(require.__code__)


def release(ops: Iterable[str]) -> None:
    """Undo one `require`. The native kernels are back when nobody else needs the overrides."""
    with _lock:
        for op in ops:
            CONTEXT.users[op] -= 1
            if CONTEXT.users[op] == 0:
                for placed in reversed(CONTEXT.placed.pop(op)):
                    placed.remove()


def installed() -> tuple[str, ...]:
    """Return the operators that are replaced now, such as ``"aten::mm [CPU]"``."""
    with _lock:
        return tuple(p.title for group in CONTEXT.placed.values() for p in group if p.title)


def _place_all(op: str, operators: tuple[str, ...] | None) -> list[InPlace]:
    placed: list[InPlace] = []
    if op == "rms_norm":
        from xpuruntime.pytorch.dispatch.overrides.norms import add_missing_kernel

        add_missing_kernel()
    try:
        for override in overrides_of(op, operators):
            for key in override.keys:
                if override.module and override.module not in sys.modules:
                    placed.append(Awaited(override, key, _place))
                elif replacement := _place(override, key):
                    placed.append(replacement)
    except BaseException:
        for replacement in reversed(placed):
            replacement.remove()
        raise
    return placed


def _place(override: Override, key: str) -> InPlace | None:
    if key == TRACING:
        return _Traced(override, key)
    if key == CLASSES:
        adapted: InPlace = override.make((override, key))
        return adapted
    if key == IN_PYTHON or key in HIGHER_ORDER:
        if not is_there(override, key):
            return None
        return Replaced(override, key) if key == IN_PYTHON else Higher(override, key)
    if key.endswith("CUDA") and not torch.backends.cuda.is_built():
        return None
    return _Placed(override, key) if has_native_kernel(override.name, key) else None


def _exists(override: Override) -> bool:
    if override.keys == (CLASSES,):
        return True
    if override.module:
        if override.module not in _found and importlib.util.find_spec(override.module) is not None:
            _found.add(override.module)
        return override.module in _found
    packet, _, overload = override.name.partition(".")
    packet_object = getattr(torch.ops.aten, packet, None)
    return packet_object is not None and (overload or "default") in packet_object.overloads()


@functools.cache
def quiet_override_warning() -> tuple[torch.library.Library, ...]:
    """Have PyTorch say its one warning about overridden kernels now, about an operator that nobody calls."""
    library = torch.library.Library("_xpuruntime_quiet", "DEF")
    library.define("nothing(Tensor x) -> Tensor")
    over = [torch.library.Library("_xpuruntime_quiet", "IMPL") for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for implementation in over:
            implementation.impl("nothing", _identity, "CPU", allow_override=True)
    return library, *over


def _identity(x: Any) -> Any:
    return x


class InPlace(Protocol):
    """Something of PyTorch's that is replaced until `remove`."""

    override: Override
    key: str

    @property
    def title(self) -> str:
        """What is replaced, in a few words; empty while it is missing."""

    def remove(self) -> None:
        """Give PyTorch its own back."""


def is_there(override: Override, key: str) -> bool:
    """Say whether this PyTorch has what such an override stands for; its module is imported."""
    if key == IN_PYTHON:
        return callable(getattr(sys.modules[override.module], override.name, None))
    op = getattr(torch.ops.higher_order, override.name, None)
    return op is not None and _private_api.dispatch_key(HIGHER_ORDER[key]) in _private_api.python_kernels(op)


class Replaced:
    """A function of one of PyTorch's modules, replaced by an override until `remove`.

    Code that is being compiled is traced through the override, and compiled again where that comes or goes.
    """

    def __init__(self, override: Override, key: str) -> None:
        self.override = override
        self.key = key
        self._module: Any = sys.modules[override.module]
        self._native = getattr(self._module, override.name)
        self._override = override.make(self._native)
        setattr(self._module, override.name, self._override)

    @property
    def title(self) -> str:
        """What is replaced, in a few words."""
        return f"{self.override.module}.{self.override.name}"

    def remove(self) -> None:
        """Give PyTorch its own back, unless another library has replaced the override since."""
        if getattr(self._module, self.override.name) is self._override:
            setattr(self._module, self.override.name, self._native)


class Higher:
    """A higher-order operator's kernel at one dispatch key, replaced by an override until `remove`.

    It runs where the operator is computed; what `torch.compile` lowers does not come here.
    """

    def __init__(self, override: Override, key: str) -> None:
        self.override = override
        self.key = key
        self._op: Any = getattr(torch.ops.higher_order, override.name)
        self._at = _private_api.dispatch_key(HIGHER_ORDER[key])
        self._native = _private_api.python_kernels(self._op)[self._at]
        self._override = override.make(self._native)
        self._place(self._override)

    @property
    def title(self) -> str:
        """What is replaced, in a few words."""
        return f"higher_order::{self.override.name} [{HIGHER_ORDER[self.key]}]"

    def _place(self, function: Any) -> None:
        _private_api.python_kernels(self._op)[self._at] = function
        _private_api.forget_dispatch(self._op)

    def remove(self) -> None:
        """Give PyTorch its own back, unless another library has replaced the override since."""
        if _private_api.python_kernels(self._op).get(self._at) is self._override:
            self._place(self._native)


class Awaited:
    """An override of something that is there once a module is imported, and placed then; until `remove`."""

    def __init__(
        self, override: Override, key: str, override_in_place: Callable[[Override, str], InPlace | None]
    ) -> None:
        self.override = override
        self.key = key
        self.placed: InPlace | None = None
        self._place = override_in_place
        self._wait = WhenImported(override.module, self._come)

    def _come(self, _module: Any) -> None:
        self.placed = self._place(self.override, self.key)

    @property
    def title(self) -> str:
        """What is replaced, in a few words; empty before the import."""
        return "" if self.placed is None else self.placed.title

    def remove(self) -> None:
        """Give PyTorch its own back. Idempotent."""
        self._wait.remove()
        placed, self.placed = self.placed, None
        if placed is not None:
            placed.remove()
