# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GenerationSession` on ONNX Runtime GenAI: tokens, logprobs, requests, streams, wrong arguments, threads, close."""

from __future__ import annotations

import copy
import os
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from generation_folders import BEGIN, CONTEXT, END, VOCABULARY, change_config, write_folder

import xpuruntime as xrt

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytest.importorskip("onnxruntime_genai", reason="needs onnxruntime-genai: make engines")

PROMPT = [BEGIN, 1, 2, 3]


@pytest.fixture(scope="module")
def session(folder: Path) -> Any:
    with xrt.GenerationSession(folder, policy={"mode": "strict", "execution": {"threads": 1}}) as opened:
        yield opened


def by_the_engine_itself(folder: Path, prompt: list[int], count: int, **search: Any) -> tuple[int, ...]:
    import onnxruntime_genai as engine

    model = engine.Model(str(folder))
    parameters = engine.GeneratorParams(model)
    parameters.set_search_options(max_length=len(prompt) + count, **search)
    generator = engine.Generator(model, parameters)
    generator.append_tokens(np.array(prompt, np.int32))
    numbers = []
    while not generator.is_done():
        generator.generate_next_token()
        numbers.append(int(generator.get_next_tokens()[0]))
    return tuple(numbers)


def test_tokens_are_those_of_the_engine(session: Any, folder: Path):
    result = session.generate(PROMPT, max_new_tokens=12)
    assert result.tokens == by_the_engine_itself(folder, PROMPT, 12)
    assert (result.finish, result.text, len(result.tokens)) == ("length", None, 12)
    assert 0 < result.first_token_us <= result.total_us
    drawn = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3}
    search = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 0.9, "random_seed": 3}
    assert session.generate(PROMPT, max_new_tokens=12, **drawn).tokens == by_the_engine_itself(
        folder, PROMPT, 12, **search
    )


def test_a_last_token_that_is_the_padding_counts(folder: Path, copy_of: Callable[[Path], Path], session: Any):
    other = copy_of(folder)
    change_config(other, lambda config: config["model"].update(pad_token_id=PROMPT[-1]))
    with xrt.GenerationSession(other) as padded:
        alone, *several = padded.generate(PROMPT, 6), *padded.generate([PROMPT, PROMPT[:1]], 6)
        assert alone.tokens == several[0].tokens == session.generate(PROMPT, 6).tokens
        np.testing.assert_array_equal(padded.logprobs(PROMPT), session.logprobs(PROMPT))


@pytest.mark.parametrize("kind", [list, tuple, np.array, lambda ids: np.array(ids, np.int32)])
def test_prompts_of_every_kind_give_the_same(session: Any, kind: Callable[[list[int]], Any]):
    assert session.generate(kind(PROMPT), max_new_tokens=5) is not None
    expected = session.generate(PROMPT, max_new_tokens=5).tokens
    assert session.generate(kind(PROMPT), max_new_tokens=5).tokens == expected
    assert tuple(session.stream(kind(PROMPT), max_new_tokens=5)) == expected


def test_requests_side_by_side_give_what_each_gives_alone(session: Any):
    prompts: list[Any] = [PROMPT, [5], "hello", list(range(30)), [END - 1], [7, 7]]
    alone = [session.generate(prompt, max_new_tokens=8) for prompt in prompts]
    together = session.generate(prompts, max_new_tokens=8)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    assert [one.text for one in together] == [one.text for one in alone]
    assert session.generate([PROMPT, [5]], max_new_tokens=0)[1].tokens == ()


def test_text_goes_through_the_tokenizer_of_the_folder(session: Any):
    assert session.encode("hi") == [104, 105]
    assert session.decode([104, 105]) == "hi"
    result = session.generate("hi", max_new_tokens=4)
    assert result.text == session.decode(result.tokens)
    assert result.tokens == session.generate([104, 105], max_new_tokens=4).tokens


