# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`execution.weights`: how linear layers store their weights and in which type they compute, two claims."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import xpuruntime as xrt

torch = pytest.importorskip("torch")

import xpuruntime.pytorch as xt  # noqa: E402 - it needs PyTorch
from xpuruntime.pytorch.weights import few_rows  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def policy(mode: str = "strict", **weights: Any) -> xrt.Policy:
    return xrt.Policy(mode=mode, execution={"weights": weights})


def layers(count: int = 14) -> Any:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(32, 32) for _ in range(count))).to(torch.bfloat16).eval()


def run(model: Any, stated: xrt.Policy) -> Any:
    with torch.no_grad(), xt.kernel_policy(stated, root=model), xt.explain(root=model) as report:
        model(torch.ones(4, 32, dtype=torch.bfloat16))
    return report


@pytest.fixture
def torchao() -> Any:
    return pytest.importorskip("torchao.quantization", reason="needs torchao: pip install torchao")


@pytest.mark.parametrize("compute", ["float", "int8"])
def test_int8_is_stored_and_computes_as_claimed(torchao: Any, compute: str) -> None:
    model = xt.quantize(layers(), policy(storage="int8", compute=compute))
    found = run(model, policy(storage="int8", compute=compute))
    assert {(weight.storage, weight.bits, weight.compute) for weight in found.weights} == {("int8", 8.0, compute)}
    assert len(found.weights) == 14
    assert all(isinstance(weight, xt.LinearWeights) for weight in found.weights)
    assert found.require(no_bypass=False).weight_deviations == ()


@pytest.mark.parametrize(("storage", "compute"), [("int8", "float"), ("int8", "int8"), ("fp8", "float")])
def test_settings_of_torch_compile_stay(torchao: Any, storage: str, compute: str) -> None:
    """They are those of the whole process, and torchao sets some, such as a search that takes minutes."""
    settings = pytest.importorskip("torch._inductor.config")
    before = settings.save_config_portable(), torch.get_float32_matmul_precision()
    xt.quantize(layers(2), policy(storage=storage, compute=compute))
    assert (settings.save_config_portable(), torch.get_float32_matmul_precision()) == before


def test_on_a_cpu_no_time_proves_what_was_read(torchao: Any) -> None:
    found = run(xt.quantize(layers(2), policy(storage="int8", compute="int8")), policy(storage="int8"))
    assert isinstance(found.weight_traffic, xt.WeightTraffic)
    assert found.weight_traffic.verdict == "unobservable"
    assert run(layers(2), xrt.Policy()).weight_traffic is None


def test_integers_that_are_converted_do_not_compute_in_int8(torchao: Any) -> None:
    model = xt.quantize(layers(2), policy(storage="int8"))
    found = run(model, policy(storage="int8", compute="int8"))
    (wrong,) = found.weight_deviations
    assert wrong == "execution.weights.compute is int8, and 2 of 2 linear layers differ: 0 (float), 1 (float)"
    with pytest.raises(xrt.UnsupportedOperationError, match=r"weights\.compute is int8"):
        found.require(no_bypass=False)


def test_one_of_fourteen_layers_in_bf16_fails(torchao: Any) -> None:
    stated = policy(storage="int8", compute="int8")
    model, plain = layers(), copy.deepcopy(layers()[5])
    xt.quantize(model, stated)[5] = plain
    with pytest.raises(xrt.UnsupportedOperationError, match=r"1 of 14 linear layers differ: 5 \(bf16 of 16 bits\)"):
        run(model, stated)
    with pytest.warns(xrt.XpuRuntimeWarning, match="1 of 14"):
        found = run(model, policy("prefer", storage="int8", compute="int8"))
    assert ["storage" in found.weight_deviations[0], "compute" in found.weight_deviations[1]] == [True, True]
    kept = policy(storage="int8", compute="int8", exclude=["5"])
    assert run(model, kept).weight_deviations == ()
    some = policy(storage="int8", exclude=["1"])
    assert [weight.storage for weight in run(xt.quantize(layers(3), some), some).weights] == ["int8", "bf16", "int8"]


