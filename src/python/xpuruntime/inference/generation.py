# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`GenerationSession`: a language model under a policy, with tokens, logprobs and evidence by phase."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack

import msgspec
import numpy as np

from xpuruntime.argument_types import COUNT, FLAG, TEXT, check_types
from xpuruntime.engines.generation import Generated, GenerationModel
from xpuruntime.engines.model.file import GENERATION_CONFIG, GENERATION_FORMATS, MODEL_CONFIG, generation_folder
from xpuruntime.errors import InputError, ModelError
from xpuruntime.generation.logprobs import normalized
from xpuruntime.inference.session import InferenceSession

if TYPE_CHECKING:
    import os

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.registry import EngineRegistry
    from xpuruntime.evidence import Report
    from xpuruntime.inference.session_arguments import PolicyAliases, PolicyLike
    from xpuruntime.lockfile.records import Lock
    from xpuruntime.planning import Plan
    from xpuruntime.policies import Policy
    from xpuruntime.policies.execution_policy import Precision
    from xpuruntime.runtime.machine import Machine

    Prompt = str | Sequence[int] | np.ndarray[Any, Any]

_FOLDERS = (
    "name a folder that `python -m onnxruntime_genai.models.builder`, save_pretrained of transformers or "
    "`optimum-cli export openvino` wrote; InferenceSession runs others"
)


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """What was generated for one prompt.

    Attributes
    ----------
    tokens : tuple of int
        The new tokens, without the prompt. One that ends the text is the last; of several prompts, ONNX Runtime GenAI
        does not give it.
    finish : {"stop", "length"}
        A token that ends the text came, or `max_new_tokens` were there.
    text : str or None
        The tokens as text, where the prompt was text.
    logprobs : tuple of float or None
        Natural logarithm of the probability of each token by the model, before sampling changes it; where asked for.
    first_token_us, total_us : float
        Microseconds until the first token and until the last was there; 0 for one of several prompts, which share time.
    """

    tokens: tuple[int, ...]
    finish: Literal["stop", "length"]
    text: str | None = None
    logprobs: tuple[float, ...] | None = None
    first_token_us: float = 0.0
    total_us: float = 0.0

    def __iter__(self) -> Iterator[int]:
        return iter(self.tokens)


