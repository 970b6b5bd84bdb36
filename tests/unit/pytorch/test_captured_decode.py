# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`capture_decode`: the tokens of plain ``generate``, from few graphs, and a reason for what is left to it."""

from __future__ import annotations

import contextlib
import copy
import pickle
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
hf = pytest.importorskip("transformers")

from decode_models import FAMILIES, MASK, PADDED, PROMPT, Streamer, eager, ending, model_of, on_stand_in  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.generation.decode_calls import NotCapturedError, choice_of  # noqa: E402
from xpuruntime.pytorch.generation.joined_products import JoinedProducts  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def llama() -> Any:
    return copy.deepcopy(model_of("llama"))


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"inputs": PROMPT, "do_sample": False},
    "left padding": {"inputs": PADDED, "attention_mask": MASK, "do_sample": False},
    "sampled": {"inputs": PROMPT, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalty": {"inputs": PADDED, "attention_mask": MASK, "do_sample": False, "repetition_penalty": 1.3},
    "two sequences": {"inputs": PROMPT, "do_sample": True, "num_return_sequences": 2},
    "another length": {"inputs": PROMPT[:1, :2], "do_sample": False},
}


@pytest.mark.parametrize(("make", "family"), [(eager, "llama"), *((on_stand_in, family) for family in FAMILIES)])
def test_tokens_are_those_of_plain_generate(make: Any, family: str) -> None:
    model = model_of(family)
    captured = make(model)
    for name, call in [*CALLS.items(), *CALLS.items()]:
        for ends in (None, ending(model, call["inputs"])):
            options = {**call, "max_new_tokens": 14, "eos_token_id": ends}
            torch.manual_seed(3)
            want = model.generate(**options), torch.rand(1)
            torch.manual_seed(3)
            got = captured.generate(**options), torch.rand(1)
            assert torch.equal(want[0], got[0]), (name, ends, want[0], got[0])
            assert torch.equal(want[1], got[1]), f"{name}: as many random numbers are drawn"
    report = captured.report
    if make is on_stand_in:
        assert report.reasons == {}, report
        assert report.captures <= 3 * 2 * len(CALLS) + 6
        assert report.replays > 4 * report.captures
        captures = report.captures
        captured.generate(PROMPT + 1, max_new_tokens=14, do_sample=False)
        assert captured.report.captures == captures, "another prompt captures nothing"
    else:
        assert list(report.reasons) == ["the CPU has no CUDA graphs"]
        assert (report.captures, report.replays) == (0, 0)


@pytest.mark.parametrize("make", [eager, on_stand_in])
@pytest.mark.parametrize("every", [1, 4, 64])
def test_ends(llama: Any, make: Any, every: int) -> None:
    first = int(llama.generate(PROMPT[:1], max_new_tokens=1, do_sample=False)[0, -1])
    captured = make(llama, check_every=every)
    for ends in (first, [first, 7], [40], ending(llama, PROMPT)):
        for ids in (PROMPT[:1], PROMPT):
            options = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": ends}
            assert torch.equal(captured.generate(ids, **options), llama.generate(ids, **options))
    for least in ({"min_new_tokens": 4}, {"min_length": 9}, {"min_new_tokens": 9, "min_length": 7}):
        options = {**least, "max_new_tokens": 12, "do_sample": False, "eos_token_id": [first, *ending(llama, PROMPT)]}
        for ids in (PROMPT[:1], PROMPT, PROMPT[:, :3]):
            assert torch.equal(captured.generate(ids, **options), llama.generate(ids, **options))
    assert not any("logits processor" in reason for reason in captured.report.reasons), captured.report
    captured.generate(PROMPT[:1], max_new_tokens=20, eos_token_id=first)
    assert captured.report.host_reads <= 18 + 17 * 20 // every


