# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`capture_graph` without CUDA: what it refuses, what it finds in a function, and what it does eagerly instead."""

from __future__ import annotations

import functools
import warnings

import pytest

torch = pytest.importorskip("torch")

import xpuruntime.pytorch as xrt_torch  # noqa: E402 - needs torch
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning  # noqa: E402
from xpuruntime.pytorch.capture.captured_state import (  # noqa: E402
    captured_state_of,
    make_capturable,
    obstacles,
    scaler_obstacle,
)
from xpuruntime.pytorch.capture.step_program import (  # noqa: E402
    forget_accumulators,
    leave_torch_graph,
    patch_torch_graph,
)

without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA; the GPU tests cover it")
CPU = torch.device("cpu")
GLOBAL_NET = torch.nn.Linear(2, 2)


def make():
    torch.manual_seed(0)
    net = torch.nn.Linear(3, 1)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def loss_of(net):
    return lambda x: net(x).square().mean()


@without_cuda
def test_on_the_cpu_the_step_runs_eagerly_and_says_so():
    theirs, their_optimizer = make()
    net, optimizer = make()
    x = torch.ones(4, 3)
    with pytest.warns(XpuRuntimeWarning, match="the CPU has no CUDA graphs") as caught:
        step = xrt_torch.capture_graph(loss_of(net), (x,), optimizer=optimizer)
    assert len(caught) == 1
    assert net.weight.equal(theirs.weight), "making a step trained"
    for _ in range(3):
        their_optimizer.zero_grad()
        wanted = theirs(x).square().mean()
        wanted.backward()
        their_optimizer.step()
        assert step(x).item() == wanted.item()
    assert net.weight.equal(theirs.weight)
    assert step.reasons == ("the CPU has no CUDA graphs",)
    assert not step.prepare(x)
    report = step.report
    assert (report.captured, report.whole_step, report.eager_calls, report.optimizer) == (False, False, 3, "eager")
    assert str(report).startswith("step on cpu: eager; optimizer eager, scaler none; 0 captured, 0 replayed, 3 eager")
    assert step.graphs == ()
    assert step.static_inputs is None
    step.reset()


def test_inputs_of_a_model_on_several_devices_are_left_where_they_are():
    net = torch.nn.Sequential(torch.nn.Linear(3, 1))
    net.elsewhere = torch.nn.Parameter(torch.ones(1, device="meta"))  # parameters() begins with it
    net.forward = net[0].forward
    with pytest.warns(XpuRuntimeWarning, match="parameters and buffers are on meta and cpu"):
        step = xrt_torch.capture_graph(loss_of(net), optimizer=torch.optim.SGD(net[0].parameters(), lr=0.1))
    assert step(torch.ones(4, 3)).device == CPU
    assert step.report.eager_calls == 1


@without_cuda
def test_on_the_cpu_strict_raises():
    net, optimizer = make()
    with pytest.raises(UnsupportedOperationError, match="the CPU has no CUDA graphs, and strict=True"):
        xrt_torch.capture_graph(loss_of(net), optimizer=optimizer, strict=True)


@without_cuda
def test_on_the_cpu_a_block_runs_eagerly_after_a_warning():
    layer = torch.nn.Linear(2, 1)
    warned = pytest.warns(XpuRuntimeWarning, match=r"no CUDA device.*the block runs eagerly")
    with warned, xrt_torch.autocast(fp16=False), xrt_torch.capture_graph() as graph:
        layer(torch.ones(1, 2)).sum().backward()
    assert layer.weight.grad is not None
    with pytest.raises(UnsupportedOperationError, match=r"cannot be run again. Fix: write it as a function"):
        graph.replay()
    with pytest.raises(InputError, match="nothing was captured"):
        graph.pool()


@without_cuda
def test_on_the_cpu_a_strict_block_is_refused_before_it_runs():
    ran = []
    with pytest.raises(UnsupportedOperationError, match="no CUDA device"), xrt_torch.capture_graph(strict=True):
        ran.append(1)
    assert ran == []


def test_replay_of_nothing():
    block = xrt_torch.capture_graph()
    for call in (block.replay, block.pool):
        with pytest.raises(InputError, match="nothing was captured"):
            call()
    block.reset()


@pytest.mark.parametrize("arguments", [{"warmup_iters": 5}, {"warmup_iters": 0}])
def test_warmup_of_a_block(arguments):
    with pytest.raises(InputError, match=r"means nothing for a block.*run its work"):
        xrt_torch.capture_graph(**arguments)