def test_a_token_that_ends_the_text_stops(folder: Path, copy_of: Callable[[Path], Path], session: Any):
    first = session.generate(PROMPT, max_new_tokens=6).tokens
    other = copy_of(folder)
    change_config(other, lambda config: config["model"].update(eos_token_id=[END, first[2]]))
    with xrt.GenerationSession(other) as ending:
        alone = ending.generate(PROMPT, max_new_tokens=6)
        assert (alone.tokens, alone.finish) == (first[:3], "stop")
        assert tuple(ending.stream(PROMPT, max_new_tokens=6)) == first[:3]
        several = ending.generate([PROMPT, [5]], max_new_tokens=6)
        assert (several[0].tokens, several[0].finish) == (first[:2], "stop")  # the engine keeps that token to itself


def test_logprobs_of_steps_and_of_one_run_agree(session: Any):
    result = session.generate(PROMPT, max_new_tokens=10, logprobs=True)
    tokens = [*PROMPT, *result]
    rows = session.logprobs(tokens)
    assert rows.shape == (len(tokens) - 1, VOCABULARY)
    np.testing.assert_allclose(np.exp(rows).sum(axis=1), 1)
    by_one_run = rows[np.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(result.logprobs, by_one_run[-10:], atol=1e-4)
    logits = session.session.run({"tokens": np.array([PROMPT])})["logits"]
    assert logits.shape == (1, len(PROMPT), VOCABULARY)
    likely = np.exp(logits[0].astype(np.float64))
    likely /= likely.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(by_one_run[:3], np.log(likely[np.arange(3), PROMPT[1:]]), atol=1e-6)


def test_logprobs_over_the_cache_are_those_of_one_run(session: Any):
    tokens = list(range(1, 21))
    at_once = session.logprobs(tokens)
    for prefill in (1, 2, 10, 19, 20):
        stepped = session.logprobs(tokens, prefill=prefill)
        assert stepped.shape == at_once.shape
        np.testing.assert_allclose(stepped, at_once, atol=1e-4)
    generated = session.generate(tokens[:5], 8, logprobs=True)
    forced = session.logprobs([*tokens[:5], *generated], prefill=5)
    assert [float(row[token]) for row, token in zip(forced[4:], generated, strict=True)] == list(generated.logprobs)
    for wrong in (0, -1, 21):
        with pytest.raises(xrt.InputError, match=r"prefill is .*Fix: state 1 to 20"):
            session.logprobs(tokens, prefill=wrong)
    with pytest.raises(xrt.InputError, match="Fix: pass two tokens"):
        session.logprobs([1])


def test_a_graph_that_gives_the_last_logits_alone(tmp_path: Path, session: Any):
    with xrt.GenerationSession(write_folder(tmp_path / "pruned", pruned=True)) as pruned:
        assert pruned.generate(PROMPT, 6).tokens == session.generate(PROMPT, 6).tokens
        assert pruned.session.run({"tokens": np.array([PROMPT])})["logits"].shape == (1, 1, VOCABULARY)
        expected = session.logprobs([*PROMPT, 5, 6], prefill=len(PROMPT))[-2:]
        np.testing.assert_allclose(pruned.logprobs([*PROMPT, 5, 6], prefill=len(PROMPT)), expected, atol=1e-6)
        assert pruned.explain(PROMPT, runs=1).honoured


def test_sampling_of_the_folder_holds_where_a_temperature_is_stated(
    session: Any, folder: Path, copy_of: Callable[[Path], Path]
):
    other = copy_of(folder)
    change_config(other, lambda config: config["search"].update(do_sample=True, top_k=1))
    with xrt.GenerationSession(other) as sampling:
        best = session.generate(PROMPT, 6).tokens
        assert sampling.generate(PROMPT, 6).tokens == best
        assert sampling.generate(PROMPT, 6, temperature=2.0).tokens == best  # of one token
        assert [one.tokens for one in sampling.generate([PROMPT, PROMPT], 6, temperature=2.0)] == [best, best]


def test_logprobs_that_the_engine_would_change_are_refused(folder: Path, copy_of: Callable[[Path], Path]):
    other = copy_of(folder)
    change_config(other, lambda config: config["search"].update(repetition_penalty=1.5))
    with xrt.GenerationSession(other) as penalised:
        with pytest.raises(xrt.InputError, match=r"search\.repetition_penalty .*Fix: read session\.logprobs"):
            penalised.generate(PROMPT, max_new_tokens=3, logprobs=True)
        alone = [penalised.generate(prompt, max_new_tokens=8).tokens for prompt in (PROMPT, [5])]
        assert [one.tokens for one in penalised.generate([PROMPT, [5]], max_new_tokens=8)] == alone


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"prompts": []}, "the prompt is empty"),
        ({"prompts": ""}, "the prompt is empty"),
        ({"prompts": [VOCABULARY]}, f"token {VOCABULARY} is not in the vocabulary"),
        ({"prompts": [-1]}, "token -1 is not in the vocabulary"),
        ({"prompts": [2**40]}, "is not in the vocabulary"),
        ({"prompts": [2**70]}, "a prompt is a list of token ids"),
        ({"prompts": [1.5]}, "a prompt is a list of token ids"),
        ({"prompts": [[1], [VOCABULARY]]}, "is not in the vocabulary"),
        ({"prompts": [[1], []]}, "the prompt is empty"),
        ({"prompts": 3}, "a prompt is no object of type int"),
        ({"prompts": [1] * (CONTEXT + 1), "max_new_tokens": 0}, f"{CONTEXT + 1} tokens do not fit"),
        ({"prompts": [1] * 60, "max_new_tokens": 5}, "60 tokens and 5 new ones do not fit"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": 1.0, "top_k": 0}, "top_k is 0"),
        ({"temperature": 1.0, "top_p": 1.5}, "top_p is 1.5"),
        ({"temperature": 1.0, "seed": -1}, "seed is -1"),
        ({"temperature": 1.0, "seed": 2**31}, "seed is 2147483648"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"top_k": 3}, "top_k has no effect"),
        ({"temperature": 0, "seed": 1}, "seed has no effect"),
        ({"prompts": [[1], [2]], "temperature": 1.0, "seed": 1}, "no seed for several requests"),
        ({"prompts": [[1], [2]], "logprobs": True}, "no logprobs of several requests"),
    ],
)
def test_wrong_arguments_are_refused_with_a_fix(session: Any, arguments: dict[str, Any], said: str):
    given = {"prompts": PROMPT, "max_new_tokens": 2, **arguments}
    with pytest.raises(xrt.InputError, match="Fix: ") as caught:
        session.generate(given.pop("prompts"), **given)
    assert said in str(caught.value)


