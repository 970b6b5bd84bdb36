# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Commands on a folder of ONNX Runtime GenAI: what is generated, timed, planned, observed and locked."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from generation_folders import write_folder

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: make engines")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("decoder") / "llm", level=4)


def test_run_generates(xrt: Any, folder: Path) -> None:
    by_text = xrt("run", folder, "--prompt", "To be", "--new-tokens", 6, "--json").json()
    assert (len(by_text["tokens"]), by_text["finish"], by_text["probe_inputs"]) == (6, "length", [])
    assert 0 < by_text["first_token_us"] <= by_text["total_us"]
    ids = "tokens=[[84, 111, 32, 98, 101]]"
    by_ids = xrt("run", folder, "--input", ids, "--new-tokens", 6, "--json").json()
    assert (by_ids["tokens"], by_ids["text"]) == (by_text["tokens"], None)
    shown = xrt("run", folder, "--prompt", "To be", "--new-tokens", 6)
    assert (shown.code, "probe inputs" in shown.err) == (0, False)
    assert f"tokens: {', '.join(map(str, by_ids['tokens']))}" in shown.out
    logits = xrt("run", folder, "--input", ids, "--json").json()["outputs"]["logits"]
    assert logits["shape"] == [1, 5, 258]


def test_bench_times_the_first_token_and_those_after_it(xrt: Any, folder: Path) -> None:
    result = xrt("bench", folder, "-n", 3, "--warmup", 1, "--new-tokens", 4, "--json").json()
    assert (result["prompt_tokens"], result["new_tokens"], result["warmup"]) == (8, 4, 1)
    assert {name: len(samples) for name, samples in result["samples_us"].items()} == {
        "first token": 3,
        "token after it": 3,
    }
    assert result["tokens_per_second"] > 0
    alone = xrt("bench", folder, "-n", 1, "--warmup", 0, "--new-tokens", 1)
    assert alone.code == 0
    assert "tokens/s" not in alone.out  # there is no token after the first


def test_plan_explain_lock_and_verify(xrt: Any, folder: Path, tmp_path: Path) -> None:
    assert xrt("plan", folder, "--json").json()["engine"] == "onnxruntime-genai"
    report = xrt("explain", folder, "--dim", "length=5", "--json").json()
    assert {unit["phase"] for unit in report["units"]} == {"prefill", "decode"}
    lock = tmp_path / "llm.lock"
    assert xrt("lock", folder, "-o", lock).code == 0
    assert xrt("lock", folder, "-o", lock, "--check").code == 0
    assert xrt("verify", folder, "--lock", lock, "--only", "evidence").code == 0
    assert xrt("run", folder, "--lock", lock, "--new-tokens", 2).code == 0
    export = xrt("export", lock, "--to", "oci-layout", "-o", tmp_path / "image", "--model", folder)
    assert "is a folder, and an export holds a model of one file" in " ".join(export.err.split())
    assert not (tmp_path / "image").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("run", "FOLDER", "--prompt", "x"), "state --new-tokens N"),
        (("run", "FOLDER", "--prompt", "x", "--new-tokens", 2, "--input", "tokens=[[1]]"), "leave one of them out"),
        (("run", "FOLDER", "--prompt", "", "--new-tokens", 2), "the prompt is empty"),
        (("run", "FOLDER", "--new-tokens", 2, "-o", "x.npz"), "--output writes arrays"),
        (("run", "FOLDER", "--new-tokens", 0), "--new-tokens"),
        (("run", "FOLDER", "--input", "tokens=[[999]]", "--new-tokens", 2), "not in the vocabulary"),
        (("bench", "FOLDER", "--new-tokens", 1000, "-n", 1), "do not fit the context"),
        (("run", "MODEL", "--new-tokens", 2), "generates no tokens"),
        (("bench", "MODEL", "--prompt", "x"), "generates no tokens"),
    ],
)
def test_wrong_options_are_refused(xrt: Any, folder: Path, digits: str, arguments: tuple[Any, ...], said: str) -> None:
    names = {"FOLDER": folder, "MODEL": digits}
    result = xrt(*(names.get(argument, argument) for argument in arguments))
    assert result.code == 2, result.err
    assert said in " ".join(result.err.split())