def test_a_number_in_the_place_of_the_function_is_the_warmup_of_a_block():
    assert type(xrt_torch.capture_graph(3)).__name__ == "GraphBlock"
    with pytest.raises(InputError, match="warmup_iters=5"):
        xrt_torch.capture_graph(5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "optimizer is a str, not a torch"),
        ({"scaler": 1}, "scaler is a int, not a torch"),
        ({"scaler": torch.amp.GradScaler("cpu")}, "scaler needs optimizer="),
        ({"before_step": print}, "before_step needs optimizer="),
        ({"make_capturable": True}, "make_capturable needs optimizer="),
        ({"warmup": 0}, "warmup=0 would capture work that runs for the first time"),
        ({"max_graphs": 0}, "max_graphs=0 keeps no graph"),
        ({"warmup_iters": 5, "warmup": 4}, "warmup=4 and warmup_iters=5 contradict"),
        ({"warmup_iters": 0}, "warmup=0 would capture work that runs for the first time"),
        ({"modules": ["net"]}, "modules holds a str"),
    ],
)
def test_arguments_that_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        xrt_torch.capture_graph(lambda x: x, **options)


def test_more_arguments_that_are_refused():
    net, optimizer = make()
    with pytest.raises(InputError, match="contradict each other"):
        xrt_torch.capture_graph(loss_of(net), optimizer=optimizer, make_capturable=True, capture_optimizer=False)
    with pytest.raises(InputError, match="fn is a Tensor"):
        xrt_torch.capture_graph(torch.ones(1))
    with pytest.raises(InputError, match="without fn a with block is captured"):
        xrt_torch.capture_graph(optimizer=optimizer)


def test_a_model_that_is_not_found():
    net, optimizer = make()
    hidden = {"get": iter([net])}

    def fn(x):
        return next(hidden["get"])(x).mean()

    with pytest.raises(InputError, match=r"2 parameters of the optimizer belong to no module.*modules=\[model\]"):
        xrt_torch.capture_graph(fn, optimizer=optimizer)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XpuRuntimeWarning)
        step = xrt_torch.capture_graph(fn, optimizer=optimizer, modules=[net])
    step(torch.ones(1, 3))


def test_nodes_that_add_up_gradients_are_made_anew():
    net, _ = make()
    edge = torch.autograd.graph.get_gradient_edge
    loss = net(torch.ones(2, 3)).sum()
    kept = [edge(p).node for p in net.parameters()]
    assert [edge(p).node for p in net.parameters()] == kept, "nothing is tested"
    places, seen = [p.data_ptr() for p in net.parameters()], []
    net.weight.register_hook(lambda gradient: seen.append(1))
    forget_accumulators(net.parameters())
    assert all(edge(p).node is not old for p, old in zip(net.parameters(), kept, strict=True))
    assert [p.data_ptr() for p in net.parameters()] == places
    assert all(p.requires_grad and p.is_leaf and p.dtype is torch.float32 for p in net.parameters())
    net(torch.ones(2, 3)).sum().backward()
    once = net.weight.grad.clone()
    loss.backward()
    assert torch.equal(net.weight.grad, 2 * once), "what was recorded before adds to the same gradients"
    assert seen == [1, 1], "hooks stay"


def test_plain_captures_are_helped_while_somebody_asks():
    original = torch.cuda.graph.__enter__
    patch_torch_graph()
    patch_torch_graph()
    assert torch.cuda.graph.__enter__ is not original
    leave_torch_graph()
    assert torch.cuda.graph.__enter__.__wrapped__ is original
    leave_torch_graph()
    assert torch.cuda.graph.__enter__ is original


class Trainer:
    def __init__(self) -> None:
        self.parts = {"net": torch.nn.Linear(2, 2), "more": [torch.nn.Linear(2, 2)]}
        self.optimizer = torch.optim.SGD(self.parts["net"].parameters(), lr=0.1)
        self.scaler = torch.amp.GradScaler("cpu")
        self.generator = torch.Generator()

    def step(self, x):
        return self.parts["net"](x)

    def __call__(self, x):
        return self.step(x)


def uses_global(x):
    return inner(x)


def inner(x):
    return [GLOBAL_NET(row) for row in x]


