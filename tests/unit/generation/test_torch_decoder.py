# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GenerationSession` on the torch engine: folders of transformers, tokens of ``generate``, evidence by phase."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from generation_folders import END, VOCABULARY

import xpuruntime as xrt
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

torch = pytest.importorskip("torch", reason="needs torch")
pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

PROMPT = [1, 2, 3, 4, 5]
STRICT: dict[str, Any] = {
    "mode": "strict",
    "execution": {"engine": "torch", "device": "cpu", "threads": 1, "precision": "fp32"},
    "kernels": {"matmul": "cpu.blas"},
}


@pytest.fixture(scope="module")
def session(llama_folder: Path) -> Any:
    with xrt.GenerationSession(llama_folder) as opened:
        yield opened


def of_transformers(llama: Any, prompt: list[int], count: int, **options: Any) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    made = llama.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **options)
    return tuple(made[0, len(prompt) :].tolist())


def test_tokens_are_those_of_transformers(session: Any, llama: Any):
    assert session.plan.engine == "torch"
    for prompt in (PROMPT, [7], list(range(40))):
        result = session.generate(prompt, 16)
        assert result.tokens == of_transformers(llama, prompt, 16, do_sample=False)
        assert tuple(session.stream(prompt, 16)) == result.tokens
        assert 0 < result.first_token_us <= result.total_us
    torch.manual_seed(3)
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9}
    expected = of_transformers(llama, PROMPT, 16, do_sample=True, **drawn)
    state = torch.get_rng_state()
    assert session.generate(PROMPT, 16, **drawn, seed=3).tokens == expected
    assert tuple(session.stream(PROMPT, 16, **drawn, seed=3)) == expected
    assert torch.equal(torch.get_rng_state(), state)  # a seed is the call's own


def test_prompts_of_other_lengths_are_one_batch(session: Any):
    prompts: list[Any] = [PROMPT, [5], "hello", list(range(30))]
    together = session.generate(prompts, 8)
    assert [one.tokens for one in together] == [session.generate(prompt, 8).tokens for prompt in prompts]
    assert together[2].text == session.decode(together[2].tokens)


def test_the_end_of_a_text(llama_folder: Path, copy_of: Callable[[Path], Path], session: Any):
    first = session.generate(PROMPT, 6).tokens
    other = copy_of(llama_folder)
    change(other, "generation_config.json", eos_token_id=[END, first[2]])
    with xrt.GenerationSession(other) as ending:
        found = ending.generate(PROMPT, 6)
        assert (found.tokens, found.finish) == (first[:3], "stop")
        several = ending.generate([PROMPT, [5]], 6)
        assert (several[0].tokens, several[0].finish) == (first[:3], "stop")
        assert tuple(ending.stream(PROMPT, 6)) == first[:3]


def test_logprobs_by_one_run_over_the_cache_and_in_a_generation(session: Any, llama: Any):
    result = session.generate(PROMPT, 10, logprobs=True)
    tokens = [*PROMPT, *result]
    with torch.no_grad():
        rows = torch.log_softmax(llama(torch.tensor([tokens])).logits[0, :-1].double(), -1).numpy()
    np.testing.assert_allclose(session.logprobs(tokens), rows, atol=1e-5)
    np.testing.assert_allclose(session.logprobs(tokens, prefill=4), rows, atol=1e-5)
    np.testing.assert_allclose(result.logprobs, rows[np.arange(len(rows)), tokens[1:]][-10:], atol=1e-5)
    logits = session.session.run({"tokens": np.array([PROMPT])})["logits"]
    assert (logits.shape, logits.dtype) == ((1, len(PROMPT), VOCABULARY), np.float32)


def test_a_policy_reaches_both_phases_and_the_report_says_so(llama_folder: Path, llama: Any):
    with xrt.GenerationSession(llama_folder, STRICT) as session:
        assert session.generate(PROMPT, 8).tokens == of_transformers(llama, PROMPT, 8, do_sample=False)
        report = session.explain(PROMPT, runs=2)
    assert report.honoured, report
    products = [unit for unit in report.units if unit.op == "matmul"]
    assert {unit.kernel for unit in products} == {"cpu.blas"}
    assert {unit.phase for unit in products} == {"prefill", "decode"}
    assert len({unit.serves for unit in products}) == 15
    assert {one.status for one in report.observations} == {"honoured"}


def test_types_of_the_weights(llama_folder: Path):
    with xrt.GenerationSession(llama_folder, {"execution": {"precision": "bf16"}}) as session:
        report = session.explain(PROMPT, runs=1)
        assert {unit.precision_run for unit in report.units if unit.op == "matmul"} == {"bf16"}
        assert report.honoured, report
        assert session.logprobs(PROMPT).shape == (4, VOCABULARY)
    with pytest.raises(xrt.UnsupportedOperationError, match="does not quantize"):
        xrt.GenerationSession(llama_folder, {"execution": {"precision": "int8"}})


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_claims_about_weights(llama_folder: Path):
    pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
    weights = {"storage": "int8", "compute": "float"}
    with xrt.GenerationSession(llama_folder, {"execution": {"weights": weights}}) as session:
        statuses = {one.key: one.status for one in session.explain(PROMPT, runs=1).observations}
    assert statuses["execution.weights.storage"] == statuses["execution.weights.compute"] == "honoured"


