# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Advisories of a file that a variable names: for kernels of other packages, of this library and of PyTorch."""

from __future__ import annotations

import pytest

import xpuruntime as xrt
from xpuruntime.errors import InputError, UnsupportedOperationError, XpuRuntimeWarning
from xpuruntime.ops import plugins
from xpuruntime.policies.advisories import Platform, advisories, holding

torch = pytest.importorskip("torch")
xt = pytest.importorskip("xpuruntime.pytorch")

import torch_kernels as package  # noqa: E402 - it needs PyTorch

ROW = """
advisories:
  - id: foreign-wrong-gradient
    date: 2026-10-01
    op: rms_norm
    kernels: [foreign.rms_norm]
    wrong: its gradient is off
    reference: https://tracker/7
    gradient: true
    packages: {foreign-norms: "<1.5"}
"""


@pytest.fixture
def site(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    package.install(tmp_path)
    plugins.register(plugins.KernelBackend("foreign", "cpu", "1"), package.ForeignNorm())
    (tmp_path / "advisories.yaml").write_text(ROW)
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(tmp_path / "advisories.yaml"))
    yield tmp_path
    package.forget()


def norm(*, gradient):
    with torch.set_grad_enabled(gradient):
        return torch.nn.functional.rms_norm(torch.ones(2, 8, requires_grad=gradient), (8,), torch.ones(8))


@pytest.mark.usefixtures("site")
def test_named_kernel_is_refused_or_passed_over_where_it_is_wrong():
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rms_norm": "foreign.rms_norm"})):
        with pytest.raises(UnsupportedOperationError, match=r"its gradient is off \(https://tracker/7, 2026-10-01\)"):
            norm(gradient=True)
        norm(gradient=False)
    with xt.kernel_policy(rms_norm="foreign.rms_norm"), pytest.warns(XpuRuntimeWarning, match="its gradient is off"):
        norm(gradient=True)


def test_version_without_the_error_serves(site):
    package.install(site, "1.5")
    with xt.kernel_policy(xrt.Policy(mode="strict", kernels={"rms_norm": "foreign.rms_norm"})), xt.explain() as report:
        norm(gradient=True)
    assert {row.resolved for row in report.rows if row.op} == {"foreign.rms_norm"}


def test_kernel_of_pytorch_is_left_by_auto(tmp_path, monkeypatch):
    file = tmp_path / "rows.yaml"
    file.write_text(
        "advisories: [{id: cpu-flash, kernels: [torch.flash], wrong: it is off, reference: https://tracker/8,"
        " archs: [cpu]}]\n"
    )
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(file))
    q = torch.ones(1, 2, 8, 16)
    with xt.kernel_policy(attention="auto"), xt.explain() as report:
        torch.nn.functional.scaled_dot_product_attention(q, q, q)
    assert not {row.resolved for row in report.rows if row.op == "attention"} & {"torch.flash", "torch.sdpa"}
    assert "cpu-flash" in {row.id for row in holding(Platform((2, 13), (), "cpu"))}
    assert "cpu-flash" not in {row.id for row in holding(Platform((2, 13), (), "sm90"))}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rows: []", "KeyError"), ("advisories: [{id: a}]", "a has no kernels"), ("advisories: 1", "Expected `array`"),
        (ROW.replace("gradient:", "gradeint:"), "unknown gradeint"), (ROW.replace('"<1.5"', '"1.5?"'), "1.5"),
    ],
)  # fmt: skip
def test_file_that_is_none_is_refused_with_a_fix(tmp_path, monkeypatch, text, said):
    (tmp_path / "rows.yaml").write_text(text)
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(tmp_path / "rows.yaml"))
    with pytest.raises(InputError, match=f"{said}.*Fix: write"):
        advisories()
    monkeypatch.setenv("XPURUNTIME_ADVISORIES", str(tmp_path / "missing.yaml"))
    with pytest.raises(InputError, match="FileNotFoundError"):
        advisories()


def test_every_advisory_of_this_release_has_an_id_and_a_place_to_read():
    assert len({row.id for row in advisories()}) == len(advisories())
    assert all(row.id and row.reference.startswith("https://") for row in advisories())
