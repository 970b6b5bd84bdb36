# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Something else is made to run than was asked, on each engine: ``xrt explain`` exits with 1 and begins with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from exported_models import example, exported

import xpuruntime as xrt_package

Xrt = Any


def explain(xrt: Xrt, model: Any, *options: Any) -> dict[str, str]:
    """Run ``xrt explain``: exit code 1, the headline first. Return key to status."""
    shown = xrt("explain", model, *options)
    result = xrt("explain", model, *options, "--json")
    report = result.json()
    assert (shown.code, result.code) == (1, 1), shown.out + shown.err
    assert shown.out.splitlines()[0].startswith(report["headline"])
    assert report["headline"].endswith(("deviation", "deviations"))
    assert report["honoured"] is False
    return {observation["key"]: observation["status"] for observation in report["observations"]}


def deviating(statuses: dict[str, str]) -> set[str]:
    return {key for key, status in statuses.items() if status in ("substituted", "unsupported")}


def policy(folder: Path, **content: Any) -> Path:
    path = folder / "policy.json"
    path.write_text(json.dumps(content))
    return path


class TestOnnxRuntime:
    def test_fp16_asked_and_fp32_run(self, xrt: Xrt, digits: str) -> None:
        report = explain(xrt, digits, "-e", "onnxruntime", "-d", "cpu", "--precision", "fp16")
        assert deviating(report) == {"execution.precision"}
        assert report["execution.precision"] == "substituted"

    def test_an_entry_that_only_another_provider_reads(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        """ONNX Runtime takes it without a word, and would read it back."""
        options = {"onnxruntime": {"ep.cuda.enable_gemm_auto_tune": 1}}
        given = policy(tmp_path, execution={"device": "cpu", "engine": "onnxruntime", "provider_options": options})
        key = "execution.provider_options.onnxruntime.ep.cuda.enable_gemm_auto_tune"
        assert deviating(explain(xrt, digits, "-p", given)) == {key}

    def test_an_entry_that_never_reached_the_session(
        self, xrt: Xrt, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from xpuruntime.engines.onnxruntime import loading

        real = loading.session_options
        monkeypatch.setattr(loading, "session_options", lambda s, *more, **options: real(_without(s), *more, **options))
        options = {"onnxruntime": {"session.disable_prepacking": 1}}
        given = policy(tmp_path, execution={"device": "cpu", "engine": "onnxruntime", "provider_options": options})
        report = explain(xrt, digits, "-p", given)
        assert report["execution.provider_options.onnxruntime.session.disable_prepacking"] == "substituted"


def _without(settings: Any) -> Any:
    return msgspec.structs.replace(settings, session={})


class TestOpenVino:
    @pytest.fixture(autouse=True)
    def _needed(self) -> None:
        pytest.importorskip("openvino")

    def test_an_option_that_the_plugin_cuts_down(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        options = {"openvino": {"NUM_STREAMS": 4096}}
        given = policy(tmp_path, execution={"device": "cpu", "engine": "openvino", "provider_options": options})
        report = explain(xrt, digits, "-p", given)
        assert report["execution.provider_options.openvino.NUM_STREAMS"] == "substituted"

    def test_more_threads_than_cores(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        given = policy(tmp_path, execution={"device": "cpu", "engine": "openvino", "threads": 4096})
        assert deviating(explain(xrt, digits, "-p", given)) == {"execution.threads"}

    def test_a_layout_of_its_own(self, xrt: Xrt, digits: str, tmp_path: Path) -> None:
        given = policy(tmp_path, execution={"device": "cpu", "engine": "openvino", "layout": "nchw"})
        assert deviating(explain(xrt, digits, "-p", given)) == {"execution.layout"}

    def test_a_precision_hint_that_the_plugin_does_not_take(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The plan is made for a processor with fp16 arithmetic: loading refuses, and past that the units tell."""
        import openvino as ov

        from xpuruntime.engines.openvino import loading
        from xpuruntime.engines.registry import default_registry
        from xpuruntime.runtime.snapshot import machine_snapshot

        computes_in = ov.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")
        if "FP16" in computes_in:
            pytest.skip("this processor computes in fp16")
        hint, taken = ("bf16", "bf16") if "BF16" in computes_in else ("f32", "fp32")
        here = machine_snapshot()
        cpu = msgspec.structs.replace(here.cpu, features=(*here.cpu.features, "avx512f", "avx512_fp16", "amx_fp16"))
        engines = {"openvino": default_registry().get("openvino").probe()}
        machine = msgspec.structs.replace(here, cpu=cpu, engines=engines)
        asked: dict[str, Any] = {"device": "cpu", "engine": "openvino", "precision": "fp16", "machine": machine}
        advice = pytest.warns(xrt_package.XpuRuntimeWarning, match="fp16 is advisory")
        refused = f"f16 was requested, and OpenVINO chose {hint}"
        with advice, pytest.raises(xrt_package.UnsupportedOperationError, match=refused):
            xrt_package.InferenceSession(exported("convnet"), **asked)
        monkeypatch.setattr(loading._Opener, "_verify", lambda *_: None)
        with pytest.warns(xrt_package.XpuRuntimeWarning, match="fp16 is advisory"):
            session = xrt_package.InferenceSession(exported("convnet"), **asked)
        with session:
            report = session.explain(example("convnet"), runs=1)
        assert (report.honoured, report.headline) == (False, "1 deviation")
        assert [o.key for o in report.deviations] == ["execution.precision"]
        assert report.deviations[0].observed.startswith(f"{taken} (")
        assert any(unit.status == "substituted" for unit in report.units)


class TestNull:
    def test_what_it_cannot_do(self, xrt: Xrt, digits: str) -> None:
        report = explain(xrt, digits, "-e", "null", "-d", "cpu", "--precision", "fp16")
        assert deviating(report) == {"execution.precision"}


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a program with one attention in it."""
    torch = pytest.importorskip("torch")

    class Net(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return torch.nn.functional.scaled_dot_product_attention(x, x, x) + 1

    path = tmp_path_factory.mktemp("torch") / "net.pt2"
    torch.export.save(torch.export.export(Net().eval(), (torch.zeros(1, 2, 8, 16),)), path)
    return path


@pytest.mark.torch
class TestTorch:
    @pytest.fixture
    def pinned(self, tmp_path: Path) -> Path:
        return policy(tmp_path, execution={"engine": "torch", "device": "cpu"}, kernels={"attention": "torch.math"})

    def test_as_asked(self, xrt: Xrt, program: Path, pinned: Path) -> None:
        result = xrt("explain", program, "-p", pinned, "--json")
        assert result.code == 0, result.out
        assert {o["key"]: o["status"] for o in result.json()["observations"]}["kernels.attention"] == "honoured"

    def test_another_kernel_was_put_in_place(
        self, xrt: Xrt, program: Path, pinned: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from xpuruntime.engines.torch import pinning

        real = pinning.placed_rules
        other = xrt_package.KernelPolicy(attention="cpu.reference")
        monkeypatch.setattr(pinning, "placed_rules", lambda _, nodes: real(other, nodes))
        found = explain(xrt, program, "-p", pinned)
        assert deviating(found) == {"kernels.attention"}
        report = xrt("explain", program, "-p", pinned, "--json").json()
        seen = next(o for o in report["observations"] if o["key"] == "kernels.attention")
        assert (seen["observed"], seen["status"]) == ("cpu.reference (1 operator)", "substituted")
        assert "ran cpu.reference, and the policy asks for torch.math" in seen["reason"]

    def test_the_dispatcher_chose_another_kernel(
        self, xrt: Xrt, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The session routes calls to one kernel of ours, and the core serves them by another."""
        from xpuruntime.pytorch.dispatch import compiled_policy

        real = compiled_policy.place_for
        monkeypatch.setattr(
            compiled_policy, "place_for", lambda p, op, words, *more, **o: real(p, op, ("null.null",), *more, **o)
        )
        execution = {"engine": "torch", "device": "cpu"}
        given = policy(tmp_path, execution=execution, kernels={"attention": "cpu.reference"})
        report = explain(xrt, program, "-p", given)
        assert report["kernels.attention"] == "substituted"

    def test_another_attention_than_the_one_that_was_pinned(
        self, xrt: Xrt, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """PyTorch's switches are changed between the session's own setting of them and the call."""
        import torch

        from xpuruntime.pytorch.attention import sdpa_backends
        from xpuruntime.pytorch.dispatch.overrides import attention

        given = policy(tmp_path, execution={"engine": "torch", "device": "cpu"}, kernels={"attention": ["torch.flash"]})
        assert xrt("explain", program, "-p", given).code == 0

        real = sdpa_backends.by_backend

        @contextmanager
        def changed_behind(kernel: str, **options: bool) -> Iterator[None]:
            with real(kernel, **options):
                torch.backends.cuda.enable_flash_sdp(False)
                torch.backends.cuda.enable_math_sdp(True)
                yield
                torch.backends.cuda.enable_flash_sdp(True)
                torch.backends.cuda.enable_math_sdp(False)

        monkeypatch.setattr(attention, "by_backend", changed_behind)
        assert deviating(explain(xrt, program, "-p", given)) == {"kernels.attention"}
        shown = xrt("explain", program, "-p", given)
        report = xrt("explain", program, "-p", given, "--json").json()
        seen = next(o for o in report["observations"] if o["key"] == "kernels.attention")
        assert seen["observed"] == "torch.math (1 operator)"
        assert "was to run torch.flash, and PyTorch ran aten::_scaled_dot_product_attention_math" in seen["reason"]
        (decision,) = report["decisions"]
        assert decision["asked"] == ["torch.flash"]
        assert (decision["chosen"], decision["source"]) == ("torch.math", "fallback")
        assert decision["notes"][0].startswith("torch.flash was called for, and PyTorch ran")
        assert "xpuruntime kernels, in the instrumented pass" in shown.out

    @pytest.mark.parametrize("precision", ["fp16", "bf16"])
    def test_a_program_that_was_not_converted(
        self, program: Path, precision: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A type was asked for, and its operators ran in fp32."""
        from xpuruntime.engines.torch.observing import instrumented_run as stepping

        monkeypatch.setattr(stepping, "_inside", lambda _, tensors: list(tensors))
        asked: dict[str, Any] = {"device": "cpu", "engine": "torch", "precision": precision}
        with xrt_package.InferenceSession(program, **asked) as session:
            report = session.explain({"x": np.zeros((1, 2, 8, 16), np.float32)}, runs=1)
        assert [o.key for o in report.deviations] == ["execution.precision"]