def test_a_lock_holds_for_other_prompts_and_breaks_with_the_weights(
    llama_folder: Path, copy_of: Callable[[Path], Path], tmp_path: Path
):
    folder = copy_of(llama_folder)
    xrt.lock(folder, STRICT, tmp_path / "model.lock")
    with xrt.GenerationSession(folder, lock=tmp_path / "model.lock") as session:
        for prompt in ([1], list(range(40))):
            statuses = {one.key: one.status for one in session.explain(prompt, runs=1).observations}
            assert statuses["execution.lock"] == "honoured", statuses
    for target in ("torch", "kserve"):
        with pytest.raises(xrt.UnsupportedOperationError, match="Fix: copy the folder with its lock"):
            xrt.export_lock(tmp_path / "model.lock", target, tmp_path / target, model=folder)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(xrt.LockError, match=r"model\.safetensors"):
        xrt.GenerationSession(folder, lock=tmp_path / "model.lock")


def test_gates_of_a_policy(llama_folder: Path, tmp_path: Path):
    (tmp_path / "texts.json").write_text(json.dumps([list(range(30))]))
    policy = {**STRICT, "verify": {"generation": {"text": str(tmp_path / "texts.json"), "kl": 1e-6}}}
    found = xrt.verify(llama_folder, policy, only=["generation"])
    assert {claim.id: claim.verdict for claim in found.claims}["generation.kl"] == "pass", found


@pytest.fixture
def graphs(llama_folder: Path) -> Any:
    """A session whose steps are captured by a recorder that runs again what it has recorded."""
    from recorded_steps import AgainRecorder

    from xpuruntime.pytorch import capture_decode
    from xpuruntime.pytorch.capture.captured_state import CapturedState

    with xrt.GenerationSession(llama_folder, STRICT) as session:
        model: Any = session._loaded()
        model.captured = capture_decode(model.module, max_length=64, batch=(1, 2), compile=False, strict=None)
        model.captured._recorder, model.captured._why_eager = AgainRecorder(CapturedState()), ""
        yield session


