# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Training locks of kernels of other packages: they hold for the versions, the code and the variables they ran with."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import LockError
from xpuruntime.ops import plugins, torch_kernels

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

import torch_kernels as package  # noqa: E402 - it needs PyTorch

from xpuruntime.pytorch.providers.operators import perform  # noqa: E402

WORD = "foreign.rms_norm"


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package.install(tmp_path)
    plugins.register(plugins.KernelBackend("foreign", "cpu", "1"), package.ForeignNorm())
    yield tmp_path
    package.forget()


def norm():
    with torch.no_grad():
        return perform("rms_norm", {"x": torch.ones(2, 8), "weight": torch.ones(8)}, {"epsilon": 1e-6})


def locked(path, word=WORD):
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rms_norm": word})), xt.explain() as report:
        norm()
    return xt.lock(report, path)


def test_lock_has_the_distributions_and_replays_the_kernel(site, tmp_path):
    made = locked(tmp_path / "step.lock")
    packages = {
        validator.key: validator.expect for validator in made.identity.validators if validator.kind == "package"
    }
    assert {packages[f"foreign-{part}"]["version"] for part in ("norms", "core")} == {"1.0"}
    assert packages["foreign-norms"]["record"].startswith("sha256 ")
    with xt.kernel_policy(lock=tmp_path / "step.lock"), xt.explain() as report:
        norm()
    assert {row.resolved for row in report.rows if row.op} == {WORD}


def test_lock_has_the_adapter_and_what_its_kernel_was_compared_by(site, tmp_path, monkeypatch):
    made = locked(tmp_path / "step.lock")
    facts = {validator.kind: validator.expect for validator in made.identity.validators if validator.key == WORD}
    assert facts["adapter"]["class"] == "torch_kernels.ForeignNorm"
    assert facts["adapter"]["code"].startswith("sha256 ")
    assert facts["canary"]["result"] == "passed"
    monkeypatch.setenv("XPURUNTIME_CANARY", "off")
    with pytest.raises(LockError, match="not compared"), xt.kernel_policy(lock=tmp_path / "step.lock"):
        norm()
    monkeypatch.delenv("XPURUNTIME_CANARY")
    monkeypatch.setattr(torch_kernels, "module_digest", lambda name: f"sha256 of another {name}")
    with pytest.raises(LockError) as broken, xt.kernel_policy(lock=tmp_path / "step.lock"):
        norm()
    assert {drift.code for drift in broken.value.drifts} == {"adapter", "canary"}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda site: package.install(site, "2.0"), "foreign-norms.*version 1.0.*version 2.0"),
        (lambda site: package.install(site, factor=2.0), "foreign-norms.*record"),
        (lambda site: package.install(site, parts=("norms",)), "foreign-core"),
    ],
)
def test_another_version_or_build_of_a_distribution_breaks_it(site, tmp_path, change, said):
    locked(tmp_path / "step.lock")
    change(site)
    with pytest.raises(LockError) as broken, xt.kernel_policy(lock=tmp_path / "step.lock"):
        norm()
    assert "pip install foreign-" in str(broken.value)
    assert __import__("re").search(said, str(broken.value).replace("\n", " "))


def test_variable_of_the_kernel_breaks_it(site, tmp_path, monkeypatch):
    locked(tmp_path / "step.lock")
    monkeypatch.setenv("FOREIGN_MODE", "fast")
    with pytest.raises(LockError, match="FOREIGN_MODE"), xt.kernel_policy(lock=tmp_path / "step.lock"):
        norm()


def test_code_of_the_adapter_breaks_it(site, tmp_path):
    locked(tmp_path / "step.lock")
    package.forget()

    class Other(package.ForeignNorm):
        description = "another adapter"

    plugins.register(plugins.KernelBackend("foreign", "cpu", "1"), Other())
    with pytest.raises(LockError, match="foreign"), xt.kernel_policy(lock=tmp_path / "step.lock"):
        norm()


def test_module_of_a_named_operator_breaks_it(site, tmp_path):
    locked(tmp_path / "step.lock", "triton:foreign_norms.operator")
    with xt.kernel_policy(lock=tmp_path / "step.lock"):
        norm()
    package.install(site, factor=3.0)
    with pytest.raises(LockError, match="triton:foreign_norms"), xt.kernel_policy(lock=tmp_path / "step.lock"):
        norm()
