# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`capture_decode`: the tokens of plain ``generate``, from few graphs, and a reason for what is left to it."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
import threading
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
hf = pytest.importorskip("transformers")

from recorded_steps import AgainRecorder  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.capture.captured_state import CapturedState  # noqa: E402
from xpuruntime.pytorch.generation.captured_decode import CapturedDecode  # noqa: E402
from xpuruntime.pytorch.generation.decode_calls import NotCapturedError, choice_of  # noqa: E402
from xpuruntime.pytorch.generation.joined_products import JoinedProducts  # noqa: E402

pytestmark = pytest.mark.torch

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 1, "eos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_SMALL)),
    "qwen3": lambda: hf.Qwen3ForCausalLM(hf.Qwen3Config(**_SMALL, head_dim=8)),
    "gemma3": lambda: hf.Gemma3ForCausalLM(
        hf.Gemma3TextConfig(**_SMALL, head_dim=8, sliding_window=8, layer_types=["sliding_attention", "full_attention"])
    ),
    "mixtral": lambda: hf.MixtralForCausalLM(
        hf.MixtralConfig(**_SMALL, num_local_experts=4, num_experts_per_tok=2, sliding_window=None)
    ),
    "gpt2": lambda: hf.GPT2LMHeadModel(
        hf.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=None,
            pad_token_id=0,
        )
    ),
}  # fmt: skip
PROMPT = torch.tensor([[5, 9, 2, 7, 11], [3, 8, 6, 4, 1]])
PADDED = torch.tensor([[0, 0, 2, 7, 11], [3, 8, 6, 4, 1]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])


@functools.cache
def model_of(family: str) -> Any:
    torch.manual_seed(0)
    return FAMILIES[family]().eval()


@pytest.fixture
def llama() -> Any:
    return copy.deepcopy(model_of("llama"))


def on_stand_in(model: Any, **options: Any) -> CapturedDecode:
    """Capture on the CPU by a recorder that runs again what it has recorded."""
    settings: dict[str, Any] = {
        "max_length": 48,
        "batches": (1, 2, 4),
        "extents": (8, 16, 48),
        "check_every": 4,
        "max_graphs": 32,
    }
    settings |= {"fuse": True, "tolerance": None, "compile": False, "strict": None, **options}
    return CapturedDecode(model, torch.device("cpu"), AgainRecorder(CapturedState()), why_eager="", **settings)


def eager(model: Any, **options: Any) -> CapturedDecode:
    return xt.capture_decode(model, **{"max_length": 48, "batch": (1, 2, 4), "kv_ranges": (8, 16), **options})


def ending(model: Any, ids: Any, count: int = 3, **options: Any) -> list[int]:
    """Return tokens that rows choose soon, so that they end texts at different places."""
    made = model.generate(ids, max_new_tokens=6, do_sample=False, **options)[:, ids.shape[1] :]
    return sorted({int(row[i]) for i, row in enumerate(made.repeat(3, 1)[:count])})


CALLS: dict[str, dict[str, Any]] = {
    "greedy": {"inputs": PROMPT, "do_sample": False},
    "left padding": {"inputs": PADDED, "attention_mask": MASK, "do_sample": False},
    "sampled": {"inputs": PROMPT, "do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9},
    "penalty": {"inputs": PADDED, "attention_mask": MASK, "do_sample": False, "repetition_penalty": 1.3},
    "two sequences": {"inputs": PROMPT, "do_sample": True, "num_return_sequences": 2},
    "another length": {"inputs": PROMPT[:1, :2], "do_sample": False},
}


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("make", [eager, on_stand_in])
def test_tokens_are_those_of_plain_generate(family: str, make: Any) -> None:
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
    for least in ({"min_new_tokens": 4}, {"min_length": 9}, {"min_new_tokens": 9}):
        options = {**least, "max_new_tokens": 12, "do_sample": False, "eos_token_id": [first, *ending(llama, PROMPT)]}
        for ids in (PROMPT[:1], PROMPT, PROMPT[:, :3]):
            assert torch.equal(captured.generate(ids, **options), llama.generate(ids, **options))
    captured.generate(PROMPT[:1], max_new_tokens=20, eos_token_id=first)
    assert captured.report.host_reads <= 18 + 17 * 20 // every


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
        with xt.kernel_policy(matmul="cpu.blas"), xt.explain(root=llama) as found:
            captured.generate(PROMPT[:1], max_new_tokens=4, do_sample=False)
        rows = {row.module for row in found.rows if row.op == "matmul" and row.phase == "decode"}
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


class Streamer:
    def __init__(self, fails: int = -1) -> None:
        self.got: list[Any] = []
        self.fails = fails

    def put(self, value: Any) -> None:
        if len(self.got) == self.fails:
            raise KeyboardInterrupt
        self.got.append(value.tolist())

    def end(self) -> None:
        self.got.append("end")


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
    "the logits processor MinNewTokensLength": {"min_new_tokens": 3, "min_length": 7, "eos_token_id": 5},
    "return_dict_in_generate": {"return_dict_in_generate": True, "output_scores": True},
    "MaxTime": {"max_time": 1e6},
    "cache_implementation": {"cache_implementation": "dynamic"},
    "do not fit into max_length": {"max_new_tokens": 60},
    "use_cache": {"use_cache": False},
    "tokenizer": {"tokenizer": object()},
    "no cache for 3 rows": {"inputs": PROMPT[:1].repeat(3, 1)},
    "prompt_lookup": {"prompt_lookup_num_tokens": 2, "inputs": PROMPT[:1], "do_sample": False},
}


