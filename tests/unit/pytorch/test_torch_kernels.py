# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Kernels of other packages on tensors of PyTorch: by a policy, by a call, compiled, and refused."""

from __future__ import annotations

import os
import py_compile
import shutil
import subprocess
import sys

import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, PolicyError, UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.ops import plugins

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

import torch_kernels as package  # noqa: E402 - it needs PyTorch

from xpuruntime.ops.torch_kernels import packages_of_kernel  # noqa: E402
from xpuruntime.pytorch.ops import fused_rms_norm  # noqa: E402
from xpuruntime.pytorch.providers.operators import perform  # noqa: E402
from xpuruntime.pytorch.providers.sources import folder_digest  # noqa: E402

F = torch.nn.functional
WORD = "foreign.rms_norm"


@pytest.fixture
def site(tmp_path, monkeypatch):
    """Return a folder on the path that has the package; the kernel is registered."""
    monkeypatch.syspath_prepend(str(tmp_path))
    package.install(tmp_path)
    plugins.register(plugins.KernelBackend("foreign", "cpu", "1"), package.ForeignNorm())
    yield tmp_path
    package.forget()


def strict(word=WORD):
    return xrt.Policy(mode="strict", kernels={"rms_norm": word})


def operands(dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(4, 5, 64, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(64, generator=generator).to(dtype).requires_grad_()
    return x, weight


def norm(x, weight):
    return F.rms_norm(x, (64,), weight, 1e-6)


def by_operator(x, weight):
    return perform("rms_norm", {"x": x, "weight": weight}, {"epsilon": 1e-6, "formula": "torch"})


def with_gradients(function, x, weight):
    out = function(x, weight)
    return out, *torch.autograd.grad(out.square().sum(), (x, weight))


@pytest.mark.parametrize("function", [norm, by_operator, lambda x, w: fused_rms_norm(x, 64, w, 1e-6)])
def test_policy_leads_forward_and_backward_to_it(site, function):
    x, weight = operands()
    expected = with_gradients(norm, x, weight)
    with xt.kernel_policy(strict()), xt.explain() as report:
        results = with_gradients(function, x, weight)
    rows = {row.phase: (row.resolved, row.status, row.source) for row in report.rows if row.op}
    assert rows == dict.fromkeys(("train", "backward"), (WORD, "honoured", "kernels.rms_norm"))
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)


@pytest.mark.parametrize("function", [norm, by_operator])
def test_it_is_one_node_of_a_compiled_graph_that_follows_the_policy(site, function):
    x, weight = operands()
    expected = with_gradients(norm, x, weight)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with xt.kernel_policy(strict()), xt.explain() as report:
        results = with_gradients(compiled, x, weight)
    assert {(row.operator, row.resolved) for row in report.rows if row.op} == {
        ("xpuruntime::rms_norm", WORD), ("xpuruntime::rms_norm_backward", WORD),
    }  # fmt: skip
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
    package.install(site, factor=2.0)
    sys.modules.pop("foreign_norms")
    torch.testing.assert_close(compiled(x, weight), expected[0])  # the policy is gone, and with it the kernel


def test_gradient_can_be_differentiated_again(site):
    x, weight = operands(torch.float64)

    def second():
        (first,) = torch.autograd.grad(by_operator(x, weight).square().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    expected = second()
    with xt.kernel_policy(strict()):
        torch.testing.assert_close(second(), expected, rtol=1e-5, atol=1e-6)


def test_call_names_it(site):
    x, weight = operands()
    torch.testing.assert_close(fused_rms_norm(x, 64, weight, 1e-6, kernel=WORD), norm(x, weight))
    with pytest.raises(UnsupportedOperationError, match="it adds no residual"):
        fused_rms_norm(x, 64, weight, 1e-6, residual=x, kernel=WORD)


def test_it_is_not_imported_before_it_is_named(site):
    x, weight = operands()
    norm(x, weight)
    assert "foreign_norms" not in sys.modules
    with xt.kernel_policy(strict()):
        norm(x, weight)
    assert "foreign_norms" in sys.modules


def test_it_is_listed_with_what_is_missing(site):
    (listed,) = (kernel for kernel in xrt.ops.kernels("rms_norm") if kernel.id == WORD)
    assert (listed.backend, listed.device_type, listed.available, listed.automatic) == ("foreign", "cpu", True, True)
    package.install(site, parts=("norms",))
    (listed,) = (kernel for kernel in xrt.ops.kernels() if kernel.id == WORD)
    assert not listed.available
    assert "foreign-core is not installed; pip install foreign-norms" in listed.reason


def test_sentence_of_its_limits_is_in_the_refusal(site):
    x, _ = operands()
    with xt.kernel_policy(strict()), pytest.raises(UnsupportedOperationError, match="rms_norm: it needs a weight"):
        F.rms_norm(x, (64,))
    with xt.kernel_policy(rms_norm=[WORD, "torch"]):
        torch.testing.assert_close(F.rms_norm(x, (64,)), x / (x.square().mean(-1, keepdim=True) + 1.2e-7).sqrt())


def test_fix_that_it_states_is_the_only_one_of_the_refusal(site, monkeypatch):
    monkeypatch.setattr(
        package.ForeignNorm, "supports", lambda *_: (False, "FOREIGN_OFF is set. Fix: unset FOREIGN_OFF")
    )
    with xt.kernel_policy(strict()), pytest.raises(UnsupportedOperationError) as refused:
        norm(*operands())
    assert str(refused.value).partition("Fix: ")[2] == "unset FOREIGN_OFF"


@pytest.mark.parametrize(
    ("parts", "version", "reason"),
    [
        ((), "1.0", "foreign-norms is not installed; foreign-core is not installed; pip install foreign-norms"),
        (("norms",), "1.0", "foreign-core is not installed"),
        (("norms", "core"), "3.1", "foreign-norms is 3.1, and <3,>=1 is needed"),
    ],
)
def test_missing_and_unfit_distributions_are_refused_with_the_command(site, parts, version, reason):
    package.install(site, version, parts=parts)
    x, weight = operands()
    with pytest.raises(UnsupportedOperationError, match=reason), xt.kernel_policy(strict()):
        pass
    with xt.kernel_policy(rms_norm=WORD), pytest.warns(XpuRuntimeWarning, match=reason):
        norm(x, weight)


def test_distributions_are_named_as_pip_takes_them(site, monkeypatch):
    stated = ("Foreign.NORMS>=1", "foreign_core[fast]>=1", "foreign-other>=1; python_version < '3'")
    monkeypatch.setattr(package.ForeignNorm, "distributions", stated)
    assert packages_of_kernel(WORD) == ("foreign-norms", "foreign-core")
    with xt.kernel_policy(strict()):
        norm(*operands())


@pytest.mark.parametrize(
    ("word", "command"),
    [("liger.rms_norm", "liger"), ("quack.rms_norm", "quack")],
)
def test_providers_that_are_not_installed_name_their_extra(word, command):
    if command == "liger" and _has("liger_kernel"):
        pytest.skip("liger-kernel is installed")
    with pytest.raises(UnsupportedOperationError) as refused, xt.kernel_policy(strict(word)):
        pass
    assert f'pip install "xpuruntime[{command}]"' in str(refused.value)


class _Fault(package.ForeignNorm):
    distributions = ()

    def __init__(self, fault):
        self.fault = fault

    def forward(self, call, x, weight):
        (out,), saved = super().forward(call, x, weight)
        made = {
            "strides": out.transpose(0, 1).contiguous().transpose(0, 1),
            "shape": out[0],
            "dtype": out.double(),
            "count": (out, out),
        }.get(self.fault, out)
        return (made if isinstance(made, tuple) else (made,)), saved

    def backward(self, call, saved, grads):
        if self.fault == "backward":
            raise ValueError("no gradient today")
        return super().backward(call, saved, grads)


@pytest.fixture
def faulty(site, monkeypatch):
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")  # which finds most of these before

    def register(fault):
        package.forget()
        plugins.register(plugins.KernelBackend("foreign", "cpu", "1"), _Fault(fault))

    return register


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("strides", "with strides"), ("shape", "with shape"), ("dtype", "with dtype torch.float64"),
        ("count", "it returned 2 outputs, and there are 1"),
    ],
)  # fmt: skip
def test_results_that_break_the_operation_are_refused(faulty, fault, said):
    faulty(fault)
    x, weight = operands()
    with xt.kernel_policy(strict()), pytest.raises(UnsupportedOperationError, match=said):
        by_operator(x, weight)


