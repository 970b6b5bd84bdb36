# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The launcher with servers of a few lines, which answer with and without evidence. Needs neither vLLM nor SGLang."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("xpuruntime_vllm", reason="pip install ./packages/xpuruntime-vllm")

from xpuruntime_vllm import launch, sglang, worker
from xpuruntime_vllm.settings import read_policy

from xpuruntime.errors import EngineError, InputError, PolicyError

if TYPE_CHECKING:
    from pathlib import Path

#: Answers at a port after it has written evidence, as workers do, until there is a lock.
_SERVER = """
import http.server, json, os, pathlib, signal, sys, threading, time
port, workers, written, kernel = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4]
from xpuruntime_vllm.worker import evidence_of, publish
settings = json.loads(os.environ["XPURUNTIME_VLLM_SETTINGS"])
row = dict(module="decode", op="attention", method="-", scheme="-", kernel=kernel, weights="-", status="selected")
facts = {"execution.cuda_graph": "NONE"}
(pathlib.Path(sys.argv[5] + ".pid")).write_text(str(os.getpid()))
if workers == 0:
    os.kill(os.getppid(), signal.SIGTERM)
for rank in written:
    publish(evidence_of(settings, [row], facts, dict(rank=rank, workers=workers, model="m", config="-")), ready=True)
def end():
    while not os.path.exists(sys.argv[5]):
        time.sleep(0.02)
    os._exit(0)
threading.Thread(target=end).start()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
POLICY = {"mode": "strict", "execution": {"engine": "sglang"}, "kernels": {"attention": "sglang.triton"}}


def serve(tmp_path: Path, *, workers: int = 1, written: tuple[int, ...] = (0,), kernel: str = "triton",
          options: tuple[str, ...] = ()) -> tuple[int, Path]:  # fmt: skip
    script, policy, lock = (tmp_path / name for name in ("server.py", "policy.json", "lock"))
    script.write_text(_SERVER, encoding="utf-8")
    policy.write_text(json.dumps(POLICY), encoding="utf-8")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [sys.executable, str(script), port, str(workers), json.dumps(written), kernel, str(lock)]

    def read(path: str) -> Any:
        return read_policy(path, "sglang", sglang._apply)

    rest = ["--policy", str(policy), "-o", str(lock), f"--port={port}", *options]
    return launch.served("m", rest, read, lambda *_: command, "30000"), lock


def test_a_server_whose_workers_gave_evidence_goes_on(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, lock = serve(tmp_path, workers=2, written=(0, 1))
    assert code == 0
    assert "the policy holds in 2 workers" in capfd.readouterr().err
    assert json.loads(lock.read_text(encoding="utf-8"))["rows"][0]["kernel"] == "triton"


@pytest.mark.parametrize(
    ("workers", "written", "missing"), [(1, (), "0 of 1"), (2, (0,), "1 of 2"), (2, (1,), "0 of 2")]
)
def test_a_worker_without_evidence_ends_the_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], workers: int, written: tuple[int, ...], missing: str
) -> None:
    code, lock = serve(tmp_path, workers=workers, written=written)
    assert code == 3
    assert f"worker {missing} gave no evidence" in capfd.readouterr().err
    assert not lock.exists()


def test_another_kernel_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, _ = serve(tmp_path, kernel="flashinfer")
    assert code == 1
    assert "sglang does not do what the policy requests" in capfd.readouterr().err


@pytest.mark.parametrize("option", ["--uds=/tmp/x", "--config", "--ssl-keyfile"])
def test_options_that_hide_the_server_are_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], option: str
) -> None:
    code, _ = serve(tmp_path, options=(option,))
    assert code == 2
    assert f"with {option} the launcher does not see" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "address"),
    [
        ([], "http://127.0.0.1:30000"),
        (["--port", "7"], "http://127.0.0.1:7"),
        (["--port=7", "--host=::"], "http://[::1]:7"),
        (["--host", "0.0.0.0"], "http://127.0.0.1:30000"),
        (["--host", "10.0.0.1"], "http://10.0.0.1:30000"),
    ],
)
def test_where_a_server_answers(options: list[str], address: str) -> None:
    assert launch._address(options, "30000") == address


def test_a_signal_to_the_launcher_ends_the_server(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended:
        serve(tmp_path, workers=0, written=())
    assert ended.value.code == 143
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "lock.pid").read_text(encoding="utf-8")), 0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_ends_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: Any) -> int:
        raise KeyboardInterrupt

    assert launch._told("m", ["--policy", "policy.yaml"], interrupted) == 130
    assert capfd.readouterr().err == ""


def test_a_list_of_plugins_is_given_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = read_policy(POLICY, "sglang", sglang._apply)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    assert "SGLANG_PLUGINS" not in launch.environment_of(settings, str(tmp_path), None)
    monkeypatch.setenv("SGLANG_PLUGINS", "other, more")
    assert launch.environment_of(settings, str(tmp_path), None)["SGLANG_PLUGINS"] == "other,more,xpuruntime"
    with pytest.raises(InputError, match="is not found"):
        launch.environment_of(settings, str(tmp_path), tmp_path / "absent")


class TestSglang:
    """What SGLang's hooks do with a model runner. SGLang itself needs a GPU."""

    def test_a_policy_as_options(self) -> None:
        execution = {
            "engine": "sglang", "device": "cuda:0", "precision": "bf16", "cuda_graph": "require",
            "determinism": "batch_invariant", "provider_options": {"sglang": {"fp8_gemm_backend": "triton"}},
        }  # fmt: skip
        kernels = {"attention": "sglang.fa3", "grouped_matmul": "sglang.triton"}
        settings = read_policy({**POLICY, "execution": execution, "kernels": kernels}, "sglang", sglang._apply)
        assert sorted(launch.options_of(settings)) == sorted([
            "--device", "cuda", "--dtype", "bfloat16", "--cuda-graph-backend-decode", "full",
            "--enable-deterministic-inference", "--fp8-gemm-backend", "triton", "--attention-backend", "fa3",
            "--moe-runner-backend", "triton",
        ])  # fmt: skip
        assert len(settings.requested) == 7
        with pytest.raises(PolicyError, match=r"kernels\.matmul: 'sglang.triton' has no counterpart in sglang"):
            read_policy({**POLICY, "kernels": {"matmul": "sglang.triton"}}, "sglang", sglang._apply)
        with pytest.raises(PolicyError, match="the policy is for engine"):
            read_policy(POLICY)

    @pytest.fixture
    def runner(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
        torch = pytest.importorskip("torch")
        names = ("sglang", "sglang.srt", "sglang.srt.runtime_context", "sglang.srt.batch_invariant_ops")
        modules = {name: ModuleType(name) for name in names}
        modules[names[2]].get_parallel = lambda: SimpleNamespace(dp_rank=None)  # type: ignore[attr-defined]
        modules[names[3]].is_batch_invariant_mode_enabled = lambda: False  # type: ignore[attr-defined]
        for name, module in modules.items():
            monkeypatch.setitem(sys.modules, name, module)
        model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[0].quant_method = object()
        model[1].quant_method = SimpleNamespace(runner=SimpleNamespace(runner_backend=SimpleNamespace(value="triton")))
        model[1].w13_weight = model[1].weight
        monkeypatch.setenv(worker.EVIDENCE, str(tmp_path))
        return SimpleNamespace(
            is_draft_worker=False, model=model, attn_backend=object(), prefill_attention_backend_str="fa3",
            decode_attention_backend_str="fa3", device="cuda", decode_cuda_graph_captured=True, server_args=object(),
            model_config=SimpleNamespace(dtype=torch.bfloat16, model_path="m"),
        )  # fmt: skip

    def hooked(
        self, runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **policy: Any
    ) -> list[dict[str, Any]]:
        settings = read_policy({"mode": "strict", **policy}, "sglang", sglang._apply)
        added = launch.environment_of(settings, str(tmp_path), None)
        monkeypatch.setenv(worker.SETTINGS, added[worker.SETTINGS])
        sglang._selected(None, runner)
        with pytest.raises(EngineError, match="worker 0 of 1 gave no evidence"):
            launch.evidence_in(str(tmp_path), "sglang")
        sglang._ready(None, runner, capture_decode_cuda_graph=True)
        return launch.evidence_in(str(tmp_path), "sglang")

    def test_what_was_selected_is_read_back(self, runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        execution = {"engine": "sglang", "device": "cuda:1", "precision": "bf16", "cuda_graph": "require"}
        kernels = {"attention": "sglang.fa3", "grouped_matmul": "sglang.triton"}
        [evidence] = self.hooked(runner, tmp_path, monkeypatch, execution=execution, kernels=kernels)
        assert {claim["key"]: claim["status"] for claim in evidence["claims"]} == {
            "execution.device": "honoured", "execution.precision": "honoured", "execution.cuda_graph": "honoured",
            "kernels.attention": "selected", "kernels.grouped_matmul": "selected",
        }  # fmt: skip
        assert [row["op"] for row in evidence["rows"]] == ["matmul", "grouped_matmul", "attention", "attention"]
        assert worker.drift(evidence, evidence) == []

    @pytest.mark.parametrize(
        ("changed", "told"),
        [
            ({"decode_attention_backend_str": "triton"}, "fa3 was requested, triton in 1 of 2 layers, such as decode"),
            ({"decode_cuda_graph_captured": False}, "captured was requested, NONE was read back"),
            ({"device": "cpu"}, "cuda was requested, cpu was read back"),
        ],
    )
    def test_what_is_another_is_refused(
        self, runner: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], told: str
    ) -> None:
        vars(runner).update(changed)
        execution = {"engine": "sglang", "device": "cuda", "cuda_graph": "require"}
        with pytest.raises(PolicyError, match=told):
            self.hooked(runner, tmp_path, monkeypatch, execution=execution, kernels={"attention": "sglang.fa3"})