def test_captured_steps_give_the_same_tokens_in_turn(graphs: Any, session: Any):
    expected = [session.generate([number, 3], 12).tokens for number in range(4)]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        found[number] = [graphs.generate([number, 3], 12).tokens for _ in range(3)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == [[tokens] * 3 for tokens in expected]
    result = graphs.generate(PROMPT, 12)
    assert 0 < result.first_token_us <= result.total_us
    drawn = {"temperature": 0.9, "top_k": 9, "seed": 5}
    assert graphs.generate(PROMPT, 12, **drawn).tokens == session.generate(PROMPT, 12, **drawn).tokens
    with pytest.raises(xrt.InputError, match=r"inside of the graph.*Fix: read session\.logprobs"):
        graphs.generate(PROMPT, 2, logprobs=True)
    assert graphs._loaded().captured.report.replays > 60


def test_a_closed_session_refuses_and_leaves_nothing(llama_folder: Path):
    from xpuruntime.pytorch.dispatch.context import CONTEXT

    before, threads = dict(CONTEXT.users), torch.get_num_threads()
    session = xrt.GenerationSession(llama_folder, STRICT)
    stream = session.stream(PROMPT, 5)
    next(stream)
    session.close()
    session.close()
    for call in (lambda: next(stream), lambda: session.generate(PROMPT, 1), lambda: session.logprobs(PROMPT)):
        with pytest.raises(xrt.XpuRuntimeError, match="closed"):
            call()
    assert {name: count for name, count in CONTEXT.users.items() if count} == {
        name: count for name, count in before.items() if count
    }
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize(
    ("execution", "said"),
    [
        ({"cuda_graph": "require"}, "the CPU has no CUDA graphs"),
        ({"provider_options": {"torch": {"max_length": 64}}}, "'max_length' is of captured decode steps"),
        ({"provider_options": {"torch": {"mode": "compile"}}}, "'mode' is of captured decode steps"),
        ({"provider_options": {"torch": {"nonsense": 1}}}, "unknown option 'nonsense'"),
        ({"engine": "onnxruntime-genai"}, "the model is a folder of Transformers"),
    ],
)
def test_what_would_have_no_effect_is_refused(llama_folder: Path, execution: dict[str, Any], said: str):
    with pytest.raises(xrt.XpuRuntimeError) as caught:
        xrt.GenerationSession(llama_folder, {"mode": "strict", "execution": {"engine": "torch", **execution}})
    assert said in str(caught.value)


def test_weights_need_torchao(llama_folder: Path, monkeypatch: pytest.MonkeyPatch):
    from xpuruntime.engines.torch import engine

    monkeypatch.setattr(engine, "installed", lambda name: {} if name == "torchao" else installed(name))
    policy = {"execution": {"engine": "torch", "device": "cpu", "weights": {"storage": "int8", "compute": "float"}}}
    with pytest.raises(xrt.EngineUnavailable, match=r"torchao.* is not installed\. Fix: pip install"):
        xrt.plan(llama_folder, policy)


def change(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def without(folder: Path, *names: str) -> None:
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    save_file({key: value for key, value in load_file(path).items() if key not in names}, path, {"format": "pt"})


def shards(folder: Path, *names: str) -> None:
    (folder / "model.safetensors").unlink()
    places = {f"weight.{number}": name for number, name in enumerate(names)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


CHANGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "code": (lambda folder: change(folder, "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"}), "auto_map"),
    "code of a tokenizer": (lambda folder: change(folder, "tokenizer_config.json", auto_map={"A": "b.C"}), "auto_map"),
    "an adapter": (lambda folder: (folder / "adapter_config.json").write_text("{}"), "merge the adapter"),
    "quantized": (lambda folder: change(folder, "config.json", quantization_config={"bits": 4}), "are quantized"),
    "no decoder": (lambda folder: change(folder, "config.json", architectures=["BertModel"]), "only decoders"),
    "classes": (lambda folder: change(folder, "config.json", architectures="x"), "architectures is 'x'"),
    "vocabulary": (lambda folder: change(folder, "config.json", vocab_size=-1), "vocab_size is -1"),
    "context": (lambda folder: change(folder, "config.json", max_position_embeddings=1e9), "max_position_embeddings"),
    "beams": (lambda folder: change(folder, "generation_config.json", num_beams=4), "num_beams is 4"),
    "penalty": (lambda folder: change(folder, "generation_config.json", repetition_penalty="x"), "a number above 0"),
    "end": (lambda folder: change(folder, "generation_config.json", eos_token_id="x"), "eos_token_id is 'x'"),
    "other sizes": (lambda folder: change(folder, "config.json", intermediate_size=80), "mismatched keys"),
    "other heads": (lambda folder: change(folder, "config.json", num_attention_heads=3), "multiple of the number"),
    "no type": (lambda folder: change(folder, "config.json", model_type="nonsense"), "nonsense"),
    "no activation": (lambda folder: change(folder, "config.json", hidden_act="nonsense"), "nonsense"),
    "a key twice": (
        lambda folder: (folder / "config.json").write_text('{"vocab_size": 3, "vocab_size": 4}'),
        "more than once",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "is no JSON"),
    "cut off": (cut, "is cut off"),
    "a pickle": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x80\x02" + b"." * 99), "Python pickle"),
    "empty": (lambda folder: (folder / "model.safetensors").write_bytes(b""), "no file of safetensors"),
    "no header": (lambda folder: (folder / "model.safetensors").write_bytes(b"\x02" + b"\0" * 7 + b"[]"), "no weights"),
    "a file elsewhere": (lambda folder: shards(folder, "../secret.safetensors"), "must be a file in the folder"),
    "a missing shard": (lambda folder: shards(folder, "a.safetensors"), "cannot be read"),
    "a missing weight": (lambda folder: without(folder, "lm_head.weight"), "missing keys"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_foreign_and_hostile_files_are_refused(llama_folder: Path, copy_of: Callable[[Path], Path], name: str):
    other = copy_of(llama_folder)
    spoil, said = CHANGES[name]
    spoil(other)
    with pytest.raises(xrt.ModelError, match=r"Fix: ") as caught:
        xrt.GenerationSession(other)
    assert said in str(caught.value)


def test_a_key_that_no_call_is_for_is_a_deviation(llama_folder: Path) -> None:
    rules = [
        {"match": {"op": "matmul", "module": "nowhere.*"}, "use": "cpu.reference"},
        {"match": {"op": "matmul", "dtype": "bf16"}, "use": "cpu.reference"},
    ]
    policy = {**STRICT, "kernels": {"matmul": "cpu.blas", "layer_norm": "cpu.vectorised", "rules": rules}}
    with xrt.GenerationSession(llama_folder, policy=policy) as opened:
        opened.generate(PROMPT, 3)
        report = opened.explain()
    seen = {one.key: one for one in report.observations}
    assert seen["kernels.layer_norm"].status == seen["kernels.rules[0]"].status == "substituted"
    assert seen["kernels.layer_norm"].reason.startswith("kernels.layer_norm names a kernel for layer_norm, and no call")
    assert seen["kernels.rules[1]"].status == "unobservable"  # a condition may hold of other models
    assert seen["kernels.matmul"].status == "honoured"
    assert report.headline == "2 deviations"