def test_types_of_arguments_are_checked(session: Any):
    for wrong in (1.5, "3", None, True):
        with pytest.raises(TypeError, match="max_new_tokens is a whole number"):
            session.generate(PROMPT, max_new_tokens=wrong)
    with pytest.raises(TypeError):
        session.generate(PROMPT)


def test_the_context_can_be_filled(session: Any):
    full = [1] * CONTEXT
    assert session.session.run({"tokens": np.array([full])})["logits"].shape[1] == CONTEXT
    assert len(session.generate(full[:-1], max_new_tokens=1).tokens) == 1
    assert session.explain(full).partial  # no step fits any more


def test_wrong_inputs_of_run(session: Any):
    for feeds, said in (
        ({"tokens": np.zeros((1, 0), np.int64)}, "the prompt is empty"),
        ({"tokens": np.zeros((2, 3), np.int64)}, "axis 0 must be 1"),
        ({"tokens": np.zeros((1, 3), np.int32)}, "the model expects int64"),
        ({"token": np.zeros((1, 3), np.int64)}, "did you mean 'tokens'"),
    ):
        with pytest.raises(xrt.InputError, match=said):
            session.session.run(feeds)
    with pytest.raises(xrt.UnsupportedOperationError, match="its own buffers"):
        session.session.bind({"tokens": np.zeros((1, 3), np.int64)})


def test_a_stream_that_is_left_does_not_run_ahead(session: Any):
    stream = session.stream(PROMPT, max_new_tokens=50)
    assert [next(stream), next(stream)] == list(session.generate(PROMPT, max_new_tokens=2).tokens)
    stream.close()
    with pytest.raises(xrt.InputError):
        session.stream(PROMPT, max_new_tokens=CONTEXT)  # at once, not with the first token


