# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GenerationSession` on OpenVINO GenAI: tokens of the graph, what cannot be observed, refusals, locks."""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from generation_folders import END, VOCABULARY

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("openvino_genai", reason="needs openvino-genai: make engines")
pytest.importorskip("openvino_tokenizers", reason="needs openvino-tokenizers: make engines")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]  # an incomplete one ends the import
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

PROMPT = [1, 2, 3, 4]
NAME = "openvino-genai"


def policy(**options: Any) -> dict[str, Any]:
    return {"mode": "strict", "execution": {"engine": NAME, "device": "cpu", "provider_options": {NAME: options}}}


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder. Not to be changed."""
    from openvino_folders import write_openvino_folder

    return write_openvino_folder(tmp_path_factory.mktemp("openvino") / "model")


@pytest.fixture(scope="module", params=["PA", "SDPA"])
def session(request: Any, written: Path) -> Any:
    with xrt.GenerationSession(written, policy(ATTENTION_BACKEND=request.param)) as opened:
        yield opened


def test_signals_arrive_after_a_pipeline_has_gone(written: Path):
    with xrt.GenerationSession(written, policy()) as opened:
        assert len(opened.logprobs([*PROMPT, *opened.generate(PROMPT, 2)])) == len(PROMPT) + 1
    del opened
    gc.collect()
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        time.sleep(1)


def test_tokens_are_those_of_the_graph(session: Any):
    result = session.generate(PROMPT, 8)
    tokens = [*PROMPT, *result]
    rows = session.logprobs(tokens, prefill=len(PROMPT))
    assert rows.shape == (len(tokens) - 1, VOCABULARY)
    assert rows[len(PROMPT) - 1 :].argmax(axis=1).tolist() == list(result)
    np.testing.assert_allclose(rows, session.logprobs(tokens), atol=1e-4)
    logits = session.session.run({"tokens": np.array([PROMPT])})["logits"]
    assert logits[0].argmax(axis=1).tolist() == rows[: len(PROMPT)].argmax(axis=1).tolist()
    assert 0 < result.first_token_us <= result.total_us


def test_prompts_seeds_and_text(session: Any):
    prompts: list[Any] = [PROMPT, [5], "hello", list(range(20))]
    together = session.generate(prompts, 6)
    assert [one.tokens for one in together] == [session.generate(prompt, 6).tokens for prompt in prompts]
    drawn = {"temperature": 0.9, "top_k": 20, "seed": 3}
    assert session.generate(PROMPT, 8, **drawn).tokens == session.generate(PROMPT, 8, **drawn).tokens
    assert session.encode("hi") == [104, 105]
    assert session.decode([104, 105]) == "hi"


def test_a_token_that_ends_the_text(written: Path, copy_of: Callable[[Path], Path], session: Any):
    first = session.generate(PROMPT, 6).tokens
    other = copy_of(written)
    (other / "generation_config.json").write_text(json.dumps({"eos_token_id": [END, first[1]]}))
    with xrt.GenerationSession(other) as ending:
        found = ending.generate(PROMPT, 6)
        assert (found.tokens, found.finish) == (first[:2], "stop")


def test_what_a_pipeline_does_not_tell_is_unobservable(session: Any):
    report = session.explain(PROMPT, runs=2)
    statuses = {observation.key: observation.status for observation in report.observations}
    assert statuses["execution.engine"] == "honoured"
    for key in ("execution.device", "execution.precision", f"execution.provider_options.{NAME}.ATTENTION_BACKEND"):
        assert statuses[key] == "unobservable"
    assert report.partial
    assert any("greedy tokens are those of the graph" in note for note in report.notes), report.notes


def test_what_a_pipeline_does_not_do_is_refused(session: Any):
    with pytest.raises(xrt.UnsupportedOperationError, match=r"no single steps.*Fix: use generate"):
        list(session.stream(PROMPT, 3))
    with pytest.raises(xrt.InputError, match=r"Fix: read session\.logprobs"):
        session.generate(PROMPT, 3, logprobs=True)
    with pytest.raises(xrt.InputError, match="no seed"):
        session.generate([PROMPT, [1]], 3, temperature=1.0, seed=1)


@pytest.mark.parametrize(
    ("execution", "said"),
    [
        ({"provider_options": {NAME: {"ATTENTION_BACKEND": "FLASH"}}}, "'FLASH' is not one of 'PA', 'SDPA'"),
        ({"provider_options": {NAME: {"nonsense": 1}}}, "unknown option 'nonsense'"),
        ({"precision": "fp16"}, "fp16 is not computed here"),
        ({"device": "gpu"}, "OpenVINO GenAI has no device 'gpu'; it runs on cpu here"),
        ({"engine": "torch"}, "the model is a folder that optimum-cli exported for OpenVINO"),
    ],
)
def test_what_would_have_no_effect_is_refused(written: Path, execution: dict[str, Any], said: str):
    with pytest.raises(xrt.XpuRuntimeError) as caught:
        xrt.plan(written, {"execution": {"engine": NAME, **execution}})
    assert said in str(caught.value)
    with pytest.raises(xrt.UnsupportedOperationError, match=r"kernels\.matmul"):
        xrt.GenerationSession(written, {"mode": "strict", "kernels": {"matmul": "cpu.blas"}})


def vocabulary(folder: Path, size: int) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": size}))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "openvino_model.bin").unlink(), "it has no openvino_model.bin"),
        (lambda folder: (folder / "openvino_tokenizer.xml").unlink(), "it has no openvino_tokenizer.xml"),
        (lambda folder: (folder / "openvino_model.xml").write_text("<net"), "cannot be read"),
        (lambda folder: os.truncate(folder / "openvino_model.bin", 1000), "cannot be read"),
        (
            lambda folder: vocabulary(folder, 999),
            f"vocab_size is 999, and openvino_model.xml gives {VOCABULARY} logits",
        ),
        (lambda folder: vocabulary(folder, 100), "vocab_size is 100"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is []"),
        (lambda folder: (folder / "generation_config.json").write_text('{"num_beams": 4}'), "num_beams is 4"),
        (
            lambda folder: (folder / "generation_config.json").write_text('{"repetition_penalty": -1}'),
            "repetition_penalty is -1, not a number above 0",
        ),
    ],
)
def test_foreign_files_are_refused(
    written: Path, copy_of: Callable[[Path], Path], spoil: Callable[[Path], Any], said: str
):
    other = copy_of(written)
    spoil(other)
    with pytest.raises(xrt.ModelError, match="Fix: ") as caught:
        xrt.GenerationSession(other)
    assert said in str(caught.value)


def test_a_lock_breaks_with_the_weights(written: Path, copy_of: Callable[[Path], Path], tmp_path: Path):
    other = copy_of(written)
    xrt.lock(other, policy(), tmp_path / "model.lock")
    with xrt.GenerationSession(other, lock=tmp_path / "model.lock") as locked:
        assert locked.generate(PROMPT, 3).tokens
    path = other / "openvino_model.bin"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(xrt.LockError, match=r"openvino_model\.bin"):
        xrt.GenerationSession(other, lock=tmp_path / "model.lock")


def test_a_closed_session_refuses(written: Path):
    closing = xrt.GenerationSession(written)
    closing.close()
    for call in (lambda: closing.generate(PROMPT, 1), lambda: closing.logprobs(PROMPT)):
        with pytest.raises(xrt.XpuRuntimeError, match="closed"):
            call()
