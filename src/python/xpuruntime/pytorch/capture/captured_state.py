# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""What a step works on: found from its function, copied for a warm-up and restored after it, and made capturable."""

from __future__ import annotations

import functools
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from xpuruntime.errors import InputError
from xpuruntime.pytorch import _private_api

#: How far from the function it is looked: a function, its object, a container in it, what that holds.
_DEPTH = 5
#: Containers longer than this are data.
_LONGEST = 256
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType)


@dataclass
class CapturedState:
    """What a function works on, each once, in the order in which it was found."""

    modules: list[Any] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    scalers: list[Any] = field(default_factory=list)
    generators: list[Any] = field(default_factory=list)
    #: Tensors that belong to no module.
    buffers: list[Any] = field(default_factory=list)

    def add(self, value: Any) -> bool:
        """Keep a value of one of the four kinds, and say whether it was of one."""
        for kind, kept in (
            (torch.nn.Module, self.modules),
            (torch.optim.Optimizer, self.optimizers),
            (torch.amp.GradScaler, self.scalers),
            (torch.Generator, self.generators),
        ):
            if isinstance(value, kind):
                if not any(value is known for known in kept):
                    kept.append(value)
                return True
        return False

    def all_modules(self) -> list[Any]:
        """Return the modules and all inside them, each once."""
        return _once(inner for module in self.modules for inner in module.modules())

    def tensors(self) -> list[Any]:
        """Return parameters and buffers of the modules, parameters of the optimizers and other tensors, each once."""
        buffers = (buffer for module in self.modules for buffer in module.buffers())
        return _once([*self.parameters(), *buffers, *self.buffers])

    def parameters(self) -> list[Any]:
        """Return the parameters of the modules and the optimizers, each once."""
        own = [parameter for module in self.modules for parameter in module.parameters()]
        return _once([*own, *(p for optimizer in self.optimizers for p in parameters_of(optimizer))])

    def unexplained(self) -> int:
        """Return how many parameters of the optimizers belong to no module that was found."""
        known = {id(parameter) for module in self.modules for parameter in module.parameters()}
        return sum(id(p) not in known for optimizer in self.optimizers for p in parameters_of(optimizer))


def parameters_of(optimizer: Any) -> Iterator[Any]:
    """Yield the parameters of an optimizer."""
    for group in optimizer.param_groups:
        yield from group["params"]


def captured_state_of(fn: Callable[..., Any]) -> CapturedState:
    """Return what `fn` works on, as far as it can be seen without running it.

    Looked at are what the function closes over, its defaults, the globals that it names, its object's attributes,
    arguments of a `functools.partial`, and containers and objects in all of them.
    """
    used = CapturedState()
    seen: set[int] = set()

    def look(value: Any, depth: int) -> None:
        if isinstance(value, (*_PLAIN, torch.Tensor)) or id(value) in seen:
            return
        seen.add(id(value))
        if used.add(value) or depth == 0:
            return
        for inner in _inside(value):
            look(inner, depth - 1)

    look(fn, _DEPTH)
    return used


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return _inside_function(value)
    if isinstance(value, dict):
        return list(value.values()) if len(value) <= _LONGEST else []
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value) if len(value) <= _LONGEST else []
    if type(value).__module__.partition(".")[0] in ("torch", "numpy", "builtins"):
        return []
    attributes = getattr(value, "__dict__", None)
    own = list(attributes.values()) if isinstance(attributes, dict) else []
    return [*own, type(value).__call__] if callable(value) else own