@pytest.mark.parametrize("length", [1, len(PROMPT[0]), 9, 14])
def test_a_length_that_is_given_as_a_criterion(llama: Any, length: int) -> None:
    criteria = hf.StoppingCriteriaList([hf.MaxLengthCriteria(length)])
    options = {"do_sample": False, "stopping_criteria": criteria, "max_new_tokens": 8, "eos_token_id": None}
    assert torch.equal(on_stand_in(llama).generate(PROMPT, **options), llama.generate(PROMPT, **options))


def test_the_host_asks_every_few_tokens(llama: Any) -> None:
    reads = []
    for every in (1, 4, 16):
        captured = on_stand_in(llama, check_every=every)
        captured.generate(PROMPT, max_new_tokens=32, do_sample=False, eos_token_id=63)
        reads.append(captured.report.host_reads)
    assert reads == [31, 8, 2]


def test_penalties_that_know_no_padding() -> None:
    processors = hf.LogitsProcessorList([hf.RepetitionPenaltyLogitsProcessor(1.3)])
    config = hf.GenerationConfig(pad_token_id=0)
    choice_of(processors, [], config, torch.ones_like(MASK), torch.device("cpu"))
    with pytest.raises(NotCapturedError, match="another part of the prompt than its padding"):
        choice_of(processors, [], config, MASK, torch.device("cpu"))


