# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Classes and functions of models that are replaced while a policy needs it, those to be defined included."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.coverage.gaps import CoverageGap, report_gaps
from xpuruntime.pytorch.coverage.operation_table import title_of
from xpuruntime.pytorch.dispatch.context import CONTEXT, DTYPES, active_policy, call_key, capturing
from xpuruntime.pytorch.dispatch.overrides.native import call_native
from xpuruntime.pytorch.dispatch.route import facts_of_call
from xpuruntime.pytorch.explanation.requested import requests_other_kernel

if TYPE_CHECKING:
    from torch import Tensor

    from xpuruntime.pytorch.dispatch.overrides.native import Override

UNUSUAL = "it is called in a transform of torch.func, in forward mode, or with tensors of another class"
_FIX = "leave {op} out of the policy, or use mode: prefer"
_TENSORS = (torch.Tensor, torch.nn.Parameter)
_DEVICES = ("cpu", "cuda")


def is_usual(*tensors: Tensor) -> bool:
    """Say whether an operator of a library takes these tensors as PyTorch's own would: plain ones, by reverse mode."""
    if _private_api.has_transforms() or _private_api.forward_level() >= 0:
        return False
    for tensor in tensors:  # noqa: SIM110 - a generator costs each call of a layer more than what it asks
        if type(tensor) not in _TENSORS:
            return False
    return True


def decides(op: str, like: Tensor) -> bool:
    """Say whether the active policy decides calls of an operation on tensors like this one."""
    active = active_policy()
    return active is not None and op in active.ops and like.device.type in _DEVICES and like.numel() > 0


def own_call(op: str, owner: Any, *tensors: Tensor) -> tuple[Any, bool]:
    """Return a key of eager calls of a model's own code, and whether measured times are known to leave those to it.

    No key, where each call is looked at. What it does not tell apart, sizes of parameters or who records it, decides
    no numbers: the code of the model is always right, and what another kernel would gain is decided anew with times.
    """
    active = active_policy()
    if active is None or not active.tunes or active.by_call or CONTEXT.observer is not None or capturing():
        return None, False
    arrays = call_key(op, *tensors)
    if arrays is None:
        return None, False
    like = tensors[0]
    key = (owner, arrays, torch.is_grad_enabled(), like.requires_grad, torch.is_autocast_enabled(like.device.type))
    if key in active.own_calls:
        CONTEXT.observe_device(like.device)  # by which times may be asked anew
    return key, key in active.own_calls


def compiled_decision(op: str) -> Callable[[], bool]:
    """Return what says, as a constant of compiled code, whether the active policy decides an operation."""

    def decided() -> bool:
        active = active_policy()
        return active is not None and op in active.ops and not torch.compiler.is_exporting()

    _private_api.mark_constant(decided)
    return decided


def run_original(
    op: str, owner: Any, original: Callable[..., Any], args: tuple[Any, ...], like: Tensor, reason: str
) -> Any:
    """Run what a class or function computes itself, which the policy decides and no kernel can stand in for."""
    active = active_policy()
    if active is None:
        return original(*args)
    phase, module = active.call_context()
    key = ("original", op, owner, like.dtype, like.device, phase, module, reason)
    route = active.routes.get(key)
    if route is None:
        dtype = DTYPES.get(like.dtype, like.dtype)
        route = active.resolve(
            key, facts_of_call(op, device=like.device, dtype=like.dtype, phase=phase, module=module, sizes={}),
            description=f"{title_of(owner)} of {list(like.shape)} {dtype} on {like.device}",
            unsupported_reason=reason, by_own_code=True,
        )  # fmt: skip
    return call_native(f"nn::{owner.__name__}", op, original, args, route=route)


def report_compiled(op: str, owner: Any, dtype: torch.dtype, device: torch.device, reason: str) -> bool:
    """Report or refuse what a kernel of the policy cannot stand in for in code that is being compiled.

    Dynamo calls it while it traces; the policy that holds is part of the key of compiled code.
    """
    active = active_policy()
    if active is not None and op in active.ops and device.type in _DEVICES and not torch.compiler.is_exporting():
        phase = "train" if torch.is_grad_enabled() else "infer"
        facts = facts_of_call(op, device=device, dtype=dtype, phase=phase, module="", sizes={})
        if active.by_module or requests_other_kernel(op, active.policy.kernels.compiled_rules.match(facts).use):
            report_gaps([CoverageGap(op, title_of(owner), reason, _FIX.format(op=op))], active)
    return False


_private_api.mark_constant(report_compiled)