class GenerationSession:
    """A language model loaded under a policy. It is an `xpuruntime.generation.LogprobSource`, for gates.

    Parameters
    ----------
    folder : path
        With ``genai_config.json``, a decoder in ONNX and its tokenizer, as ``onnxruntime_genai.models.builder`` writes
        it; of transformers, with a decoder in safetensors; or of OpenVINO, with ``openvino_model.xml``.
    policy, device, engine, precision, plan, lock, frozen, registry, machine, **aliases
        As for `InferenceSession`.

    Attributes
    ----------
    plan : Plan
        What was decided and why.

    Raises
    ------
    ModelError
        The folder or a file in it is missing, is no such file, or leads outside of the folder.
    XpuRuntimeError
        As `InferenceSession`.

    Examples
    --------
    >>> with xrt.GenerationSession("folder", policy="policy.yaml") as session:  # doctest: +SKIP
    ...     result = session.generate([1, 15043], max_new_tokens=8)
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        policy: PolicyLike | None = None,
        *,
        device: str | None = None,
        engine: str | Sequence[str] | None = None,
        precision: Precision | None = None,
        plan: Plan | None = None,
        lock: str | os.PathLike[str] | None = None,
        frozen: bool = False,
        registry: EngineRegistry | None = None,
        machine: Machine | None = None,
        **aliases: Unpack[PolicyAliases],
    ) -> None:
        if not any(generation_folder(folder, name) for name in (GENERATION_CONFIG, MODEL_CONFIG)):
            shown = repr(folder) if isinstance(folder, str) else str(folder)
            reason = f"it is no folder with {GENERATION_CONFIG} or {MODEL_CONFIG}"
            raise ModelError(f"cannot generate with {shown:.200}: {reason}", fix=_FOLDERS)
        self._session = InferenceSession(
            folder,
            policy,
            device=device,
            engine=engine,
            precision=precision,
            plan=plan,
            lock=lock,
            frozen=frozen,
            registry=registry,
            machine=machine,
            **aliases,
        )
        self._texts: Any = None

    @classmethod
    def over(cls, session: InferenceSession) -> GenerationSession:
        """Return what generates by a session that is open. Closing it closes the session."""
        if session.model.format not in GENERATION_FORMATS:
            raise ModelError(f"{session.model.path} is no language model in a folder", fix=_FOLDERS)
        result = cls.__new__(cls)
        result._session, result._texts = session, None
        return result

    @property
    def plan(self) -> Plan:
        """What was decided and why."""
        return self._session.plan

    @property
    def policy(self) -> Policy:
        """The policy that the session runs under."""
        return self._session.policy

    @property
    def model(self) -> ModelInfo:
        """What was read from the folder."""
        return self._session.model

    @property
    def lock(self) -> Lock | None:
        """The lock that the session was opened under, if any."""
        return self._session.lock

    @property
    def session(self) -> InferenceSession:
        """The session that gives the logits of tokens."""
        return self._session

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        logprobs: bool = False,
    ) -> Any:
        """Generate tokens for a prompt, or for several side by side. Safe to call from many threads.

        Parameters
        ----------
        prompts : str, list of int, or a list of these
            Token ids, or text for the tokenizer of the folder. Several prompts run as requests of the engine.
        max_new_tokens : int
            Most new tokens for each prompt; 0 or more.
        temperature : float
            0 takes the best token in each step, whatever ``search.do_sample`` of the folder states. Above 0, tokens are
            drawn.
        top_k, top_p : int, float, optional
            Of the `top_k` best tokens, and of the best that have the probability `top_p` together, one is drawn.
            Default: as the folder states.
        seed : int, optional
            The same seed draws the same tokens. For one prompt.
        logprobs : bool
            Also return the logprob of each token. For one prompt.

        Returns
        -------
        Generation or list of Generation
            As `prompts` is one prompt or several.

        Raises
        ------
        InputError
            A prompt is empty, too long for the context, or has a token that is not in the vocabulary; or a value is
            out of range, or would have no effect.
        EngineFailed
            The engine failed, for one of several prompts too.
        XpuRuntimeError
            The session is closed.
        """
        check_types(
            {"max_new_tokens": COUNT, "logprobs": FLAG}, {"max_new_tokens": max_new_tokens, "logprobs": logprobs}
        )
        if max_new_tokens < 0:
            raise InputError(f"max_new_tokens is {max_new_tokens}", fix="state 0 or more")
        loaded = self._loaded()
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        if _is_one(prompts):
            return self._generate(loaded, prompts, max_new_tokens, sampling, logprobs=logprobs)
        if logprobs:
            raise InputError("the engine gives no logprobs of several requests", fix="call generate() for each prompt")
        tokens = [self._tokens(prompt) for prompt in prompts]
        if not tokens or not max_new_tokens:
            loaded.search_of(sampling)
            requests: list[tuple[list[int], str]] = [([], "length") for _ in map(loaded.checked_tokens, tokens)]
        else:
            requests = loaded.requests(tokens, max_new_tokens, sampling)
        return [
            Generation(tokens=tuple(new), finish=end, text=self.decode(new) if isinstance(prompt, str) else None)  # type: ignore[arg-type]
            for prompt, (new, end) in zip(prompts, requests, strict=True)
        ]

    def _generate(
        self, loaded: GenerationModel, prompt: Any, most: int, sampling: dict[str, Any], *, logprobs: bool
    ) -> Generation:
        if logprobs and loaded.changes_logits:
            named = ", ".join(f"search.{name}" for name in loaded.changes_logits)
            msg = f"{named} of the folder changes the logits of a step, so that they are not the model's"
            raise InputError(msg, fix="read session.logprobs([*prompt, *result])")
        tokens = self._tokens(prompt)
        began = time.perf_counter_ns()
        if most:
            generated = loaded.generated(tokens, most, sampling, logprobs=logprobs)
        else:
            loaded.checked_tokens(tokens)
            loaded.search_of(sampling)
            generated = Generated([], ended=False, likely=[], first_ns=0)
        return Generation(
            tokens=tuple(generated.tokens),
            finish="stop" if generated.ended else "length",
            text=self.decode(generated.tokens) if isinstance(prompt, str) else None,
            logprobs=tuple(generated.likely) if logprobs else None,
            first_token_us=generated.first_ns / 1e3,
            total_us=(time.perf_counter_ns() - began) / 1e3,
        )

    def stream(
        self,
        prompt: Prompt,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | None = None,
    ) -> Iterator[int]:
        """Yield the tokens that `generate` returns, each as soon as it is there.

        The prompt runs with the first token. To stop early, leave the loop: nothing runs ahead.
        """
        _check_most(max_new_tokens)
        loaded, tokens = self._loaded(), self._tokens(prompt)
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        loaded.search_of(sampling)
        loaded.checked_tokens(tokens, max_new_tokens)
        return self._steps(loaded, tokens, max_new_tokens, sampling)

    def _steps(self, loaded: GenerationModel, tokens: Any, most: int, sampling: dict[str, Any]) -> Iterator[int]:
        if not most:
            return
        sequence = loaded.sequence(tokens, most, sampling)
        while not sequence.done:
            yield sequence.step()[0]

    def logprobs(self, tokens: Prompt, *, prefill: int | None = None) -> np.ndarray[Any, np.dtype[np.float64]]:
        """Return the logprobs of the whole vocabulary at each token but the first, whatever tokens the model prefers.

        Parameters
        ----------
        tokens : list of int, or str
            At least two tokens, such as a prompt with what was generated for it.
        prefill : int, optional
            The number of tokens that run at once; those after it run one by one, over the cache, as in a generation.
            Default: all run at once.

        Returns
        -------
        array of float64, of shape (tokens - 1, vocabulary)
            Row ``i`` is of token ``i + 1``, as the tokens before it predict it. Where the graph gives the logits of the
            last token only, rows of tokens within the prefill are missing at the start.

        Raises
        ------
        InputError
            There are fewer than two tokens, `prefill` is not from 1 to the number of tokens, or as `generate`.
        """
        loaded = self._loaded()
        ids = loaded.checked_tokens(self._tokens(tokens))
        check_types({"prefill": COUNT}, {"prefill": prefill}, optional=("prefill",))
        if len(ids) < 2:
            raise InputError("the first token has no logprob, and there is no other", fix="pass two tokens or more")
        if prefill is not None and not 1 <= prefill <= len(ids):
            raise InputError(f"prefill is {prefill}, and there are {len(ids)} tokens", fix=f"state 1 to {len(ids)}")
        return normalized(loaded.forced(ids[:-1], len(ids) if prefill is None else prefill))

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text by the tokenizer of the folder. Raises `InputError` where there is none."""
        check_types({"text": TEXT}, {"text": text})
        return [int(token) for token in self._tokenizer().encode(text)]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return tokens as text by the tokenizer of the folder. Raises `InputError` where there is none."""
        ids = np.asarray(tokens, np.int32)
        return str(self._tokenizer().decode(ids)) if len(ids) else ""

    def _tokenizer(self) -> Any:
        loaded = self._loaded()
        if self._texts is None:
            self._texts = loaded.tokenizer()
        return self._texts

    def _tokens(self, prompt: Any) -> Any:
        return self.encode(prompt) if isinstance(prompt, str) else prompt

    def explain(self, prompt: Prompt | None = None, *, runs: int = 10) -> Report:
        """Run instrumented copies of the prompt's prefill and of decode steps, and report requested and observed.

        Parameters
        ----------
        prompt : str or list of int, optional
            Default: a short one that is generated; the report says so.
        runs : int
            Timed prefills, and decode steps, after a cold one.

        Returns
        -------
        Report
            Each unit has the `phase` that it ran in, ``"prefill"`` or ``"decode"``.
        """
        loaded = self._loaded()
        if prompt is None:
            return self._session.explain(runs=runs)
        tokens = loaded.checked_tokens(self._tokens(prompt))
        return self._session.explain({"tokens": tokens[None].astype(np.int64)}, runs=runs)

    def _loaded(self) -> GenerationModel:
        loaded: Any = self._session._open()
        return loaded  # type: ignore[no-any-return]

    def close(self) -> None:
        """Release the model. Idempotent; a sequence that another thread generates ends with an error."""
        self._texts = None
        self._session.close()

    def __enter__(self) -> GenerationSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> Never:
        raise TypeError(f"{self!r} cannot be pickled or copied: it holds an engine's state; open one in each process")

    def __repr__(self) -> str:
        state = "closed" if self._session._loaded is None else f"{self.plan.engine}@{self.plan.device}"
        return f"<GenerationSession {self.model.source.folder!r} {state}>"


def _check_most(count: Any) -> None:
    check_types({"max_new_tokens": COUNT}, {"max_new_tokens": count})
    if count < 0:
        raise InputError(f"max_new_tokens is {count}", fix="state 0 or more")


def _is_one(prompts: Any) -> bool:
    """Whether it is one prompt: text, or whole numbers."""
    if isinstance(prompts, str):
        return True
    if isinstance(prompts, np.ndarray):
        return prompts.ndim < 2
    if not hasattr(prompts, "__len__"):
        fix = "pass text, a list of token ids, or a list of these"
        raise InputError(f"a prompt is no object of type {type(prompts).__name__}", fix=fix)
    return not any(isinstance(prompt, (str, list, tuple, np.ndarray)) for prompt in prompts)