class TestJoinedProducts:
    """Products of one input as one."""

    def test_the_report_has_a_line_for_each_kind(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        captured.generate(PROMPT, max_new_tokens=4, do_sample=False)
        notes = [note for note in captured.report.notes if "as one product, 2 rows" in note]
        assert [note.partition(" as")[0] for note in notes] == ["q_proj, k_proj, v_proj", "gate_proj, up_proj"]
        apart = on_stand_in(llama, fuse=False)
        apart.generate(PROMPT, max_new_tokens=4, do_sample=False)
        assert apart.report.notes == ()
        with xt.kernel_policy(matmul="cpu.blas"), xt.explain(root=llama) as report:
            captured.generate(PROMPT[:1], max_new_tokens=4, do_sample=False)
        rows = {row.module for row in report.rows if row.op == "matmul" and row.phase == "decode"}
        assert {"model.layers.0.self_attn.k_proj", "model.layers.1.mlp.up_proj"} <= rows, "a policy names single ones"
        assert not any("1 rows" in note for note in captured.report.notes)

    def test_weights_are_not_held_twice_and_come_apart(self, llama: Any) -> None:
        def storages() -> list[int]:
            layers = [llama.model.layers[0].self_attn, llama.model.layers[0].mlp]
            parts = [layers[0].q_proj, layers[0].k_proj, layers[0].v_proj, layers[1].gate_proj, layers[1].up_proj]
            return [part.weight.untyped_storage().data_ptr() for part in parts]

        before = {name: tensor.clone() for name, tensor in llama.state_dict().items()}
        identities = list(map(id, llama.parameters()))
        captured = on_stand_in(llama)
        assert len(set(storages())) == 2
        captured.generate(PROMPT, max_new_tokens=4)
        llama.load_state_dict({name: -tensor for name, tensor in before.items()})
        want = llama.generate(PROMPT, max_new_tokens=8, do_sample=False)
        assert torch.equal(captured.generate(PROMPT, max_new_tokens=8, do_sample=False), want)
        captured.reset()
        assert len(set(storages())) == 5
        assert list(map(id, llama.parameters())) == identities
        assert all(torch.equal(tensor, -before[name]) for name, tensor in llama.state_dict().items())
        assert not any("forward" in vars(part) for part in llama.modules())
        assert torch.equal(captured.generate(PROMPT, max_new_tokens=8, do_sample=False), want)
        assert len(set(storages())) == 2

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("sizes", [(32, 64, 96), (300, 17, 5), (1000, 33, 129)])
    def test_bits_are_those_of_single_products(self, dtype: Any, sizes: tuple[int, int, int]) -> None:
        class Pair(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.gate_proj = torch.nn.Linear(sizes[0], sizes[1])
                self.up_proj = torch.nn.Linear(sizes[0], sizes[2])

            def forward(self, x: Any) -> Any:
                return self.gate_proj(x), self.up_proj(x), self.up_proj(x * 1)

        pair = Pair().to(dtype)
        joined = JoinedProducts(pair)
        for rows in (1, 2, 5, 16):
            [line] = joined.prove(rows)
            assert "in 1 of 1" in line or "others have other bits" in line
            x = torch.randn(rows, 1, sizes[0], dtype=dtype)
            want = pair(x)
            with joined.used(rows):
                assert all(map(torch.equal, pair(x), want)), line

    def test_layers_that_somebody_has_a_hand_in(self, llama: Any) -> None:
        first, second = llama.model.layers
        first.self_attn.k_proj.register_forward_hook(lambda *a: a[2])
        first.mlp.up_proj.weight = first.mlp.gate_proj.weight
        second.self_attn.v_proj = torch.nn.Sequential(second.self_attn.v_proj)
        lines = JoinedProducts(llama).prove(1)
        assert [line.partition(",")[0] for line in lines] == ["gate_proj"]
        assert "of 1 modules" in lines[0]


def test_compiled_steps(llama: Any) -> None:
    captured = on_stand_in(llama, extents=(48,), compile={"backend": "eager", "fullgraph": True})
    options = {"max_new_tokens": 6, "do_sample": False, "repetition_penalty": 1.3}
    want = llama.generate(PADDED, attention_mask=MASK, **options)
    assert torch.equal(captured.generate(PADDED, attention_mask=MASK, **options), want)
    assert (captured.report.captures, captured.report.replays) == (1, 5)
    assert captured.report.reasons == {}
    with pytest.raises(xrt.InputError, match="compile has the mode 'reduce-overhead'"):
        eager(llama, compile={"mode": "reduce-overhead"})


@pytest.mark.parametrize("make", [eager, on_stand_in])
def test_streamers(llama: Any, make: Any) -> None:
    captured, plain, ours = make(llama), Streamer(), Streamer()
    ends = ending(llama, PROMPT[:1])
    for ids, options in ((PROMPT[:1], {"eos_token_id": ends}), (PROMPT[1:], {"do_sample": False})):
        llama.generate(ids, max_new_tokens=12, streamer=plain, **options)
        captured.generate(ids, max_new_tokens=12, streamer=ours, **options)
    assert ours.got == plain.got
    with pytest.raises(KeyboardInterrupt):
        captured.generate(PROMPT[:1], max_new_tokens=12, streamer=Streamer(fails=5))
    want = llama.generate(PROMPT[:1], max_new_tokens=12)
    assert torch.equal(captured.generate(PROMPT[:1], max_new_tokens=12), want), "a call that broke off leaves nothing"


def test_the_first_token_comes_before_any_capture(llama: Any) -> None:
    captured = on_stand_in(llama)
    seen = []

    class Watch(Streamer):
        def put(self, value: Any) -> None:
            seen.append(captured.report.captures)

    captured.generate(PROMPT[:1], max_new_tokens=8, streamer=Watch())
    assert seen[:3] == [0, 0, 1], "the prompt, the first token, and the second"
    captured.reset()
    before = captured.report.captures
    assert captured.warm(do_sample=False) == 9, "three batch sizes of three ranges"
    captured.generate(PROMPT, max_new_tokens=8, do_sample=False)
    assert captured.report.captures == before + 9


def test_what_transformers_changes_for_decode_steps_is_changed_for_captured_ones(llama: Any) -> None:
    inside: list[bool] = []
    seen: set[tuple[bool, bool]] = set()

    @contextlib.contextmanager
    def decoding() -> Any:
        inside.append(True)
        yield
        inside.pop()

    llama._optimize_model_for_decode = decoding
    llama.model.layers[0].register_forward_pre_hook(lambda _, args: seen.add((args[0].shape[1] == 1, bool(inside))))
    on_stand_in(llama).generate(PROMPT, max_new_tokens=4, do_sample=False)
    on_stand_in(llama).warm(do_sample=False)
    assert seen == {(False, False), (True, True), (True, False)}, "the prompts of `warm` are of one token"
    assert inside == []


def test_attached(llama: Any) -> None:
    captured = on_stand_in(llama)
    want = llama.generate(PROMPT, max_new_tokens=6, do_sample=False)
    with captured.attached() as inside:
        assert inside is captured
        assert torch.equal(llama.generate(PROMPT, max_new_tokens=6, do_sample=False), want)
        assert captured.report.replays == 5
        with pytest.raises(xrt.UnsupportedOperationError, match="attached already"), captured.attached():
            pass
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(llama)
    assert "generate" not in vars(llama)
    llama.generate(PROMPT, max_new_tokens=6, do_sample=False)
    assert captured.report.replays == 5
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled.*Fix: copy the model"):
            make(captured)


LEFT: dict[str, dict[str, Any]] = {
    "beam": {"num_beams": 2, "do_sample": False},
    "NoRepeatNGram": {"no_repeat_ngram_size": 2},
    "NoBadWords": {"bad_words_ids": [[5]]},
    "return_dict_in_generate": {"return_dict_in_generate": True, "output_scores": True},
    "MaxTime": {"max_time": 1e6},
    "cache_implementation": {"cache_implementation": "dynamic"},
    "do not fit into max_length": {"max_new_tokens": 60},
    "use_cache": {"use_cache": False},
    "tokenizer": {"tokenizer": object()},
    "no cache for 3 rows": {"inputs": PROMPT[:1].repeat(3, 1)},
    "criterion MaxLengthCriteria": {"stopping_criteria": [type("MaxLengthCriteria", (hf.MaxLengthCriteria,), {})(9)]},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2, "inputs": PROMPT[:1], "do_sample": False},
}


@pytest.mark.parametrize("reason", list(LEFT))
def test_what_is_left_to_plain_generate(llama: Any, reason: str) -> None:
    options = {"inputs": PROMPT, "max_new_tokens": 5, **LEFT[reason]}
    captured, strict = on_stand_in(llama), on_stand_in(llama, strict=True)
    want, got = llama.generate(**options), captured.generate(**options)
    want, got = (side if isinstance(side, torch.Tensor) else side.sequences for side in (want, got))
    assert torch.equal(want, got)
    [said] = captured.report.reasons
    assert reason.lower() in said.lower().replace("assisted_generation", "prompt_lookup"), said
    assert captured.report.replays == 0
    with pytest.raises(xrt.UnsupportedOperationError, match="would be generated eagerly"):
        strict.generate(**options)
    policy = xrt.Policy(mode="strict", kernels={"matmul": "cpu.blas"})
    with xt.kernel_policy(policy), pytest.raises(xrt.UnsupportedOperationError):
        captured.generate(**options)


SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_attention_heads": 4, "pad_token_id": 0}
UNFIT: dict[str, tuple[str, dict[str, Any], str]] = {
    "ALiBi": ("Bloom", {"n_layer": 1, "n_head": 4}, "does not run over ranges"),
    "ALiBi of the mask": ("Falcon", {"num_hidden_layers": 1, "alibi": True}, "does not run over ranges"),
    "own mask": (
        "GPTNeo",
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "window_size": 4},
        "computes other logits over ranges",
    ),
    "own state": ("Rwkv", {"num_hidden_layers": 2, "context_length": 32}, "keeps nothing in the cache"),
}