def test_threads_get_what_each_gets_alone(session: Any):
    expected = [session.generate([number, number + 1], max_new_tokens=8).tokens for number in range(4)]
    found: dict[int, Any] = {}

    def work(number: int) -> None:
        found[number] = [session.generate([number, number + 1], max_new_tokens=8).tokens for _ in range(5)]

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[number] for number in range(4)] == [[tokens] * 5 for tokens in expected]


def test_a_closed_session_refuses_everything(folder: Path):
    session = xrt.GenerationSession(folder)
    stream = session.stream(PROMPT, max_new_tokens=5)
    next(stream)
    session.close()
    session.close()
    calls: list[Callable[[], Any]] = [
        lambda: next(stream),
        lambda: session.generate(PROMPT, max_new_tokens=1),
        lambda: session.generate([PROMPT, PROMPT], max_new_tokens=1),
        lambda: session.stream(PROMPT, max_new_tokens=1),
        lambda: session.logprobs(PROMPT),
        lambda: session.encode("a"),
        lambda: session.explain(PROMPT),
    ]
    for call in calls:
        with pytest.raises(xrt.XpuRuntimeError, match="closed"):
            call()
    assert "closed" in repr(session)


def test_a_break_in_the_middle_leaves_the_session_usable(session: Any, monkeypatch: pytest.MonkeyPatch):
    from xpuruntime.engines.onnxruntime_genai.model import GenAiSequence

    step, steps = GenAiSequence.step, []

    def broken(self: Any) -> Any:
        steps.append(1)
        if len(steps) == 3:
            raise KeyboardInterrupt
        return step(self)

    expected = session.generate(PROMPT, max_new_tokens=5).tokens
    monkeypatch.setattr(GenAiSequence, "step", broken)
    with pytest.raises(KeyboardInterrupt):
        session.generate(PROMPT, max_new_tokens=5)
    monkeypatch.undo()
    assert session.generate(PROMPT, max_new_tokens=5).tokens == expected


def test_a_length_that_the_policy_does_not_state_is_refused(folder: Path):
    for sizes, fits in (([1, 4], [4]), ([1, "3..5"], [3, 4, 5])):
        policy = {"mode": "strict", "execution": {"shapes": {"tokens": sizes}}}
        with xrt.GenerationSession(folder, policy) as fixed:
            for length in range(1, 8):
                calls = [
                    lambda n=length: fixed.generate([1] * n, 1),
                    lambda n=length: fixed.generate([[1] * n], 1),
                    lambda n=length: fixed.session.run({"tokens": np.ones((1, n), np.int64)}),
                ]
                for call in calls:
                    if length in fits:
                        call()
                    else:
                        with pytest.raises(xrt.InputError, match=r"execution\.shapes|axis 1 must be"):
                            call()


def test_a_child_of_the_process_steps_no_sequence(folder: Path):
    with xrt.GenerationSession(folder) as session:
        stream = session.stream(PROMPT, 5)
        next(stream)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            told = []
            for call in (lambda: next(stream), lambda: session.generate(PROMPT, 1)):
                try:
                    told.append(str(call()))
                except xrt.EngineError as error:
                    told.append(str(error))
            os.write(write, "|".join(told).encode())
            os._exit(0)
        os.waitpid(child, 0)
        told = os.read(read, 10_000).decode().split("|")
        os.close(read)
        os.close(write)
        assert all("forked" in one for one in told), told
        assert next(stream) >= 0


def test_sessions_are_not_copied(session: Any):
    for make in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="holds an engine's state"):
            make(session)


def test_without_a_tokenizer_text_is_refused(folder: Path, copy_of: Callable[[Path], Path]):
    other = copy_of(folder)
    (other / "tokenizer.json").unlink()
    (other / "tokenizer_config.json").unlink()
    with xrt.GenerationSession(other) as session:
        assert len(session.generate(PROMPT, max_new_tokens=2).tokens) == 2
        with pytest.raises(xrt.InputError, match=r"tokenizer.*Fix: pass token ids"):
            session.generate("hi", max_new_tokens=2)


def test_no_new_tokens(session: Any):
    result = session.generate(PROMPT, max_new_tokens=0)
    assert (result.tokens, result.finish, result.first_token_us) == ((), "length", 0.0)
    assert list(session.stream(PROMPT, max_new_tokens=0)) == []