def test_error_of_its_gradient_names_the_kernel_and_the_call(faulty):
    faulty("backward")
    x, weight = operands()
    with xt.kernel_policy(strict()), pytest.raises(ValueError, match="no gradient today") as raised:
        norm(x, weight).sum().backward()
    assert any("foreign.rms_norm in the backward of rms_norm" in note for note in raised.value.__notes__)


def test_registered_operator_by_its_module(site):
    x, weight = operands()
    word = "triton:foreign_norms.operator"
    expected = with_gradients(norm, x, weight)
    with xt.kernel_policy(strict(word)), xt.explain() as report:
        results = with_gradients(by_operator, x, weight)
    assert {row.resolved for row in report.rows if row.op} == {word}
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
    with xt.kernel_policy(strict(word)), pytest.raises(UnsupportedOperationError, match="gradient of its norm without"):
        norm(x, weight)
    with xt.kernel_policy(strict("triton:foreign_norms.nothing")), pytest.raises(UnsupportedOperationError) as refused:
        norm(x, weight)
    assert "foreign_norms has no operator nothing" in str(refused.value)


LAYERS = """
import torch


class RMSNorm(torch.nn.Module):
    def forward(self, x):
        wide = x.float()
        normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (normal * self.weight).to(x.dtype)


class Inference(RMSNorm):
    has_backward = False
"""