def _inside_function(function: types.FunctionType) -> list[Any]:
    if function.__module__ and function.__module__.partition(".")[0] == "torch":
        # What torch.compile returns keeps the function that it was given.
        return [_private_api.compiled_function(function), getattr(function, "__wrapped__", None)]
    values: list[Any] = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # a name that is not bound yet
            continue
    values += [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
    values += [_private_api.compiled_function(function), getattr(function, "__wrapped__", None)]
    return values


def _names(code: types.CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names += _names(constant)
    return names


def _once(values: Iterable[Any]) -> list[Any]:
    return list({id(value): value for value in values}.values())


#: These write the state of a parameter before they first use it, so that what is written first is what a step begins
#: with. Subclasses are their own.
_WRITES_FIRST = frozenset(
    getattr(torch.optim, name)
    for name in ("ASGD", "Adadelta", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop")
)


class _FirstValues(dict[str, Any]):
    """The state of one parameter, which also keeps what each entry was first."""

    def __init__(self) -> None:
        super().__init__()
        self.first: dict[str, Any] = {}

    def __setitem__(self, key: str, value: Any) -> None:
        if key not in self.first:
            self.first[key] = _first_of(value)
        super().__setitem__(key, value)


def _first_of(value: Any) -> Any:
    """Return a copy; of a tensor that holds one number in all places, that number alone."""
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor and value.numel() > 1:
        number = value.detach()[(0,) * value.dim()]
        if bool((value.detach() == number).all()):
            return number.clone()
    return _copy(value)


def _copy(value: Any) -> Any:
    """Return a copy, in the memory of the host: the device has to hold the step that is run meanwhile."""
    if not isinstance(value, torch.Tensor):
        return value
    plain = type(value) in (torch.Tensor, torch.nn.Parameter) and value.layout is torch.strided
    return value.detach().to("cpu", copy=True) if plain else value.detach().clone()


class OptimizerState:
    """The state of an optimizer at one moment.

    A tensor keeps its place when it is given back, because a graph refers to places. What the warm-up adds for a
    parameter that had no state yet is set to what the optimizer began with, where that is known: then the step that is
    captured finds its state in memory that no graph writes to begin with. It can be given back any number of times, and
    what was added stays in the memory of the first time, because graphs that were captured meanwhile refer to it.
    """

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        state = optimizer.state
        self._entries = {p: {key: (value, _copy(value)) for key, value in state[p].items()} for p in list(state)}
        self._groups = [
            {key: (value, _copy(value)) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        self._factory = getattr(state, "default_factory", None)
        if type(optimizer) in _WRITES_FIRST and self._factory is not None:
            state.default_factory = _FirstValues

    def restore(self) -> str:
        """Give everything back. Returns why a step cannot be captured yet, or nothing.

        Afterwards the optimizer is as it was, except that state which it would have made in its next step may be
        there already, with the values that the step would begin with.
        """
        state = self.optimizer.state
        if self._factory is not None:
            state.default_factory = self._factory
        problem = ""
        for parameter in list(state):
            before = self._entries.get(parameter)
            if before is None:
                problem = self._begin(parameter) or problem
            else:
                problem = self._restore(parameter, before) or problem
        for group, before in zip(self.optimizer.param_groups, self._groups, strict=True):
            for key, (value, copy) in before.items():
                group[key] = _restored(value, copy)
        return problem

    def _begin(self, parameter: Any) -> str:
        """Set state that the warm-up made to what it began with, or take it away."""
        state = self.optimizer.state
        values = state[parameter]
        name = type(self.optimizer).__name__
        if isinstance(values, _FirstValues) and values.first.keys() >= values.keys():
            self._entries[parameter] = {key: (value, values.first[key]) for key, value in values.items()}
            return self._restore(parameter, self._entries[parameter])
        if type(self.optimizer) is torch.optim.SGD and self._undamped(parameter):
            for value in values.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()
            self._entries[parameter] = {key: (value, _copy(value)) for key, value in values.items()}
            return ""
        del state[parameter]
        return f"{name} makes state in its first step, and what it begins with is not known" if values else ""

    def _undamped(self, parameter: Any) -> bool:
        """Say whether the first step of SGD is one from a momentum of zero, which dampening makes it not."""
        groups = self.optimizer.param_groups
        return any(group["dampening"] == 0 for group in groups if any(parameter is p for p in group["params"]))

    def _restore(self, parameter: Any, before: dict[str, tuple[Any, Any]]) -> str:
        now = self.optimizer.state[parameter]
        moved = [key for key, (value, _) in before.items() if isinstance(value, torch.Tensor) and now[key] is not value]
        added = now.keys() - before.keys()
        self.optimizer.state[parameter] = {key: _restored(value, copy) for key, (value, copy) in before.items()}
        name = type(self.optimizer).__name__
        if moved:
            return f"{name} puts new tensors into its state ({', '.join(moved)}) at each step"
        return f"{name} adds {', '.join(sorted(added))} to its state" if added else ""


def _restored(value: Any, copy: Any) -> Any:
    if isinstance(value, torch.Tensor) and isinstance(copy, torch.Tensor):
        with torch.no_grad():
            value.copy_(copy)
        return value
    return copy


class ScalerState:
    """The state of a `torch.amp.GradScaler` at one moment; makes its tensors, if it has none yet."""

    def __init__(self, scaler: Any, device: torch.device) -> None:
        self.scaler = scaler
        if scaler.is_enabled():
            scaler.scale(torch.zeros((), device=device))
        self._state = scaler.state_dict()

    def restore(self) -> None:
        """Give it back, in place, also in the middle of a step."""
        if self._state:
            self.scaler.load_state_dict(self._state)
        _private_api.scaler_states(self.scaler).clear()


class RandomState:
    """Where the random numbers of Python, NumPy and PyTorch were, those of a CUDA device included."""

    def __init__(self, device: torch.device, generators: list[Any]) -> None:
        self._device = device
        self._python = random.getstate()
        numpy = sys.modules.get("numpy")
        self._numpy = None if numpy is None else numpy.random.get_state()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._others = [(generator, generator.get_state()) for generator in generators]

    def restore(self) -> None:
        """Go back there."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda, self._device)
        for generator, state in self._others:
            generator.set_state(state)


class StateSnapshot:
    """Copies of what a step changes: parameters, buffers, state of optimizers and scalers, random numbers.

    Until it is dropped it takes as much memory again as all of that: of the device for buffers, else of the host.
    """

    def __init__(self, used: CapturedState, device: torch.device, *, optimizers: bool = True) -> None:
        self._random = RandomState(device, used.generators)
        with torch.no_grad():
            self._tensors = [
                (x, x.data_ptr(), _copy(x) if isinstance(x, torch.nn.Parameter) else x.detach().clone())
                for x in used.tensors()
            ]
        self._optimizers = [OptimizerState(optimizer) for optimizer in (used.optimizers if optimizers else [])]
        self._scalers = [ScalerState(scaler, device) for scaler in used.scalers]

    def restore(self) -> str:
        """Give everything back. Returns why a step cannot be captured yet, or nothing."""
        problem = ""
        with torch.no_grad():
            for tensor, address, copy in self._tensors:
                if tensor.data_ptr() != address:
                    problem = "the step moves parameters or buffers to other memory"
                tensor.copy_(copy)
        for optimizer in self._optimizers:
            problem = optimizer.restore() or problem
        for scaler in self._scalers:
            scaler.restore()
        self._random.restore()
        return problem

    def restore_host(self) -> None:
        """Give back what a capture changes, whose work on the device does not run: where random numbers were."""
        self._random.restore()


def obstacles(optimizer: Any, device: torch.device) -> list[str]:
    """Return what keeps the step of an optimizer out of a graph on `device`, each with its fix; nothing: it can go in.

    Asked are ``capturable=True`` of every group (of SGD, which has no such option, ``fused=True``: only its fused
    kernel reads the learning rate on the device) and a learning rate that is a tensor on the device, since a number
    would be frozen into the graph.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.SGD):
        wrong = ["fused=True"] if not all(group.get("fused") for group in optimizer.param_groups) else []
    elif all("capturable" in group for group in optimizer.param_groups):
        wrong = ["capturable=True"] if not all(group["capturable"] for group in optimizer.param_groups) else []
    else:
        return [
            f"{name} has no option `capturable`, so its step cannot be captured; pass capture_optimizer=False, and it "
            f"runs after each replay"
        ]
    if not all(_reads_on(group["lr"], device) for group in optimizer.param_groups):
        wrong.append(f"lr=torch.tensor({_number(optimizer.param_groups[0]['lr'])}, device={str(device)!r})")
    reasons = []
    if wrong:
        reasons.append(
            f"the step of {name} is not capturable as it is; construct it with {', '.join(wrong)}, or pass "
            f"make_capturable=True to have it changed so, or capture_optimizer=False to run it after each replay"
        )
    if any(_on_other_device(value, device) for state in optimizer.state.values() for value in state.values()):
        reasons.append(
            f"{name} holds state on another device than {device}, made before it was capturable; pass "
            f"make_capturable=True to have it moved"
        )
    return reasons


def scaler_obstacle(optimizer: Any, scaler: Any) -> str:
    """Return why a scaler keeps the optimizer's step out of a graph, or nothing."""
    if scaler is None or not scaler.is_enabled() or _private_api.steps_with_scaler(optimizer):
        return ""
    return (
        f"GradScaler.step waits for the device to see whether a gradient is infinite, except for a fused optimizer; "
        f"construct {type(optimizer).__name__} with fused=True, where it has it, to capture its step too"
    )


def make_capturable(optimizer: Any, device: torch.device) -> None:
    """Change an optimizer in place, so that its step can be captured on `device`.

    Every group gets ``capturable=True`` (SGD: ``fused=True``) and a learning rate that is a float32 tensor on the
    device; schedulers that were made already go on working, since they find it in the group. Its state is moved there.
    """
    sgd = isinstance(optimizer, torch.optim.SGD)
    if not sgd and not all("capturable" in group for group in optimizer.param_groups):
        msg = (
            f"make_capturable: {type(optimizer).__name__} has no option `capturable`. Fix: pass capture_optimizer=False"
        )
        raise InputError(msg)
    for group in [*optimizer.param_groups, optimizer.defaults]:
        if sgd:
            group["fused"], group["foreach"] = True, None
        else:
            group["capturable"] = True
        if not _reads_on(group["lr"], device):
            group["lr"] = torch.tensor(_number(group["lr"]), dtype=torch.float32, device=device)
    if sgd:
        # What the constructor sets for fused=True.
        optimizer._step_supports_amp_scaling = True
        optimizer._need_device_dtype_check_for_fused = True
    for parameter in parameters_of(optimizer):
        state = optimizer.state.get(parameter, {})
        for key, value in state.items():
            if _on_other_device(value, device):
                state[key] = value.to(device)


def hyperparameters(optimizer: Any) -> Iterator[tuple[Any, ...]]:
    """Yield what a graph freezes of each group: the numbers, and the places of tensors."""
    for group in optimizer.param_groups:
        yield tuple([_frozen(value) for key, value in group.items() if key not in _NO_NUMBERS])


def _frozen(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(value) if isinstance(value, list) else value


#: What groups hold besides: schedulers keep the last one for themselves.
_NO_NUMBERS = frozenset({"params", "param_names", "initial_lr"})


def _reads_on(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device == device


def _on_other_device(value: Any, device: torch.device) -> bool:
    return isinstance(value, torch.Tensor) and value.device != device


def _number(value: Any) -> float:
    return float(value)
