# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Pipelines of OpenVINO GenAI: a folder with a language model, checked and read, and the model that runs it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from xpuruntime.engines.base import Judgement, Observed, Request, closed
from xpuruntime.engines.generation import (
    TOKENIZER,
    ConfigFile,
    Generated,
    GenerationFolder,
    GenerationModel,
    decoder_info,
    files_beside,
)
from xpuruntime.engines.model.file import MODEL_CONFIG
from xpuruntime.errors import (
    EngineFailed,
    EngineUnavailable,
    InputError,
    ModelError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.evidence.documents import COLD, COUNTED, LOADED, checkpoint
from xpuruntime.evidence.records import KeySeen
from xpuruntime.files.paths import kind_of
from xpuruntime.runtime.interruptible_waits import kept_signal_stack

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.openvino_genai.engine import PipelineSettings

_ENGINE = "openvino-genai"
_AGAIN = "export the model again: optimum-cli export openvino"
_GRAPH = "openvino_model.xml"
_GREEDY = {"temperature": 0.0}
#: Properties of the pipeline that a compiled model does not take.
_OF_PIPELINE = ("ATTENTION_BACKEND",)
_UNREAD = "LLMPipeline gives no compiled model to read it from"


def load_pipeline(request: Request, judgement: Judgement[PipelineSettings]) -> PipelineModel:
    """Open the folder of a request."""
    request.model.check_unchanged()
    try:
        import openvino_genai as engine
    except Exception as error:  # a vendor package can fail in any way
        fix = "pip install --upgrade openvino-genai"
        text = " ".join(str(error).split())
        raise EngineUnavailable(f"openvino_genai does not import: {text}", fix=fix, engine=_ENGINE) from None
    folder = request.model.source.folder
    _check_graph(request.model.source)
    try:
        with kept_signal_stack():
            handle = engine.LLMPipeline(folder, "CPU", **judgement.settings.properties)
    except Exception as error:
        raise _failed(error, f"loading {folder}") from None
    return PipelineModel(handle, request, judgement)


def _check_graph(facts: GenerationFolder) -> None:
    """Refuse a graph that cannot be read, or has other tokens than the configuration: those beyond are read as some."""
    import openvino

    path = Path(facts.folder) / _GRAPH
    try:
        with kept_signal_stack():
            outputs = openvino.Core().read_model(str(path)).outputs
            width = next(port.partial_shape[-1] for port in outputs if "logits" in port.get_names())
    except Exception as error:
        text = " ".join(str(error).split()) or "it has no output 'logits'"
        raise ModelError(f"{path} cannot be read: {text:.300}", fix=_AGAIN, engine=_ENGINE) from None
    if width.is_static and width.get_length() != facts.vocabulary:
        fix = f"set vocab_size to {width.get_length()} in {MODEL_CONFIG}"
        told = f"vocab_size is {facts.vocabulary}, and {_GRAPH} gives {width.get_length()} logits"
        raise ModelError(f"{facts.folder}: {told}", fix=fix, engine=_ENGINE)


def _failed(error: Exception, doing: str) -> XpuRuntimeError:
    text = " ".join(str(error).split()) or type(error).__name__
    return EngineFailed(f"{doing} failed in OpenVINO GenAI: {text:.500}", engine=_ENGINE, device="cpu")


class PipelineModel(GenerationModel):
    """A pipeline; calls take turns.

    It hands no logits over: those of `run` and `forced` come from a compiled model of the same graph beside it.
    """

    engine = _ENGINE
    product = "OpenVINO GenAI"
    again = _AGAIN

    def __init__(self, handle: Any, request: Request, judgement: Judgement[PipelineSettings]) -> None:
        super().__init__(handle, request, strict=judgement.settings.strict)
        self._settings, self._controls = judgement.settings, judgement.controls
        self._compiled: Any = None

    def _request_of_graph(self) -> Any:
        """Return an inference request of the graph, with an empty cache."""
        import openvino

        if self._handle is None:
            closed()
        with self._turn:
            if self._compiled is None:
                stated = {k: v for k, v in self._settings.properties.items() if k not in _OF_PIPELINE}
                try:
                    with kept_signal_stack():
                        self._compiled = openvino.Core().compile_model(
                            str(Path(self.folder.folder) / _GRAPH), "CPU", stated
                        )
                except Exception as error:
                    raise _failed(error, f"compiling the graph of {self.folder.folder}") from None
                self._log.add("logits of a second compiled model", "the pipeline hands none over")
            return self._compiled.create_infer_request()

    def _rows(self, parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
        request, done, rows = self._request_of_graph(), 0, []
        names = {name for port in self._compiled.inputs for name in port.get_names()}
        try:
            for part in parts:
                total = done + len(part)
                feeds = {
                    "input_ids": part[None].astype(np.int64),
                    "attention_mask": np.ones((1, total), np.int64),
                    "position_ids": np.arange(done, total, dtype=np.int64)[None],
                    "beam_idx": np.zeros(1, np.int32),
                }
                result = request.infer({name: value for name, value in feeds.items() if name in names})
                rows.append(np.array(result["logits"][0], dtype=np.float32))
                done = total
        except Exception as error:
            raise _failed(error, f"running the graph of {self.folder.folder}") from None
        return np.concatenate(rows)

    def _logits(self, handle: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        del handle
        return self._rows([tokens])[None]

    def forced(self, checked: Any, prefill: int) -> np.ndarray[Any, Any]:
        """Return the logits after the first tokens, which run at once, and after each of the others."""
        return self._rows([checked[:prefill], *(checked[index : index + 1] for index in range(prefill, len(checked)))])

    def sequence(self, tokens: Any, new: int, sampling: Mapping[str, Any]) -> NoReturn:
        """Refuse: a pipeline generates as a whole."""
        del tokens, new, sampling
        fix = "use generate()"
        raise UnsupportedOperationError("a pipeline of OpenVINO GenAI yields no single steps", fix=fix, engine=_ENGINE)

    def generated(self, tokens: Any, new: int, sampling: Mapping[str, Any], *, logprobs: bool) -> Generated:
        """Generate by the pipeline."""
        if logprobs:
            fix = "read session.logprobs([*prompt, *result])"
            raise InputError("the pipeline hands no logits of its steps over", fix=fix)
        sequences, first_ns = self._whole([self.checked_tokens(tokens, new)], new, self.search_of(sampling))
        return Generated(sequences[0], bool(sequences[0]) and sequences[0][-1] in self.folder.ends, [], first_ns)

    def requests(self, prompts: Sequence[Any], new: int, sampling: Mapping[str, Any]) -> list[tuple[list[int], str]]:
        """Run several prompts as one batch."""
        checked, search = [self.checked_tokens(prompt, new) for prompt in prompts], self.search_of(sampling)
        if "seed" in search:
            raise InputError("several prompts take no seed", fix="call generate() for each prompt, or leave seed out")
        sequences, _ = self._whole(checked, new, search)
        return [(tokens, "stop" if tokens and tokens[-1] in self.folder.ends else "length") for tokens in sequences]

    def _whole(self, prompts: list[Any], new: int, search: Mapping[str, Any]) -> tuple[list[list[int]], int]:
        import openvino
        import openvino_genai as engine

        longest = max(map(len, prompts))
        ids = np.full((len(prompts), longest), next(iter(self.folder.ends), 0), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt, 1
        with self._turn:
            handle = self._handle
            if handle is None:
                closed()
            try:
                config = handle.get_generation_config()
                config.max_new_tokens, config.do_sample = new, search["do_sample"]
                config.stop_token_ids = set(self.folder.ends)
                for name, attribute in (("temperature",) * 2, ("top_k",) * 2, ("top_p",) * 2, ("seed", "rng_seed")):
                    if name in search:
                        setattr(config, attribute, search[name])
                inputs = engine.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
                result = handle.generate(inputs, config)
            except Exception as error:
                raise _failed(error, f"running {self.folder.folder}") from None
        return [list(map(int, tokens)) for tokens in result.tokens], int(result.perf_metrics.get_ttft().mean * 1e6)

    def tokenizer(self) -> Any:
        """Return the pipeline's tokenizer."""
        handle = self._handle
        if handle is None:
            closed()
        return _Tokenizer(handle.get_tokenizer())

    def _watch(self, ready: Mapping[str, Any], runs: int) -> Observed:
        tokens = self.checked_tokens(ready["tokens"][0])
        new = min(2, self.folder.context - len(tokens))
        if not new:
            raise InputError("the prompt fills the context, so that nothing is generated", fix="give a shorter prompt")
        checkpoint(LOADED)
        self.generated(tokens, new, _GREEDY, logprobs=False)
        checkpoint(COLD)
        spent = [self.generated(tokens, new, _GREEDY, logprobs=False).first_ns / 1e3 for _ in range(runs)]
        checkpoint(COUNTED)
        keys = {
            control.key: KeySeen(observed="-", status="unobservable", reason=_UNREAD)
            for control in self._controls
            if control.key in ("execution.precision", "execution.threads")
            or control.key.startswith(f"execution.provider_options.{_ENGINE}.")
        }
        backend = self._settings.properties["ATTENTION_BACKEND"]
        generated = self.generated(tokens, new, _GREEDY, logprobs=False).tokens
        same = (
            generated
            == self.forced(np.array([*tokens, *generated[:-1]]), len(tokens))[-len(generated) :].argmax(axis=1).tolist()
        )
        notes = (
            f"{_UNREAD}: units, device and precision are unobservable; ATTENTION_BACKEND={backend} was stated",
            f"the pipeline's greedy tokens are {'' if same else 'not '}those of the graph, compiled beside it",
        )
        return Observed(
            effective={"execution.engine": _ENGINE}, notes=notes, partial=True, keys=keys, run_us=tuple(spent)
        )

    def close(self) -> None:
        """Release the pipeline and the compiled model."""
        super().close()
        self._compiled = None


class _Tokenizer:
    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text).input_ids.data[0].tolist()
        return ids

    def decode(self, ids: Any) -> str:
        return str(self._tokenizer.decode([int(token) for token in ids]))


_ONLY = {"num_beams": 1, "num_return_sequences": 1, "stop_strings": None}


def inspect_pipeline(folder: Path) -> ModelInfo:
    """Read and check the configuration of a folder of OpenVINO. The model takes token ids and returns logits."""
    file = ConfigFile(folder, MODEL_CONFIG, _AGAIN)
    config, name = file.values, "generation_config.json"
    stated = ConfigFile(folder, name, _AGAIN) if kind_of(folder / name) != "missing" else None
    values = {} if stated is None else stated.values
    if stated is not None:
        stated.only(values, "", _ONLY)
        stated.penalty(values, "repetition_penalty")
    names = (_GRAPH, "openvino_model.bin", "openvino_tokenizer.xml", "openvino_tokenizer.bin")
    beside = files_beside(folder, (*names, "openvino_detokenizer.xml", "openvino_detokenizer.bin", name, *TOKENIZER))
    there = {entry.location for entry in beside}
    missing = next((file_name for file_name in names[:3] if file_name not in there), None)
    if missing is not None:
        raise file.refuse(f"it has no {missing}", _AGAIN)
    ends = (file if "eos_token_id" not in values else stated or file).ends(
        values if "eos_token_id" in values else config, "eos_token_id"
    )
    facts = GenerationFolder(
        folder=str(folder),
        kind=file.text(config, "model_type"),
        vocabulary=file.count(config, "vocab_size"),
        context=file.count(config, "max_position_embeddings"),
        ends=ends,
        search={key: value for key, value in values.items() if isinstance(value, (bool, int, float))},
    )
    return decoder_info(facts, form="openvino-genai", beside=beside)