@pytest.fixture
def repository(tmp_path):
    yield new_repository(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "norms_1"]:
        del sys.modules[name]


def new_repository(folder):
    variant = folder / "norms" / "build" / "torch-universal"
    variant.mkdir(parents=True)
    (variant / "__init__.py").write_text("from . import layers\n")
    (variant / "layers.py").write_text(LAYERS)
    (variant / "metadata.json").write_text(
        '{"id": "norms_1", "name": "norms", "version": 1, "license": "Apache-2.0", "python-depends": [],'
        ' "backend": {"type": "cpu"}}'
    )
    return folder / "norms"


def test_link_to_a_folder_has_no_digest(repository, tmp_path):
    shutil.move(repository / "build", tmp_path / "elsewhere")
    (repository / "build").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=r"build is a link to a folder"):
        folder_digest(repository)


def _same_names_elsewhere(repository, folder):
    return new_repository(folder / "other")


def _other_files_in_its_place(repository, folder):
    (repository / "build" / "torch-universal" / "layers.py").write_text(LAYERS + "# changed\n")
    return repository


@pytest.mark.parametrize("change", [_same_names_elsewhere, _other_files_in_its_place])
def test_layer_whose_modules_are_those_of_other_files_is_refused(repository, tmp_path, change):
    pytest.importorskip("kernels.load", reason='pip install "kernels>=0.17,<0.18"')
    x, weight = operands()
    with xt.kernel_policy(strict(f"hf:{repository}@sha256:{folder_digest(repository)}/RMSNorm")):
        by_operator(x, weight)
    changed = change(repository, tmp_path)
    policy = strict(f"hf:{changed}@sha256:{folder_digest(changed)}/RMSNorm")
    with xt.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match="start another process"):
        by_operator(x, weight)


def test_bytecode_beside_the_files_of_a_layer_is_not_run(repository, tmp_path):
    pytest.importorskip("kernels.load", reason='pip install "kernels>=0.17,<0.18"')
    planted = tmp_path / "planted.py"
    planted.write_text(LAYERS.replace("* self.weight", "* 7"))
    layers = repository / "build" / "torch-universal" / "layers.py"
    py_compile.compile(
        str(planted),
        cfile=str(layers.parent / "__pycache__" / f"layers.{sys.implementation.cache_tag}.pyc"),
        invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
    )
    x, weight = operands()
    expected = norm(x, weight)
    with xt.kernel_policy(strict(f"hf:{repository}@sha256:{folder_digest(repository)}/RMSNorm")):
        torch.testing.assert_close(by_operator(x, weight), expected)


def test_layer_of_a_local_repository_by_the_digest_of_its_files(repository):
    pytest.importorskip("kernels.load", reason='pip install "kernels>=0.17,<0.18"')
    x, weight = operands()
    text = f"hf:{repository}@sha256:{folder_digest(repository)}"
    expected = with_gradients(norm, x, weight)
    with xt.kernel_policy(strict(f"{text}/RMSNorm")), xt.explain() as report:
        results = with_gradients(by_operator, x, weight)
    assert {row.resolved for row in report.rows if row.op} == {f"{text}/RMSNorm"}
    for result, wanted in zip(results, expected, strict=True):
        torch.testing.assert_close(result, wanted)
    with xt.kernel_policy(strict(f"{text}/Inference")):
        with torch.no_grad():
            by_operator(x, weight)
        with pytest.raises(UnsupportedOperationError, match="has_backward = False"):
            by_operator(x, weight)
    (repository / "build" / "torch-universal" / "layers.py").write_text(LAYERS + "# changed\n")
    changed = f"{text}/Other"
    with xt.kernel_policy(strict(changed)), pytest.raises(UnsupportedOperationError, match="and the policy names sha"):
        by_operator(x, weight)


