# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`capture_decode`: bad input, models that change, and calls that end early."""

from __future__ import annotations

import copy
import sys
import threading
import warnings
from typing import Any, ClassVar

import pytest

torch = pytest.importorskip("torch")
sys.modules.setdefault("torchvision", None)  # type: ignore[arg-type]
hf = pytest.importorskip("transformers")

from decode_models import MASK, PROMPT, Streamer, eager, model_of, on_stand_in  # noqa: E402 - it needs PyTorch

import xpuruntime as xrt  # noqa: E402
import xpuruntime.pytorch as xt  # noqa: E402
from xpuruntime.pytorch.generation.captured_decode import CapturedDecode  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture
def llama() -> Any:
    return copy.deepcopy(model_of("llama"))


class TestBadInput:
    @pytest.mark.parametrize(
        ("ids", "mask", "message"),
        [
            (PROMPT, MASK[:, :3], r"attention_mask has shape \[2, 3\], and the token ids have \[2, 5\]"),
            (PROMPT, MASK[:1], "attention_mask has shape"),
            (PROMPT, MASK.tolist(), "attention_mask is a list"),
            (PROMPT.float(), None, r"these are a torch.float32 tensor of shape \[2, 5\]"),
            (PROMPT.short(), None, "these are a torch.int16 tensor"),
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
        for wrong in (
            {"max_length": 0},
            {"batch": ()},
            {"batch": (1, 0)},
            {"check_every": 0},
            {"kv_ranges": (64,)},
            {"tolerance": -0.1},
            {"tolerance": float("nan")},
        ):
            with pytest.raises(xrt.InputError):
                eager(llama, **wrong)
        with pytest.raises(xrt.ModelError, match="got a Linear"):
            eager(torch.nn.Linear(2, 2))
        with pytest.raises(xrt.ModelError, match="training mode"):
            eager(llama.train())
        with pytest.raises(xrt.UnsupportedOperationError, match="the CPU has no CUDA graphs"):
            eager(llama.eval(), strict=True)
        assert eager(llama, max_length=1000, kv_ranges="pow2").report.kv_ranges == (128, 256, 512, 1000)

    def test_other_types_and_inference_mode(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        with torch.inference_mode():
            first = captured.generate(PROMPT, max_new_tokens=4, do_sample=False)
        assert torch.equal(captured.generate(PROMPT.int(), max_new_tokens=4, do_sample=False), first.clone())
        share = MASK / 2  # what is not zero is seen
        want = llama.generate(PROMPT, attention_mask=share, max_new_tokens=4, do_sample=False)
        assert torch.equal(captured.generate(PROMPT, attention_mask=share, max_new_tokens=4, do_sample=False), want)

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

    def test_a_switch_of_the_configuration(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        self.same(captured, llama)
        captures = captured.report.captures
        for count, attention in enumerate(("eager", "sdpa"), start=2):
            llama.set_attn_implementation(attention)
            with xt.explain(root=llama) as report:
                self.same(captured, llama)
            assert captured.report.captures == count * captures
            assert any("attention" in row.operator for row in report.rows) == (attention == "sdpa")

    def test_training_mode_is_refused_each_time(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        self.same(captured, llama)
        llama.train()
        for _ in range(2):
            with pytest.raises(xrt.ModelError, match="training mode"):
                captured.generate(PROMPT, max_new_tokens=2)
        llama.eval()
        self.same(captured, llama)

    def test_a_new_layer_in_training_mode_is_named(self, llama: Any) -> None:
        captured = on_stand_in(llama)
        llama.resize_token_embeddings(80)
        with pytest.raises(xrt.ModelError, match=r"(embed_tokens|lm_head) of <LlamaForCausalLM> is in training mode"):
            captured.generate(PROMPT, max_new_tokens=2)
        llama.eval()
        self.same(captured, llama)

    def test_weights_that_are_quantized_and_replaced(self, llama: Any) -> None:
        pytest.importorskip("torchao", reason="needs torchao: pip install torchao")
        policy = {"execution": {"weights": {"storage": "int8", "exclude": ["lm_head"]}}}
        captured = on_stand_in(llama.bfloat16())
        self.same(captured, llama)
        captures = captured.report.captures
        xt.quantize(llama, policy)
        self.same(captured, llama)
        assert captured.report.captures == 2 * captures
        del policy["execution"]["weights"]["exclude"]
        other = xt.quantize(torch.nn.Sequential(torch.nn.Linear(64, 32, bias=False).bfloat16()), policy)[0]
        llama.model.layers[0].mlp.down_proj.weight = other.weight
        self.same(captured, llama)
        assert captured.report.captures == 3 * captures

    def test_a_buffer_of_a_module_that_had_none(self, llama: Any) -> None:
        class Shifted(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def forward(self, x: Any) -> Any:
                x = torch.nn.functional.silu(x)
                return x - dict(self.named_buffers()).get("shift", 0.0)

        llama.model.layers[0].mlp.act_fn = Shifted().eval()
        captured = on_stand_in(llama)
        self.same(captured, llama)
        captures = captured.report.captures
        act = llama.model.layers[0].mlp.act_fn
        act.register_buffer("shift", torch.full((1,), 9.0))
        self.same(captured, llama)
        assert captured.report.captures == 2 * captures
        act.shift = act.shift.clone()
        self.same(captured, llama)
        assert captured.report.captures == 3 * captures, "it is in another place, though equal"

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

    def test_what_a_model_keeps_of_its_work_is_no_change(self, llama: Any) -> None:
        class Keeping(torch.nn.Module):  # type: ignore[misc,name-defined,unused-ignore]
            def __init__(self, inner: Any) -> None:
                super().__init__()
                self.inner, self.last = inner, None

            def forward(self, x: Any) -> Any:
                self.last = self.inner(x)
                return self.last

        llama.model.layers[0].mlp = Keeping(llama.model.layers[0].mlp).eval()
        captured = on_stand_in(llama)
        self.same(captured, llama)
        captures = captured.report.captures
        self.same(captured, llama)
        assert captured.report.captures == captures
        llama.model.layers[1].self_attn.scaling = 0.5
        self.same(captured, llama)
        assert captured.report.captures == 2 * captures

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

    def test_graphs_give_way(self, llama: Any) -> None:
        captured = on_stand_in(llama, max_graphs=2)
        for _ in range(2):
            self.same(captured, llama)
            captured.generate(PROMPT[:1], max_new_tokens=30)
        assert len(captured.report.graphs) == captured._recorder.live == 2  # type: ignore[union-attr]

    def test_a_warning_of_torch_is_no_reason_to_run_eagerly(self, llama: Any) -> None:
        told: list[str] = []

        def hint(module: Any, args: Any) -> None:  # an error by the filters of these tests
            if args[0].shape[1] == 1 and not told:  # a step, as it is captured
                told.append("Consider setting")
                warnings.warn_explicit(told[0], UserWarning, "compile_fx.py", 1, "torch._inductor.compile_fx")

        captured = on_stand_in(llama)
        handle = llama.model.layers[0].register_forward_pre_hook(hint)
        self.same(captured, llama)
        handle.remove()
        assert told
        assert captured.report.reasons == {}

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
            with xt.explain(root=llama) as report:
                llama.generate(PROMPT[:1], **self.OPTIONS)
            assert {row.source for row in report.rows} == {"default"}

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