@pytest.mark.parametrize("make", [eager, on_stand_in])
@pytest.mark.parametrize("name", UNFIT)
@pytest.mark.filterwarnings("ignore:.*past_key_values. is deprecated")  # Rwkv's class, which transformers itself calls
def test_models_that_do_not_run_over_ranges_of_a_cache(name: str, make: Any) -> None:
    kind, sizes, reason = UNFIT[name]
    torch.manual_seed(0)
    model = getattr(hf, f"{kind}ForCausalLM")(getattr(hf, f"{kind}Config")(**SMALL, **sizes)).eval()
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    ours, plain = Streamer(), Streamer()
    captured = make(model)
    got = captured.generate(PROMPT[:1], streamer=ours, **options)
    assert torch.equal(got, model.generate(PROMPT[:1], streamer=plain, **options))
    assert ours.got == plain.got
    assert reason in next(iter(captured.report.reasons))


def test_replays_have_the_rows_of_their_capture(llama: Any) -> None:
    captured = on_stand_in(llama)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}

    def rows() -> list[Any]:
        with xt.explain(root=llama) as report:
            captured.generate(PROMPT, **options)
        return [row for row in report.rows if "chosen at capture" in row.reason and row.module == "lm_head"]

    with xt.kernel_policy(matmul="cpu.reference"):
        for before in (False, True):
            if before:
                captured.generate(PROMPT, **options)
            [row] = rows()
            assert (row.phase, row.resolved, row.status, row.count) == ("decode", "cpu.reference", "honoured", 9)
            assert (row.source, row.time_us) == ("kernels.matmul", 0)
    assert rows() == []


