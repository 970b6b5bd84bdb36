# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A policy under PyTorch's modes, transforms and processes: it holds, or what bypasses it is named."""

from __future__ import annotations

import multiprocessing
import subprocess
import sys
import warnings

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
]

REFERENCE = {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"matmul": "cpu.reference"}}


@pytest.fixture(autouse=True)
def _policy():
    xt.set_kernel_policy(REFERENCE)
    xrt.clear_decisions()
    torch.manual_seed(0)
    yield
    xt.clear_kernel_policy()


def served() -> int:
    """How many products our kernel did. Nothing else may have."""
    decisions = xrt.decisions()
    assert {decision.chosen for decision in decisions} <= {"cpu.reference"}
    xrt.clear_decisions()
    return sum(decision.count for decision in decisions)


def plainly(run, *args):
    """The result without a policy."""
    with xt.kernel_policy():
        return run(*args)


@pytest.mark.parametrize("name", ["vmap", "grad", "jvp", "jacrev", "jacfwd", "hessian", "vmap_of_grad", "functional"])
def test_transforms(name):
    from torch import func

    w, x = torch.randn(4, 3), torch.randn(5, 4)

    def loss(w, x):
        return torch.tanh(x @ w).square().sum()

    runs = {
        "vmap": lambda: func.vmap(lambda a: a[None] @ w)(x),
        "grad": lambda: func.grad(loss)(w, x),
        "jvp": lambda: func.jvp(lambda w: x @ w, (w,), (torch.ones_like(w),)),
        "jacrev": lambda: func.jacrev(lambda w: x @ w)(w),
        "jacfwd": lambda: func.jacfwd(lambda w: x @ w)(w),
        "hessian": lambda: func.hessian(loss)(w, x[:2]),
        "vmap_of_grad": lambda: func.vmap(func.grad(loss), in_dims=(None, 0))(w, x[:, None]),
        "functional": lambda: func.functional_call(torch.nn.Linear(4, 3, bias=False), {"weight": w.t()}, (x,)),
    }
    found = runs[name]()
    assert served() > 0
    torch.testing.assert_close(found, plainly(runs[name]))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_computes_again_by_the_same_kernels(reentrant):
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    checkpoint(lambda x: layer(x).relu(), x, use_reentrant=reentrant).sum().backward()
    assert served() == 4  # forward, again, and the two of backward


def test_autocast():
    layer = torch.nn.Linear(4, 3)
    x = torch.randn(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = layer(x)
    found.sum().backward()
    assert found.dtype == torch.bfloat16
    assert layer.weight.grad.dtype == torch.float32
    assert {decision.dtype for decision in xrt.decisions()} == {"bf16"}
    assert served() == 2


def test_tensors_without_data():
    from torch._subclasses import FakeTensorMode

    assert torch.mm(torch.empty(2, 3, device="meta"), torch.empty(3, 4, device="meta")).shape == (2, 4)
    with FakeTensorMode():
        assert torch.addmm(torch.empty(4), torch.empty(2, 3), torch.empty(3, 4)).shape == (2, 4)
    assert served() == 0  # there is nothing to multiply


def test_subclasses_of_tensor():
    class Mine(torch.Tensor):
        pass

    a = torch.randn(2, 3).as_subclass(Mine)
    found = torch.mm(a, torch.randn(3, 2))
    assert type(found) is Mine
    assert served() == 1


def test_dispatch_modes_see_what_they_saw():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            self.ops = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.ops.append(str(func))
            return func(*args, **(kwargs or {}))

    layer, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    with Seen() as ours:
        layer(x)
    assert served() == 1
    with xt.kernel_policy(), Seen() as native:
        layer(x)
    assert ours.ops == native.ops


def test_traced_and_exported_programs_run_by_it():
    layer, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    expected = plainly(layer, x)
    exported = torch.export.export(layer, (x,))
    assert [str(node.target) for node in exported.graph.nodes if node.op == "call_function"] == ["aten.linear.default"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(layer, (x,))
    xrt.clear_decisions()
    torch.testing.assert_close(exported.module()(x), expected)
    torch.testing.assert_close(traced(x), expected)
    assert served() == 2


class Products(torch.utils.data.Dataset):
    """Each item is a product, and the kernels that did it in the worker's process."""

    def __len__(self):
        return 2

    def __getitem__(self, index):
        xrt.clear_decisions()
        product = torch.full((2, 2), float(index)) @ torch.ones(2, 2)
        return (
            product.sum().item(),
            [decision.chosen for decision in xrt.decisions()],
            xt.get_kernel_policy() is not None,
        )


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="there is no fork here")
def test_forked_workers_of_a_dataloader_inherit_it():
    torch.ones(2, 2) @ torch.ones(2, 2)
    loader = torch.utils.data.DataLoader(
        Products(), batch_size=None, num_workers=1, multiprocessing_context="fork", timeout=60
    )
    assert list(loader) == [[0.0, ["cpu.reference"], True], [8.0, ["cpu.reference"], True]]


SPAWNED = """
import torch, xpuruntime as xrt, xpuruntime.pytorch as xt
from torch.utils.data import DataLoader, Dataset
class Products(Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        torch.ones(2, 2) @ torch.ones(2, 2)
        return [one.chosen for one in xrt.decisions()], xt.get_kernel_policy() is not None
def again(worker):
    xt.set_kernel_policy(matmul="cpu.reference")
if __name__ == "__main__":
    xt.set_kernel_policy(matmul="cpu.reference")
    for begin in (None, again):
        loader = DataLoader(Products(), batch_size=None, num_workers=1, multiprocessing_context="spawn",
                            worker_init_fn=begin)
        print(*loader)
"""


@pytest.mark.slow
def test_spawned_workers_begin_without_one(tmp_path):
    """A process of its own has no policy until it sets one, such as in ``worker_init_fn``."""
    script = tmp_path / "spawned.py"
    script.write_text(SPAWNED)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout.splitlines() == ["[[], False]", "[['cpu.reference'], True]"], done.stderr


DISTRIBUTED = """
import sys, torch, torch.distributed as dist, xpuruntime as xrt, xpuruntime.pytorch as xt
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
policy = {"schema": "xpuruntime.policy/1", "mode": "strict", "kernels": {"matmul": "cpu.reference"}}
rows = torch.arange(24.0).reshape(2, 3, 4)
def train(wrap):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    wrapped = wrap(model)
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
    for _ in range(2):
        optimizer.zero_grad()
        wrapped(rows[rank]).square().sum().backward()
        optimizer.step()
    return [p.full_tensor() if hasattr(p, "full_tensor") else p.detach() for p in wrapped.parameters()]
def shard(model):
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=torch.distributed.init_device_mesh("cpu", (2,)))
    return model
for wrap in (DistributedDataParallel, shard):
    expected = train(wrap)
    xt.set_kernel_policy(policy)
    found = train(wrap)
    xt.clear_kernel_policy()
    torch.testing.assert_close(found, expected)
    print({one.chosen for one in xrt.decisions()}, sum(one.count for one in xrt.decisions()))
    xrt.clear_decisions()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_data_parallel_and_fully_sharded_training_over_gloo(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(DISTRIBUTED)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        out, errors = rank.communicate(timeout=240)
        assert out.splitlines() == ["{'cpu.reference'} 10"] * 2, errors
