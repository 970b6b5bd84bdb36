# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Ways to wrap a model and ways to call it, and which module each of its products belongs to by PyTorch alone."""

from __future__ import annotations

import contextlib
import copy
import os
import pickle
from collections import Counter

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from xpuruntime.pytorch.dispatch import context
from xpuruntime.pytorch.dispatch.context import CONTEXT
from xpuruntime.pytorch.dispatch.fast_path import VARIABLE

#: Sizes by which the oracle tells products, and so modules, from each other: the inner size of a layer.
SIZES = {"encoder.layers_module.0.lin": 11, "encoder.layers_module.1.lin": 13, "head": 17}
_PRODUCTS = {"aten::mm", "aten::addmm"}

#: For what has nodes of several threads.
needs_addon = pytest.mark.skipif(
    os.environ.get(VARIABLE) in ("stable", "python"),
    reason="requires the addon: without it PyTorch does not say which thread has recorded a node",
)


class Block(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.lin = torch.nn.Linear(8, inner)
        self.inner = inner

    def forward(self, x):
        return self.lin(x).tanh()[..., :8]


class Encoder(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.layers_module = torch.nn.ModuleList([Block(11), Block(13)])
        self.way = way

    def forward(self, x):
        for layer in self.layers_module:
            x = self.way(layer, x)
        return x


def _twice(layer, x):
    return checkpoint(lambda y: checkpoint(layer, y, use_reentrant=False), x, use_reentrant=False)


#: How the encoder calls its layers.
WAYS = {
    "plain": lambda layer, x: layer(x),
    "checkpoint": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "function": lambda layer, x: checkpoint(lambda y: layer(y) + 0, x, use_reentrant=False),
    "nested": _twice,
}


class Model(torch.nn.Module):
    def __init__(self, way="plain"):
        super().__init__()
        torch.manual_seed(0)
        self.encoder = Encoder(WAYS[way])
        self.head = torch.nn.Linear(8, 17)

    def forward(self, x):
        return self.head(self.encoder(x))

    def generate(self, x):
        return self.head(self.encoder(x))

    def training_step(self, x):
        return self.generate(x).square().sum()


def _copied(model):
    return copy.deepcopy(model)


def _replaced(model):
    model.head = torch.nn.Linear(8, 17, device=model.head.weight.device).requires_grad_()
    return model


def _parametrized(model):
    class Same(torch.nn.Module):
        def forward(self, weight):
            return weight * 1

    torch.nn.utils.parametrize.register_parametrization(model.head, "weight", Same())
    return model


def _normed(model):
    torch.nn.utils.parametrizations.weight_norm(model.head)
    return model


def _inner_wrapped(model):
    model.encoder = checkpoint_wrapper(model.encoder)
    return model


#: Wrappers of the whole model, of a part, and what is done to models.
WRAPS = {
    "bare": lambda model: model,
    "DataParallel": lambda model: torch.nn.DataParallel(model, device_ids=[0]),
    "checkpoint_wrapper": checkpoint_wrapper,
    "checkpoint_wrapper inside": _inner_wrapped,
    "AveragedModel": AveragedModel,
    "two wrappers": lambda model: torch.nn.DataParallel(checkpoint_wrapper(model), device_ids=[0]),
    "deepcopy": _copied,
    "replaced": _replaced,
    "parametrize": _parametrized,
    "weight_norm": _normed,
}


def _model_of(wrapped):
    return next(part for part in wrapped.modules() if isinstance(part, Model))


def _functional(wrapped, x):
    parameters = {name: value.detach().requires_grad_() for name, value in wrapped.named_parameters()}
    return torch.func.functional_call(wrapped, parameters, (x,)).square().sum()


#: How the wrapped model is called; each returns a loss.
CALLS = {
    "call": lambda wrapped, x: wrapped(x).square().sum(),
    "forward": lambda wrapped, x: _model_of(wrapped).forward(x).square().sum(),
    "generate": lambda wrapped, x: _model_of(wrapped).generate(x).square().sum(),
    "training_step": lambda wrapped, x: _model_of(wrapped).training_step(x),
    "parts": lambda wrapped, x: _model_of(wrapped).head(_model_of(wrapped).encoder(x)).square().sum(),
    "functional_call": _functional,
}


class ByPyTorch(TorchDispatchMode):
    """Counts products by the module that they belong to, which their sizes say, without a policy."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        del types
        if func._schema.name in _PRODUCTS:
            self.counts[module_of(*(x for x in args if isinstance(x, torch.Tensor)))] += 1
        return func(*args, **(kwargs or {}))


def module_of(*tensors):
    """Return the layer whose inner size one of the tensors has; those have no size in common with others."""
    sizes = {n for x in tensors for n in tuple(x if isinstance(x, tuple) else x.shape)}
    paths = [path for path, size in SIZES.items() if size in sizes]
    assert len(paths) == 1, sizes
    return paths[0]


def gradients(wrapped, call, device):
    """Return loss and gradients of one step."""
    x = torch.linspace(-1, 1, 24, device=device).reshape(3, 8).requires_grad_()
    wrapped.zero_grad()
    loss = CALLS[call](wrapped, x)
    loss.backward()
    return [loss.detach(), x.grad, *(p.grad for p in wrapped.parameters() if p.grad is not None)]


def made(wrap, way, device):
    return WRAPS[wrap](Model(way).to(device))


class Served(contextlib.ContextDecorator):
    """Notes path, phase, kernel and sizes of each product that a policy decides; a `context.CallObserver`.

    A call that raises is none: its kernel has refused it, and it is made again.
    """

    def __init__(self):
        self.seen = []

    def call(self, name, op, route, run, args, kwargs):
        from xpuruntime.pytorch.call_scope import module_paths

        tensors = tuple(tuple(x.shape) for x in args if isinstance(x, torch.Tensor))
        seen = (module_paths.current(), context.phase(), route.kernel if route else None, tensors)
        result = run(*args, **kwargs)
        self.seen.append(seen)
        return result

    def __enter__(self):
        self._before = CONTEXT.watch(self)
        return self

    def __exit__(self, *_):
        CONTEXT.watch(self._before)


def is_possible(wrap, call):
    """Say whether PyTorch does this; the functional API refuses ``DataParallel``."""
    return not (call == "functional_call" and wrap in ("DataParallel", "two wrappers"))


def check(wrap, way, call, device, kernel):
    """Compare what a policy does with one case with PyTorch without one."""
    wrapped = made(wrap, way, device)
    with ByPyTorch() as oracle:
        expected = gradients(wrapped, call, device)
    pattern = "encoder.layers_module.1.*"
    rules = [{"match": {"op": "matmul", "module": pattern}, "use": kernel}]
    import xpuruntime.pytorch as xt

    with xt.kernel_policy(rules=rules, root=wrapped), Served() as served:
        found = gradients(wrapped, call, device)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert Counter(path for path, *_ in served.seen) == oracle.counts
    for path, phase, used, shapes in served.seen:
        assert path == module_of(*shapes)
        assert used == (kernel if path == "encoder.layers_module.1.lin" else "torch.mm")
        assert phase in ("train", "backward")
    return pickle.loads(pickle.dumps([one.detach().cpu() for one in found]))