def test_what_is_found_in_functions():
    net = torch.nn.Sequential(torch.nn.Linear(2, 2))

    def closes_over(x):
        def deeper(y):
            return net(y)

        return deeper(x)

    def by_default(x, net=net):
        return net(x)

    for fn in (closes_over, by_default, functools.partial(lambda n, x: n(x), net), net, net.forward, lambda x: net(x)):
        assert captured_state_of(fn).modules == [net]
    assert captured_state_of(uses_global).modules == [GLOBAL_NET]
    assert captured_state_of(torch.compile(closes_over, backend="eager")).modules == [net]
    wrapped = captured_state_of(xrt_torch.autocast("bf16")(closes_over))
    assert wrapped.modules == [net]
    assert [type(module).__name__ for module in wrapped.all_modules()] == ["Sequential", "Linear"]
    trainer = Trainer()
    for fn in (trainer, trainer.step, lambda x: trainer.step(x)):
        used = captured_state_of(fn)
        assert used.modules == [trainer.parts["net"], trainer.parts["more"][0]]
        assert used.optimizers == [trainer.optimizer]
        assert used.scalers == [trainer.scaler]
        assert used.generators == [trainer.generator]
        assert used.unexplained() == 0
        assert len(used.parameters()) == 4


CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("make_optimizer", "message"),
    [
        (
            lambda p: torch.optim.Adam(p),
            r"Adam is not capturable as it is; construct it with capturable=True, lr=torch",
        ),
        (
            lambda p: torch.optim.AdamW(p, capturable=True),
            r"construct it with lr=torch\.tensor\(0\.001, device='cuda:0'",
        ),
        (
            lambda p: torch.optim.AdamW(p, capturable=True, lr=torch.tensor(0.5)),
            r"lr=torch\.tensor\(0\.5, device='cuda",
        ),
        (
            lambda p: torch.optim.SGD(p, lr=0.1),
            r"SGD is not capturable as it is; construct it with fused=True, lr=torch",
        ),
        (lambda p: torch.optim.Adagrad(p), "Adagrad has no option `capturable`.*capture_optimizer=False"),
        (lambda p: torch.optim.LBFGS(p), "LBFGS has no option `capturable`"),
    ],
)
def test_optimizers_whose_step_cannot_be_captured(make_optimizer, message):
    net, _ = make()
    found = obstacles(make_optimizer(net.parameters()), CUDA)
    assert len(found) == 1
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(found[0])


@pytest.mark.parametrize(
    "made",
    [
        lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=True),
    ],
)
def test_making_an_optimizer_capturable(made):
    net, _ = make()
    twin = torch.nn.Linear(3, 1)
    twin.load_state_dict(net.state_dict())
    optimizer, eager = made(net.parameters()), made(twin.parameters())
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.5) for o in (optimizer, eager)]
    for changes in (False, True):
        if changes:
            make_capturable(optimizer, CPU)
        for _ in range(2):
            for net_, optimizer_, scheduler in zip((net, twin), (optimizer, eager), schedulers, strict=True):
                optimizer_.zero_grad()
                net_(torch.ones(2, 3)).square().mean().backward()
                optimizer_.step()
                scheduler.step()
    torch.testing.assert_close(net.weight, twin.weight)
    assert obstacles(optimizer, CPU) == []
    assert optimizer.param_groups[0]["lr"].item() == pytest.approx(0.1 / 16)
    assert optimizer._step_supports_amp_scaling
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    assert obstacles(optimizer, CPU) == [], "a group that comes later is not"


def test_making_another_optimizer_capturable_is_refused():
    net, _ = make()
    with pytest.raises(InputError, match="Adagrad has no option `capturable`"):
        make_capturable(torch.optim.Adagrad(net.parameters()), CPU)


def test_state_that_was_made_before():
    net, optimizer = make()
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.param_groups[0].update(capturable=True, lr=torch.tensor(0.1, device="meta"))
    found = obstacles(optimizer, torch.device("meta"))
    assert len(found) == 1
    assert "holds state on another device than meta" in found[0]


def test_scalers_that_wait_for_the_device():
    net, _ = make()
    scaler = torch.amp.GradScaler("cpu")
    assert "construct Adam with fused=True" in scaler_obstacle(torch.optim.Adam(net.parameters()), scaler)
    assert scaler_obstacle(torch.optim.Adam(net.parameters(), fused=True), scaler) == ""
    assert scaler_obstacle(torch.optim.Adam(net.parameters()), torch.amp.GradScaler("cpu", enabled=False)) == ""
    assert scaler_obstacle(torch.optim.Adam(net.parameters()), None) == ""