class _Definitions:
    """Sees each class of modules that is defined, while anybody asks."""

    def __init__(self) -> None:
        self._users: list[Callable[[type], None]] = []
        self._classes: weakref.WeakKeyDictionary[type, None] = weakref.WeakKeyDictionary()
        self._before: Any = None
        self._hook: Any = None

    def follow(self, user: Callable[[type], None]) -> list[type]:
        """Call `user` with each class that is defined from now on, and return those that there are."""
        # A class whose base has an ``__init_subclass__`` that calls no other is seen when somebody next asks.
        if not self._users:
            self._before = torch.nn.Module.__dict__.get("__init_subclass__")
            self._hook = classmethod(self._defined)  # type: ignore[arg-type]
            torch.nn.Module.__init_subclass__ = self._hook
            self.look()
        self._users.append(user)
        return list(self._classes)

    def look(self) -> None:
        """Tell of classes that nobody was told of when they were defined."""
        for kind in _subclasses(torch.nn.Module):
            if kind not in self._classes:
                self._tell(kind)

    def leave(self, user: Callable[[type], None]) -> None:
        self._users.remove(user)
        if not self._users and torch.nn.Module.__dict__.get("__init_subclass__") is self._hook:
            if self._before is None:
                del torch.nn.Module.__init_subclass__
            else:
                torch.nn.Module.__init_subclass__ = self._before

    def _defined(self, kind: Any, **kwargs: Any) -> None:
        if self._before is None:
            super(torch.nn.Module, kind).__init_subclass__(**kwargs)
        else:
            self._before.__get__(None, kind)(**kwargs)
        self._tell(kind)

    def _tell(self, kind: type) -> None:
        self._classes[kind] = None
        for user in tuple(self._users):
            user(kind)


_definitions = _Definitions()


def _subclasses(kind: type) -> list[type]:
    classes: dict[type, None] = {}
    left = [kind]
    while left:
        below: list[type] = type.__subclasses__(left.pop())
        for subclass in below:
            if subclass not in classes:
                classes[subclass] = None
                left.append(subclass)
    return list(classes)


class AdaptedClasses:
    """All classes of modules that a function picks, adapted until `remove`."""

    def __init__(
        self,
        own_forward: Callable[[type], FunctionType | None],
        adapter: Callable[[FunctionType], Callable[..., Any]],
        placed: tuple[Override, str],
    ) -> None:
        self.override, self.key = placed
        self._own_forward, self._adapter = own_forward, adapter
        self._adapted: weakref.WeakKeyDictionary[type, tuple[Any, Any]] = weakref.WeakKeyDictionary()
        for kind in _definitions.follow(self.adapt):
            self.adapt(kind)

    refresh = staticmethod(_definitions.look)

    def adapt(self, kind: type) -> None:
        """Adapt one class, if it is picked."""
        original = self._own_forward(kind)
        if original is not None:
            replacement = self._adapter(original)
            self._adapted[kind] = (original, replacement)
            setattr(kind, self.override.name, replacement)

    @property
    def title(self) -> str:
        """What is replaced, in a few words."""
        return f"{self.override.name} of {len(self._adapted)} classes for {self.override.op}" if self._adapted else ""

    def remove(self) -> None:
        """Give each class its own function back, unless another library has replaced it since."""
        _definitions.leave(self.adapt)
        for kind, (original, replacement) in list(self._adapted.items()):
            if kind.__dict__.get(self.override.name) is replacement:
                setattr(kind, self.override.name, original)
        self._adapted.clear()


class AdaptedFunctions:
    """The functions of some names in all modules that are imported, adapted until `remove`.

    `adapter` returns what replaces a function, or ``None`` where nothing does.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        adapter: Callable[[FunctionType], Callable[..., Any] | None],
        placed: tuple[Override, str],
    ) -> None:
        self.override, self.key = placed
        self._names, self._adapter = names, adapter
        self._replacements: dict[FunctionType, Any] = {}
        self._places: list[tuple[Any, str, FunctionType]] = []
        _definitions.follow(self._defined)
        for module in list(sys.modules.values()):
            try:
                stated = module.__dict__
            except AttributeError:  # something else that stands there
                continue
            for name in names:
                if name in stated:
                    self._adapt_function(module, name, stated[name])

    def _defined(self, kind: type) -> None:
        self._adapt(sys.modules.get(kind.__module__))

    def _adapt(self, module: Any) -> None:
        stated: dict[str, Any] = getattr(module, "__dict__", {})
        for name in self._names:
            if name in stated:
                self._adapt_function(module, name, stated[name])

    def _adapt_function(self, module: Any, name: str, function: Any) -> None:
        if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
            return
        if function not in self._replacements:
            self._replacements[function] = self._adapter(function)
        if self._replacements[function] is not None:
            self._places.append((module, name, function))
            setattr(module, name, self._replacements[function])

    @property
    def title(self) -> str:
        """What is replaced, in a few words."""
        return f"{self.override.name} of {len(self._places)} modules" if self._places else ""

    def remove(self) -> None:
        """Give each module its own function back, unless another library has replaced it since."""
        _definitions.leave(self._defined)
        for module, name, original in self._places:
            if getattr(module, name, None) is self._replacements[original]:
                setattr(module, name, original)
        self._places.clear()