class Experts(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
    """Products of a parameter of its own, as experts have and `Conv1D` of GPT-2."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.gate_up = torch.nn.Parameter(torch.ones(*shape, dtype=torch.bfloat16))

    def forward(self, x: Any) -> Any:
        return x @ self.gate_up.reshape(-1, 32, 32)[0]


@pytest.mark.parametrize("shape", [(32, 32), (4, 32, 32)])
def test_matrices_outside_of_linear_layers_are_not_passed_over(torchao: Any, shape: tuple[int, ...]) -> None:
    stated, kept = policy(storage="int8"), policy(storage="int8", exclude=["*.gate_up"])
    with pytest.raises(xrt.UnsupportedOperationError, match=r"keep floats: 2\.gate_up\. Fix: .*\['\*\.gate_up'\]"):
        xt.quantize(layers(2).append(Experts(*shape)), stated)
    model = xt.quantize(layers(2), stated).append(Experts(*shape)).eval()
    with pytest.raises(xrt.UnsupportedOperationError, match=r"1 of 3 linear layers differ: 2\.gate_up \(bf16 of 16"):
        run(model, stated)
    assert [weight.compute for weight in run(model, kept).weights] == ["float"] * 3


def test_the_exclusion_that_is_told_for_a_matrix_of_the_model_itself_holds(torchao: Any) -> None:
    model = Experts(32, 32)
    model.up = torch.nn.Linear(32, 32, dtype=torch.bfloat16)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"keep floats: gate_up\. Fix: .*\['gate_up'\]"):
        xt.quantize(model, policy(storage="int8"))
    xt.quantize(model, policy(storage="int8", exclude=["gate_up"]))


@pytest.mark.parametrize("more", [torch.nn.Embedding(3, 32), torch.nn.LSTM(32, 32), torch.nn.Conv2d(2, 2, 2)])
def test_other_layers_of_pytorch_are_not_claimed(torchao: Any, more: Any) -> None:
    stated = policy(storage="int8")
    model = torch.nn.ModuleList([xt.quantize(layers(1), stated), more]).eval()
    with xt.kernel_policy(stated, root=model):
        pass


def test_what_would_not_be_quantized_is_refused(torchao: Any) -> None:
    with pytest.raises(xrt.InputError, match=r"exclude has 'lm_haed', which is the name of no linear layer.*Fix: "):
        xt.quantize(layers(2), policy(storage="int8", exclude=["lm_haed"]))
    with pytest.raises(xrt.InputError, match=r"no layer of .* to quantize"):
        xt.quantize(layers(2), policy(storage="int8", exclude=["*"]))
    for storage, group in (("int8", 32), ("fp8", 128), ("nvfp4", 32)):
        with pytest.raises(xrt.InputError, match=rf"group is {group}, and {storage} has none such. Fix: leave group"):
            xt.quantize(layers(2), policy(storage=storage, group=group))
    xt.quantize(layers(2), policy(storage="nvfp4", group=16))
    model = xt.quantize(layers(2), policy(storage="int8"))
    with pytest.raises(xrt.InputError, match="0 is quantized already, as int8"):
        xt.quantize(model, policy(storage="fp8"))
    with pytest.raises(xrt.UnsupportedOperationError, match="'lm_haed', which is the name of no linear layer"):
        run(model, policy(storage="int8", exclude=["lm_haed"]))
    assert run(model, policy(storage="int8")).weight_deviations == ()


def test_weights_that_change_in_the_first_forward_are_refused(torchao: Any) -> None:
    stated = policy(storage="int8")
    model = xt.quantize(layers(2), stated)
    with (
        pytest.raises(xrt.UnsupportedOperationError, match=r"1 of 2 .* 0 \(bf16"),
        xt.kernel_policy(stated, root=model),
    ):
        model[0] = layers(1)[0]


def _swap_layer(model: Any) -> None:
    mine, model[1] = model[1], layers(1)[0]
    model(torch.ones(4, 32, dtype=torch.bfloat16))
    model[1] = mine


def _swap_weight(model: Any) -> None:
    mine, model[1].weight = model[1].weight, layers(1)[0].weight
    model(torch.ones(4, 32, dtype=torch.bfloat16))
    model[1].weight = mine


@pytest.mark.parametrize("swap", [_swap_layer, _swap_weight])
def test_weights_that_are_in_a_model_for_a_while_are_told(torchao: Any, swap: Callable[[Any], None]) -> None:
    stated, prefer = policy(storage="int8"), policy("prefer", storage="int8")
    model = xt.quantize(layers(2), stated)
    what = r"storage is int8, and 1 of 1 linear layers differ: 1, for a while \(bf16 of 16 bits\)"
    with torch.no_grad():
        with pytest.raises(xrt.UnsupportedOperationError, match=what), xt.kernel_policy(stated, root=model):
            swap(model)
        told = pytest.warns(xrt.XpuRuntimeWarning, match=what)
        with told, xt.kernel_policy(prefer, root=model), xt.explain(root=model) as report:
            swap(model)
        assert len(report.weight_deviations) == 1
        kept = policy(storage="int8", exclude=["1"])
        with xt.kernel_policy(kept, root=model):
            swap(model)
    assert run(model, stated).weight_deviations == (), "nothing is left of the blocks before"


def test_types_are_told_apart_by_stored_bytes(torchao: Any) -> None:
    granularity = pytest.importorskip("torchao.quantization.granularity")
    int4 = layers(1)
    torchao.quantize_(int4, torchao.IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=granularity.PerGroup(32)))
    with pytest.warns(xrt.XpuRuntimeWarning):
        (found,) = run(int4, policy("prefer", storage="int4", group=16)).weights
    assert (found.storage, found.bits, found.group, found.compute) == ("int4", 8.0, 32, "float")
    fp8 = xt.quantize(layers(1), policy(storage="fp8"))
    (one,) = run(fp8, policy(storage="fp8", compute="float")).weights
    assert (one.storage, one.bits, one.compute) == ("fp8", 8.0, "float")
    nvfp4 = xt.quantize(layers(1), policy(storage="nvfp4"))
    (one,) = run(nvfp4, policy(storage="nvfp4", compute="float")).weights
    assert (one.storage, one.bits, one.compute) == ("nvfp4", 4.0, "float")


@pytest.mark.parametrize(
    "weights", [{"storage": "fp8", "compute": "fp8"}, {"storage": "nvfp4", "compute": "fp4"}, {"storage": "int4"}]
)
def test_it_is_refused_where_the_device_lacks_the_units(weights: dict[str, str]) -> None:
    with pytest.raises(xrt.UnsupportedOperationError, match=r"need a CUDA device .* the CPU has none"):
        xt.quantize(layers(1), policy(**weights))
    with pytest.raises(xrt.UnsupportedOperationError, match="the CPU has none"):
        run(layers(1), policy(**weights))


def test_plain_models() -> None:
    found = run(layers(2), xrt.Policy())
    assert [(weight.storage, weight.compute, weight.operators) for weight in found.weights] == [
        ("bf16", "float", ("aten::addmm",))
    ] * 2
    with (
        pytest.raises(xrt.UnsupportedOperationError, match="no model is given"),
        xt.kernel_policy(policy(storage="int8")),
    ):
        pass
    with pytest.raises(xrt.InputError, match="states no execution"):
        xt.quantize(layers(1), xrt.Policy())


@pytest.mark.parametrize(
    ("weights", "match"),
    [
        ({"storage": "int8", "compute": "fp8"}, "does not go with storage int8. Fix: state float or int8"),
        ({"compute": "int8"}, "storage is not stated"),
        ({"storage": "int9"}, "did you mean"),
    ],
)
def test_claims_that_make_no_sense(weights: dict[str, str], match: str) -> None:
    with pytest.raises(xrt.PolicyError, match=match):
        policy(**weights)


def test_sessions_compare_it_with_the_graph(tmp_path: Path) -> None:
    from xpuruntime.testing import models

    path = models.save(models.mlp(), tmp_path)
    with pytest.raises(xrt.XpuRuntimeError, match=r"weights\.storage.*products differ"):
        xrt.InferenceSession(path, policy=policy(storage="int8"), device="cpu")


def test_integer_products_of_few_rows_are_not_captured(torchao: Any) -> None:
    def few(rows: int, device: str = "cuda", **stated: str) -> str:
        model = xt.quantize(layers(2), policy(**stated))
        return few_rows(model, rows, torch.device(device))

    assert few(16, storage="int8", compute="int8") == (
        "weights of int8 that compute in int8 need 17 rows or more on CUDA devices; fp8 that computes in fp8 does not"
    )
    assert few(17, storage="int8", compute="int8") == few(1, "cpu", storage="int8", compute="int8") == ""
    assert few(1, storage="int8") == few(1, storage="fp8") == ""


def test_nothing_is_printed_where_torchao_is_imported_without_a_cuda_device() -> None:
    pytest.importorskip("torchao")
    code = """
import logging
from xpuruntime.pytorch.weights import quiet_torchao
with quiet_torchao():
    import torchao
    logging.getLogger("torchao").warning("another message")
logging.getLogger("torchao").warning("Failed to load x.so: afterwards")
"""
    ran = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr.splitlines() == ["another message", "Failed to load x.so: afterwards"]