@pytest.mark.parametrize("reason", list(LEFT))
def test_what_is_left_to_plain_generate(llama: Any, reason: str) -> None:
    options = {"inputs": PROMPT, "max_new_tokens": 5, **LEFT[reason]}
    captured, strict = on_stand_in(llama), on_stand_in(llama, strict=True)
    want, got = llama.generate(**options), captured.generate(**options)
    want, got = (one if isinstance(one, torch.Tensor) else one.sequences for one in (want, got))
    assert torch.equal(want, got)
    [said] = captured.report.reasons
    assert reason.lower() in said.lower().replace("assisted_generation", "prompt_lookup"), said
    assert captured.report.replays == 0
    with pytest.raises(xrt.UnsupportedOperationError, match="would be generated eagerly"):
        strict.generate(**options)
    policy = xrt.Policy(mode="strict", kernels={"matmul": "cpu.blas"})
    with xt.kernel_policy(policy), pytest.raises(xrt.UnsupportedOperationError):
        captured.generate(**options)


class TestBadInput:
    @pytest.mark.parametrize(
        ("ids", "mask", "message"),
        [
            (PROMPT, MASK[:, :3], r"attention_mask has shape \[2, 3\], and the token ids have \[2, 5\]"),
            (PROMPT, MASK[:1], "attention_mask has shape"),
            (PROMPT, MASK.tolist(), "attention_mask is a list"),
            (PROMPT.float(), None, r"these are a torch.float32 tensor of shape \[2, 5\]"),
            (PROMPT[0], None, r"of shape \[rows, tokens\]"),
            ([[1, 2]], None, "these are list"),
            (PROMPT[:, :0], None, "Fix: give at least one token a row"),
        ],
    )
    def test_ids_and_masks(self, llama: Any, ids: Any, mask: Any, message: str) -> None:
        captured = eager(llama)
        with pytest.raises(xrt.InputError, match=message):
            captured.generate(ids, attention_mask=mask, max_new_tokens=2)

    def test_settings(self, llama: Any) -> None:
        with pytest.raises(TypeError, match="kv_ranges is 'pow2' or a list of whole numbers, got 'all'"):
            eager(llama, kv_ranges="all")
        for wrong in ({"max_length": 0}, {"batch": ()}, {"batch": (1, 0)}, {"check_every": 0}, {"kv_ranges": (64,)}):
            with pytest.raises(xrt.InputError):
                eager(llama, **wrong)
        with pytest.raises(xrt.ModelError, match="got a Linear"):
            eager(torch.nn.Linear(2, 2))
        with pytest.raises(xrt.ModelError, match="training mode"):
            eager(llama.train())
        with pytest.raises(xrt.UnsupportedOperationError, match="the CPU has no CUDA graphs"):
            eager(llama.eval(), strict=True)
        assert eager(llama, max_length=1000, kv_ranges="pow2").report.kv_ranges == (128, 256, 512, 1000)

    def test_int32_ids_and_inference_mode(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        with torch.inference_mode():
            first = captured.generate(PROMPT, max_new_tokens=4, do_sample=False)
        assert torch.equal(captured.generate(PROMPT.int(), max_new_tokens=4, do_sample=False), first.clone())

    def test_encoder_decoder(self) -> None:
        config = hf.T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=32,
                             decoder_start_token_id=0)  # fmt: skip
        model = hf.T5ForConditionalGeneration(config).eval()
        captured = eager(model)
        want = model.generate(PROMPT % 32, max_new_tokens=3)
        assert torch.equal(captured.generate(PROMPT % 32, max_new_tokens=3), want)
        assert captured.report.reasons == {"the model is an encoder-decoder": 1}

    def test_a_call_inside_of_a_call(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        errors: list[Exception] = []

        class Again(Streamer):
            def put(self, value: Any) -> None:
                def call() -> None:
                    try:
                        captured.generate(PROMPT[:1], max_new_tokens=2)
                    except xrt.UnsupportedOperationError as error:
                        errors.append(error)

                thread = threading.Thread(target=call)
                thread.start()
                thread.join()

        captured.generate(PROMPT[:1], max_new_tokens=2, streamer=Again())
        assert len(errors) == 3
        assert "in another thread" in str(errors[0])


class TestChanges:
    def same(self, captured: CapturedDecode, model: Any) -> None:
        options = {"max_new_tokens": 10, "do_sample": False}
        assert torch.equal(captured.generate(PROMPT, **options), model.generate(PROMPT, **options))

    def test_weights_in_place_replaced_and_converted(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        self.same(captured, llama)
        captures = captured.report.captures
        with captured.attached():
            self.same(captured, llama)
        assert captured.report.captures == captures, "attaching is no change"
        with torch.no_grad():
            llama.lm_head.weight.mul_(-1)
        self.same(captured, llama)
        assert captured.report.captures == captures, "a graph reads weights where they are"
        llama.model.layers[0].mlp.down_proj.weight = torch.nn.Parameter(torch.randn(32, 64))
        self.same(captured, llama)
        assert captured.report.captures == 2 * captures
        assert "the model was changed, so graphs were captured anew" in captured.report.notes
        llama.double()
        self.same(captured, llama)
        llama.model.norm.variance_epsilon = 0.5
        self.same(captured, llama)
        assert captured.report.captures == 4 * captures

    def test_a_switch_of_an_adapter_and_a_hook(self, llama: Any) -> None:
        class Adapter(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner, self.more = inner, torch.nn.Linear(32, 64)
                self._disable_adapters = False

            def forward(self, x: Any) -> Any:
                return self.inner(x) if self._disable_adapters else self.inner(x) + self.more(x)

        captured = on_stand_in(llama)
        llama.model.layers[0].mlp.up_proj = Adapter(llama.model.layers[0].mlp.up_proj).eval()
        for disabled in (False, True, False):
            llama.model.layers[0].mlp.up_proj._disable_adapters = disabled
            self.same(captured, llama)
        handle = llama.model.layers[1].register_forward_hook(lambda *a: a[2] * 2)
        self.same(captured, llama)
        handle.remove()
        self.same(captured, llama)

    def test_autocast_has_a_cache_of_its_own(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        self.same(captured, llama)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            captured.generate(PROMPT, max_new_tokens=10, do_sample=False)
        self.same(captured, llama)
        assert captured.report.reasons == {}

    def test_a_model_around_another(self, llama: Any) -> None:
        class Around(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self) -> None:
                super().__init__()
                self.base, self.config = llama, llama.config
                self.prepare_inputs_for_generation = llama.prepare_inputs_for_generation

            def forward(self, *args: Any, **kwargs: Any) -> Any:
                return self.base(*args, **kwargs)

            def generate(self, *args: Any, **kwargs: Any) -> Any:
                return self.base.generate(*args, **kwargs)

        captured = on_stand_in(Around().eval())
        self.same(captured, llama)
        assert captured.report.replays == 9

    def test_a_forward_that_raises(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        handle = llama.lm_head.register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            captured.generate(PROMPT, max_new_tokens=4)
        handle.remove()
        self.same(captured, llama)

    def test_policies_have_graphs_of_their_own(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        with captured.attached():
            self.same(captured, llama)
            captures = captured.report.captures
            for _ in range(2):
                with xt.kernel_policy(matmul="cpu.reference"):
                    llama.generate(PROMPT, max_new_tokens=10, do_sample=False)
            assert captured.report.captures == 2 * captures
            self.same(captured, llama)
            assert captured.report.captures == 2 * captures

    def test_graphs_give_way(self, llama: Any) -> None:
        captured = on_stand_in(llama, max_graphs=2)
        for _ in range(2):
            self.same(captured, llama)
            captured.generate(PROMPT[:1], max_new_tokens=30)
        assert len(captured.report.graphs) == captured._recorder.live == 2  # type: ignore[union-attr]

    def test_memory_that_runs_out_in_a_capture(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        captured._recorder.fails = torch.OutOfMemoryError("out of memory")  # type: ignore[union-attr]
        self.same(captured, llama)
        [reason, *_] = captured.report.reasons
        assert "cannot be captured" in reason
        assert "out of memory" in reason
        strict = on_stand_in(llama, strict=True)
        strict._recorder.fails = torch.OutOfMemoryError("out of memory")  # type: ignore[union-attr]
        with pytest.raises(xrt.UnsupportedOperationError, match="out of memory"):
            strict.generate(PROMPT, max_new_tokens=4)


class TestEndsOfCalls:
    OPTIONS: ClassVar[dict[str, Any]] = {"max_new_tokens": 10, "do_sample": False}

    def same(self, captured: CapturedDecode, model: Any, ids: Any = PROMPT) -> None:
        assert torch.equal(captured.generate(ids, **self.OPTIONS), model.generate(ids, **self.OPTIONS))

    def test_a_policy_that_is_left_while_it_is_attached(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        policy = xt.kernel_policy(matmul="cpu.reference")
        want = llama.generate(PROMPT, **self.OPTIONS)
        with captured.attached():
            with policy:
                llama.generate(PROMPT, **self.OPTIONS)
                captures = captured.report.captures
            assert torch.equal(llama.generate(PROMPT, **self.OPTIONS), want)
            assert captured.report.captures == 2 * captures, "graphs of a policy are used under it alone"
            with xt.explain(root=llama) as found:
                llama.generate(PROMPT[:1], **self.OPTIONS)
            assert {row.source for row in found.rows} == {"default"}

    def test_the_first_token_ends_the_text(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        first = int(llama.generate(PROMPT[:1], max_new_tokens=1, do_sample=False)[0, -1])
        options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": first}
        want = llama.generate(PROMPT[:1], **options)
        assert want.shape[1] == PROMPT.shape[1] + 1
        assert torch.equal(captured.generate(PROMPT[:1], **options), want)
        assert captured.report.captures == captured.report.replays == 0

    def test_a_batch_that_grows_and_a_prompt_that_is_too_long(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        for rows in (1, 2, 4, 1, 8, 2):
            self.same(captured, llama, PROMPT[:1].repeat(rows, 1))
        assert [*captured.report.reasons] == ["there is no cache for 8 rows, only for 1, 2, 4"]
        long = PROMPT[:1].repeat(1, 12)
        self.same(captured, llama, long)
        assert "70 tokens do not fit into max_length=48" in captured.report.reasons
        strict = on_stand_in(llama, strict=True)
        with pytest.raises(xrt.UnsupportedOperationError, match="do not fit"):
            strict.generate(long, **self.OPTIONS)
        self.same(strict, llama)

    def test_a_model_that_was_moved(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        self.same(captured, llama)
        llama.to("meta")
        with pytest.raises(Exception):  # noqa: B017, PT011 - of transformers: there are no numbers
            captured.generate(PROMPT, **self.OPTIONS)
        assert "the model was captured on cpu, and is on meta now" in captured.report.reasons
        other = copy.deepcopy(model_of("llama"))
        strict = on_stand_in(other, strict=True)
        self.same(strict, other)
        other.to("meta")
        with pytest.raises(xrt.UnsupportedOperationError, match="is on meta now"):
            strict.generate(PROMPT, **self.OPTIONS)


def test_replays_have_the_rows_of_their_capture(llama: Any) -> None:
    captured = on_stand_in(llama)
    options: dict[str, Any] = {"max_new_tokens": 10, "do_sample": False}

    def rows() -> list[Any]:
        with xt.explain(root=llama) as found:
            captured.generate(PROMPT, **options)
        return [row for row in found.rows if "chosen at capture" in row.reason and row.module == "lm_head"]

    with xt.kernel_policy(matmul="cpu.reference"):
        for before in (False, True):
            if before:
                captured.generate(PROMPT, **options)
            [row] = rows()
            assert (row.phase, row.resolved, row.status, row.count) == ("decode", "cpu.reference", "honoured", 9)
            assert (row.source, row.time_us) == ("kernels.matmul", 0)
    assert rows() == []


def test_rows_of_the_policy_and_gates(llama: Any) -> None:
    from xpuruntime.generation import check_gates

    captured = eager(llama)
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