HUB_STEP = """
import sys
import torch
import xpuruntime as xrt
import xpuruntime.pytorch as xt
from xpuruntime.ops.torch_kernels import source_of

word = sys.argv[1]
x, weight = torch.ones(2, 8), torch.ones(8)
try:
    policy = xrt.Policy(mode="strict", kernels={"rms_norm": word})
    with xt.kernel_policy(policy), torch.no_grad(), xt.explain() as found:
        torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
    print([(row.resolved == word, row.reason) for row in found.rows if row.op])
except xrt.UnsupportedOperationError as refused:
    print(refused)
print(source_of(word))
"""


@pytest.mark.parametrize(
    ("bundle", "replaced", "said"),
    [
        (None, False, ("(True, 'unsigned", "{'code': 'commit " + "01" * 20 + "', 'signature': 'unsigned'}")),
        ("{}", False, ("signature of org/norms does not hold: SignatureBundleInvalid", "'unreadable: the signature")),
        (None, True, ("unset LOCAL_KERNELS", "'unreadable: LOCAL_KERNELS puts")),
    ],
)
def test_layer_of_the_hub_says_whether_it_is_signed(repository, tmp_path, bundle, replaced, said):
    pytest.importorskip("kernels.load", reason='pip install "kernels>=0.17,<0.18"')
    commit = "01" * 20
    snapshot = tmp_path / "hub" / "kernels--org--norms" / "snapshots" / commit
    shutil.copytree(repository, snapshot)
    if bundle is not None:
        (snapshot / "build" / "torch-universal" / "metadata.json.sigstore").write_text(bundle)
    variables = {"HF_HUB_OFFLINE": "1", "KERNELS_CACHE": str(tmp_path / "hub"), "XPURUNTIME_CACHE": str(tmp_path)}
    if replaced:
        variables["LOCAL_KERNELS"] = f"org/norms={repository}"
    command = [sys.executable, "-W", "ignore", "-c", HUB_STEP, f"hf:org/norms@{commit}/RMSNorm"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert all(one in " ".join(done.stdout.split()) for one in said), done.stdout + done.stderr


def test_repositories_are_refused_without_their_loader(repository):
    if _has("kernels"):
        pytest.skip("kernels is installed")
    x, weight = operands()
    text = f"hf:{repository}@sha256:{folder_digest(repository)}/RMSNorm"
    with xt.kernel_policy(strict(text)), pytest.raises(UnsupportedOperationError, match='pip install "kernels'):
        by_operator(x, weight)


@pytest.mark.parametrize(
    "word",
    [
        "hf:org/repo/Layer", "hf:org/repo@main/Layer", "hf:org/repo@v1.0/Layer", "hf:org/repo@0123abc/Layer",
        "hf:org/repo@" + "0" * 40, "hf:/folder@sha256:12/Layer", "triton:operator", "triton:", "triton:a..b",
    ],
)  # fmt: skip
def test_sources_that_may_mean_another_kernel_tomorrow_are_refused(word):
    with pytest.raises(PolicyError, match="names no exact kernel"):
        xrt.KernelPolicy(rms_norm=word)


@pytest.mark.parametrize("word", ["triton:foreign_norms.operator", "foreign.rms_norm", "liger.rms_norm"])
def test_they_multiply_nothing(site, word):
    rules = [{"match": {"dtype": "fp32"}, "use": word}]
    policy = xrt.Policy(mode="strict", kernels={"rules": rules})
    with xt.kernel_policy(policy), pytest.raises(UnsupportedOperationError, match="it has no kernel for matmul"):
        torch.mm(torch.ones(2, 3), torch.ones(3, 2))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"id": "other.rms_norm"}, "Fix: foreign.name"), ({"op": "matmul"}, "Fix: state one of attention"),
        ({"families": ("flash_v9",)}, "which rms_norm does not have"), ({}, "registered already"),
    ],
)  # fmt: skip
def test_registration_is_refused(site, change, said):
    kernel = package.ForeignNorm()
    for name, value in change.items():
        setattr(kernel, name, value)
    with pytest.raises(InputError, match=said):
        plugins.register(plugins.KernelBackend("foreign", "cpu", "1"), kernel)


def _has(module):
    from importlib.util import find_spec

    found = find_spec(module)
    return found is not None and found.origin is not None  # a folder of that name is no package
