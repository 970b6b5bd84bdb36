# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Tokens of language models on a command line: what is generated, and how long it takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from xpuruntime.engines.model.file import GENERATION_FORMATS
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from rich.progress import Progress

    from xpuruntime.cli.session import Feeds
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.inference import InferenceSession

#: New tokens of a timed run where none are stated.
NEW_TOKENS = 32


def check_generation(model: ModelInfo, new: int | None, prompt: str | None, feeds: Feeds) -> Feeds:
    """Return the inputs, none of them generated beside a prompt. Options that other models lack are refused."""
    if model.format not in GENERATION_FORMATS and (new is not None or prompt is not None):
        fix = "leave --new-tokens and --prompt out, or name a folder with a language model"
        raise InputError(f"{model.path} generates no tokens", fix=fix)
    if prompt is not None and new is None:
        raise InputError("--prompt is text before new tokens, and none are asked for", fix="state --new-tokens N")
    if prompt is not None and not feeds.probed:
        raise InputError("--prompt and --input both give the tokens of the prompt", fix="leave one of them out")
    return feeds if prompt is None else msgspec.structs.replace(feeds, probed=())


def _prompt(feeds: Feeds, prompt: str | None) -> Any:
    return feeds.arrays["tokens"][0] if prompt is None else prompt


def show_generation(session: InferenceSession, feeds: Feeds, new: int, prompt: str | None, *, as_json: bool) -> None:
    """Generate once and print it."""
    from xpuruntime.cli.output import console, print_json
    from xpuruntime.evidence.render_text.changes import duration_text
    from xpuruntime.inference import GenerationSession

    result = GenerationSession.over(session).generate(_prompt(feeds, prompt), new)
    plan = session.plan
    if as_json:
        summary: dict[str, Any] = {
            "schema": "xpuruntime.generation/1",
            "model": session.model.path,
            "engine": plan.engine,
        }
        summary |= {"device": plan.device, "request_hash": plan.request_hash, "execution_hash": plan.execution_hash}
        summary |= {"prompt": prompt, "probe_inputs": feeds.probed, "tokens": result.tokens}
        summary |= {"text": result.text, "finish": result.finish, "first_token_us": result.first_token_us}
        print_json({**summary, "total_us": result.total_us})
        return
    if result.text is not None:
        console().print(result.text, soft_wrap=True, markup=False, highlight=False)
    console().print(f"tokens: {', '.join(map(str, result.tokens))}", soft_wrap=True)
    ended = f"{len(result.tokens)} tokens" + (", ended by the model" if result.finish == "stop" else "")
    first, text = duration_text(result.first_token_us), duration_text(result.total_us)
    console().print(f"{plan.candidate}, {ended}, first token after {first}, all after {text}", soft_wrap=True)


def time_generation(
    session: InferenceSession,
    feeds: Feeds,
    new: int,
    prompt: str | None,
    warmup: int,
    runs: int,
    samples: dict[str, list[float]],
    bar: Progress,
) -> dict[str, Any]:
    """Time the first token and those after it, into `samples`; return what was generated and how fast."""
    from xpuruntime.inference import GenerationSession

    generating = GenerationSession.over(session)
    tokens = generating.encode(prompt) if prompt is not None else feeds.arrays["tokens"][0]
    task = bar.add_task("generate", total=warmup + runs)
    results = []
    for number in range(warmup + runs):
        result = generating.generate(tokens, new)
        if number >= warmup:
            results.append(result)
        bar.update(task, completed=number + 1, refresh=True)
    samples["first token"] = [result.first_token_us for result in results]
    later = [
        (generation.total_us - generation.first_token_us) / (len(generation.tokens) - 1)
        for generation in results
        if len(generation.tokens) > 1
    ]
    if later:
        samples["token after it"] = later
    import statistics

    rate = 1e6 / statistics.median(later) if later else None
    return {
        "prompt_tokens": len(tokens),
        "new_tokens": len(results[0].tokens),
        "finish": results[0].finish,
        "tokens_per_second": rate,
    }