def test_gates_judge_the_captured_steps(llama: Any) -> None:
    from xpuruntime.generation import check_gates

    texts = torch.randint(2, 64, (3, 24), generator=torch.Generator().manual_seed(3)).tolist()
    plain = copy.deepcopy(llama)
    limits = {"kl": 1e-9, "top1": 0.9}
    captured = on_stand_in(llama)
    for penalty in (1.0, 1.3):
        for model in (plain, llama):
            model.generation_config.repetition_penalty = penalty
        before = captured.report
        ours = xt.logprobs_of(llama, generate=captured.generate)
        report = check_gates(xt.logprobs_of(plain), ours, limits, texts=texts)
        assert report.verdict == "pass", report
        assert captured.report.reasons == {}
        assert captured.report.replays - before.replays == 3 * 11
        assert captured.report.captures - before.captures == 2, "the graphs of all ranges serve all texts"
    captures = captured.report.captures
    with torch.no_grad():
        llama.model.layers[1].mlp.down_proj.weight.mul_(1.05)
    assert check_gates(xt.logprobs_of(plain), ours, limits, texts=texts).verdict == "fail"
    assert captured.report.captures == captures
    for graph in captured._graphs.values():
        graph.recording.graph.replay = lambda: None  # type: ignore[method-assign]
    with pytest.raises(xrt.ModelError, match=r"generate has chosen token \[\d+\] where \d+ was forced"):
        ours.logprobs(texts[0])


def test_rows_of_the_policy_and_gates(llama: Any) -> None:
    from xpuruntime.generation import check_gates

    captured = eager(llama)
    captured.generate(PROMPT, max_new_tokens=1)  # two tokens are tried when a batch size first comes
    with xt.kernel_policy(matmul="cpu.blas"), xt.explain(root=llama) as found:
        captured.generate(PROMPT, max_new_tokens=12, do_sample=False)
    rows = [row for row in found.rows if row.op == "matmul" and row.module == "lm_head"]
    assert {(row.phase, row.resolved, row.count) for row in rows} == {
        ("prefill", "cpu.blas", 1), ("decode", "cpu.blas", 11)
    }  # fmt: skip
    ours = xt.logprobs_of(llama, generate=captured.generate)
    report = check_gates(xt.logprobs_of(llama), ours, {"kl": 1e-9, "tokens": 8}, texts=PROMPT.tolist())
    assert report.verdict == "pass"
    assert "8 tokens are the same" in str(report)
    assert str(captured.report).startswith("decode on cpu: 0 graphs captured")
