# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A folder opened by ONNX Runtime GenAI: logits of tokens, sequences that grow, several requests, evidence by phase."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from xpuruntime.engines.base import Observed, Request, closed
from xpuruntime.engines.generation import GenerationModel
from xpuruntime.engines.observation import effective_of
from xpuruntime.engines.onnxruntime.observing.kernels import outside
from xpuruntime.engines.onnxruntime.observing.profile import NodeProfile, read_profile
from xpuruntime.engines.onnxruntime.observing.unit_attribution import attribute_units
from xpuruntime.engines.onnxruntime.opening import LEVELS, NO_CPU
from xpuruntime.errors import (
    EngineError,
    EngineFailed,
    EngineUnavailable,
    InputError,
    ModelError,
    OutOfMemoryError,
    UnsupportedOperationError,
    XpuRuntimeError,
)
from xpuruntime.evidence.documents import COLD, COUNTED, LOADED, checkpoint
from xpuruntime.files.scratch import ScratchFolder

if TYPE_CHECKING:
    from xpuruntime.engines.onnxruntime_genai.controls import GenAiSettings
    from xpuruntime.engines.onnxruntime_genai.folder import GenAiFolder
    from xpuruntime.evidence.records import Unit

_ENGINE = "onnxruntime-genai"
_FATAL = 4
_BOOLEANS = ("enable_cpu_mem_arena", "enable_mem_pattern")
#: Events that the engine keeps between two looks at its requests.
_EVENTS = 256
_OUT_OF_MEMORY = re.compile(r"could not allocate|failed to allocate|bad[_ ]alloc|out of memory", re.IGNORECASE)
_BAD_FOLDER = re.compile(r"JSON Error|Unsupported model_type|Config path|Error parsing|Load model from")


def load_folder(request: Request, settings: GenAiSettings) -> GenAiModel:
    """Open the folder of a request, and read back the device."""
    folder: GenAiFolder = request.model.source
    request.model.check_unchanged()
    handle = _open(folder, settings, request.device, {})
    kind = str(handle.device_type).lower()
    if kind != request.device.partition(":")[0]:
        msg = f"{request.device} was asked for, and the engine opened {folder.folder} on {kind}"
        raise EngineError(msg, fix=f"state device: {kind}", engine=_ENGINE, device=request.device)
    return GenAiModel(handle, request, settings)


def _open(folder: GenAiFolder, settings: GenAiSettings, device: str, extra: Mapping[str, Any]) -> Any:
    try:
        import onnxruntime_genai as engine
    except Exception as error:  # a vendor package can fail in any way
        fix = "install an onnxruntime that fits: pip install --no-deps --upgrade onnxruntime-genai"
        msg = f"the package onnxruntime_genai does not import: {error}"
        raise EngineUnavailable(msg, fix=fix, engine=_ENGINE, device=device) from None
    options: dict[str, Any] = {"log_severity_level": _FATAL}  # failures are raised, and no lines go to stderr
    for name, value in settings.options.items():
        if name == "graph_optimization_level":
            options[name] = LEVELS[value]
        else:
            options[name] = value == "1" if name in _BOOLEANS else value
    if settings.threads is not None:
        options["intra_op_num_threads"] = settings.threads
    try:
        config = engine.Config(folder.folder)
        config.clear_providers()
        if device.startswith("cuda"):
            config.append_provider("cuda")
            config.set_provider_option("cuda", "device_id", str(settings.device_id))
            if not settings.allow_cpu_ops:
                options[NO_CPU] = "1"
        # Each token of a prompt counts: the engine would mask last ones that are the padding, often the end of a text.
        overlay = {"pad_token_id": -1, "decoder": {"session_options": {**options, **extra}}}
        config.overlay(json.dumps({"model": overlay}))
        return engine.Model(config)
    except Exception as error:
        raise _failure(error, f"loading {folder.folder}", device) from None


def _failure(error: Exception, doing: str, device: str) -> XpuRuntimeError:
    text = " ".join(str(error).split()) or type(error).__name__
    message = f"{doing} on {device} failed in ONNX Runtime GenAI: {text}"
    known: dict[str, Any] = {"engine": _ENGINE, "device": device, "status": type(error).__name__}
    if isinstance(error, MemoryError) or _OUT_OF_MEMORY.search(text):
        fix = "use a shorter prompt or fewer new tokens, or close other sessions; this session still works"
        return OutOfMemoryError(message, fix=fix, **known)
    if "fallback to CPU EP has been explicitly disabled" in text:
        message = f"{doing} on {device}: nodes of the graph would run on the CPU"
        fix = "state execution.allow_cpu_ops with their operators, such as [Shape, Gather], or device: cpu"
        return UnsupportedOperationError(message, fix=fix, **known)
    if "not available" in text or "Failed to load library" in text:
        return EngineUnavailable(message, fix="use device: cpu, or install the wheel for this device", **known)
    if _BAD_FOLDER.search(text):
        fix = "correct genai_config.json, or build the folder again with onnxruntime_genai.models.builder"
        return ModelError(message, fix=fix, **known)
    return EngineFailed(message, **known)


class GenAiModel(GenerationModel):
    """A decoder with its cache in the engine. Steps of several sequences take turns: the engine promises no more."""

    engine = _ENGINE
    product = "ONNX Runtime GenAI"
    again = "build the folder again with onnxruntime_genai.models.builder"
    folder: GenAiFolder

    def __init__(self, handle: Any, request: Request, settings: GenAiSettings) -> None:
        super().__init__(handle, request, strict=settings.strict)
        self._settings = settings

    def _logits(self, handle: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        with self._turn:
            return np.array(self._prompted(handle, tokens, len(tokens), {}).get_output("logits"))

    def _prompted(self, handle: Any, tokens: Any, limit: int, search: Mapping[str, Any]) -> Any:
        import onnxruntime_genai as engine

        try:
            parameters = engine.GeneratorParams(handle)
            parameters.set_search_options(max_length=limit, **search)
            generator = engine.Generator(handle, parameters)
            generator.append_tokens(tokens)
        except Exception as error:
            raise self._failed(error) from None
        return generator

    def _failed(self, error: Exception) -> XpuRuntimeError:
        return _failure(error, f"running {self.folder.folder}", self.device)

    @property
    def changes_logits(self) -> tuple[str, ...]:
        """Search options of the folder that have the engine write into the logits of a step."""
        neutral = {"repetition_penalty": 1, "no_repeat_ngram_size": 0, "min_length": 0}
        return tuple(name for name, value in neutral.items() if self.folder.search.get(name, value) != value)

    def sequence(self, tokens: Any, new: int, sampling: Mapping[str, Any]) -> GenAiSequence:
        """Start a sequence: run its prompt, and return what grows by a token in each step."""
        checked, search = self.checked_tokens(tokens, new), self.search_of(sampling)
        if "seed" in search:
            search["random_seed"] = search.pop("seed")
        with self._turn:
            handle = self._handle
            if handle is None:
                closed()
            return GenAiSequence(self, self._prompted(handle, checked, len(checked) + new, search), new)

    def forced(self, checked: Any, prefill: int) -> np.ndarray[Any, Any]:
        """Return the logits after the first `prefill` of tokens, which run at once, and after each of the others."""
        with self._turn:
            if self._handle is None:
                closed()
            generator = self._prompted(self._handle, checked[:prefill], len(checked), {})
            rows = [np.array(generator.get_output("logits")[0])]
        for token in checked[prefill:]:
            with self._turn:
                if self._handle is None:
                    closed()
                try:
                    generator.append_tokens(np.array([token], np.int32))
                    rows.append(np.array(generator.get_output("logits")[0]))
                except Exception as error:
                    raise self._failed(error) from None
        return np.concatenate(rows)

    def requests(self, prompts: Sequence[Any], new: int, sampling: Mapping[str, Any]) -> list[tuple[list[int], str]]:
        """Run several prompts side by side as requests of the engine; return their new tokens, and why each ended."""
        import onnxruntime_genai as engine

        checked, search = [self.checked_tokens(prompt, new) for prompt in prompts], self.search_of(sampling)
        apart = "call generate() for each prompt alone"
        if "seed" in search:
            raise InputError("the engine takes no seed for several requests", fix=f"{apart}, or leave seed out")
        if "min_length" in self.changes_logits:
            raise InputError("the engine takes no search.min_length for several requests", fix=apart)
        drawn = ("temperature", "top_k", "top_p") if search["do_sample"] else ()
        for name in (*drawn, "repetition_penalty", "no_repeat_ngram_size"):
            if name in self.folder.search:
                search.setdefault(name, self.folder.search[name])
        if search.get("top_k") == 1:  # the engine calls it a contradiction to draw one token of one
            search = {name: value for name, value in search.items() if name not in drawn} | {"do_sample": False}
        tokens: list[list[int]] = [[] for _ in checked]
        ends = [""] * len(checked)
        with self._turn:
            if self._handle is None:
                closed()
            try:
                scheduler = engine.Engine(self._handle)
                events = scheduler.create_event_buffer(_EVENTS)
                pending = [scheduler.create_request() for _ in checked]
                for request, prompt in zip(pending, checked, strict=True):
                    turn = engine.TurnOptions(request)
                    turn.set_max_generated_tokens(new)
                    for name, value in search.items():
                        getattr(turn, f"set_{name}")(value)
                    request.begin_turn(prompt, turn)
            except Exception as error:
                raise self._failed(error) from None
        numbers = {id(request): number for number, request in enumerate(pending)}
        while True:
            with self._turn:
                if self._handle is None:
                    closed()
                try:
                    if not scheduler.has_pending_requests():
                        break
                    for event in scheduler.run(events):
                        number = numbers[id(event.request)]
                        if event.flags.value & engine.EngineEventFlags.TOKEN.value:
                            tokens[number].append(int(event.token))
                        if event.flags.value & ~engine.EngineEventFlags.TOKEN.value:
                            ends[number] = ends[number] or event.finish_reason.name
                except Exception as error:
                    raise self._failed(error) from None
        failed = [number for number, end in enumerate(ends) if end not in _ENDS]
        if failed:
            named = ", ".join(f"{number} ({ends[number] or 'no event'})" for number in failed)
            raise EngineFailed(f"requests of the engine failed: {named}", engine=_ENGINE, device=self.device)
        return [(token, _ENDS[end]) for token, end in zip(tokens, ends, strict=True)]

    def tokenizer(self) -> Any:
        """Return the engine's tokenizer of this folder."""
        import onnxruntime_genai as engine

        with self._turn:
            if self._handle is None:
                closed()
            try:
                return engine.Tokenizer(self._handle)
            except Exception as error:
                fix = "pass token ids, or put tokenizer.json and tokenizer_config.json into the folder"
                text = " ".join(str(error).split())
                raise InputError(f"the tokenizer of {self.folder.folder} cannot be read: {text}", fix=fix) from None

    def _watch(self, ready: Mapping[str, Any], runs: int) -> Observed:
        """Run instrumented copies of the model, one for each phase: prompts are profiled apart from single tokens."""
        tokens = self.checked_tokens(ready["tokens"][0])
        phases = {"prefill": 0}
        steps = min(max(1, runs), self.folder.context - len(tokens))
        if steps:
            phases["decode"] = steps
        notes = [] if steps else ["no decode step was observed: the prompt fills the context"]
        source = self._info.named_proto()
        units: list[Unit] = []
        partial, first = not steps, NodeProfile(events=())
        for phase, new in phases.items():
            with ScratchFolder("observe") as directory:
                profile, graph = self._profile(Path(directory), tokens, runs, new)
            joined = attribute_units(
                source,
                graph,
                profile.events,
                None,
                device=self.device,
                allow_cpu_ops=self._settings.allow_cpu_ops,
                engine=_ENGINE,
            )
            units += [msgspec.structs.replace(unit, id=f"{phase}:{unit.id}", phase=phase) for unit in joined.units]
            notes += [f"{phase}: {note}" for note in (*profile.notes, *joined.notes)]
            partial |= profile.partial or joined.partial
            shape = f"{len(tokens)} tokens" if phase == "prefill" else f"1 token after {len(tokens)} and more"
            took = sorted(profile.run_us)[len(profile.run_us) // 2] if profile.run_us else 0.0
            notes.append(f"{phase} is of {shape}: {took:,.1f} us, median of {len(profile.run_us)} instrumented runs")
            first = profile if phase == "prefill" else first
        return Observed(
            units=tuple(units),
            effective=effective_of(units, _ENGINE),
            notes=tuple(notes),
            partial=partial,
            run_us=first.run_us,
            units_us=first.nodes_us if self.device == "cpu" else (),
            outside_us=outside(first.windows, first.spans) if self.device == "cpu" else {},
        )

    def _profile(self, folder: Path, tokens: Any, runs: int, new: int) -> tuple[NodeProfile, Any]:
        """Return the profile and the optimized graph of a copy: of prompts, or of `new` steps after one prompt."""
        import onnx

        optimized = folder / "optimized.onnx"
        entries = {
            "enable_profiling": str(folder / "profile"),
            "session.optimized_model_filepath": str(optimized),
            "session.optimized_model_external_initializers_file_name": f"{optimized.name}.weights",
        }
        handle = _open(self.folder, self._settings, self.device, entries)
        checkpoint(LOADED)
        for number in range(1 if new else runs + 1):
            generator = self._prompted(handle, tokens, len(tokens) + new, {})
            if not number:
                checkpoint(COLD)
        try:
            for _ in range(new):
                best = int(np.argmax(generator.get_output("logits")[0, -1]))
                generator.append_tokens(np.array([best], np.int32))
        except Exception as error:
            raise self._failed(error) from None
        checkpoint(COUNTED)
        del generator, handle  # the profile is written when the last one is gone
        written = next(iter(folder.glob("profile*.json")), None)
        profile = NodeProfile(events=(), partial=True, notes=("no profile was written",))
        if written is not None:
            profile = read_profile(written)
        return profile, onnx.load(str(optimized), load_external_data=False) if optimized.exists() else None


#: Why a request ended, by the engine's name.
_ENDS = {"EOS": "stop", "STOP_STRING": "stop", "MAX_GENERATED_TOKENS": "length", "MAX_SESSION_TOKENS": "length"}


class GenAiSequence:
    """A sequence that grows by a token in each step. Not to be shared between threads."""

    def __init__(self, model: GenAiModel, generator: Any, left: int) -> None:
        self._model, self._generator = model, generator
        self._left = left
        self.done = self.ended = False

    def step(self) -> tuple[int, np.ndarray[Any, Any]]:
        """Return the next token, and the logits that it was chosen from.

        The last step sets `done`, and `ended` too where its token ends the text.
        """
        self._model.check_alive()
        with self._model._turn:
            if self._model._handle is None:
                closed()
            try:
                self._generator.generate_next_token()
                token = int(self._generator.get_next_tokens()[0])
                self._left -= 1
                self.ended = token in self._model.folder.ends
                self.done = self.ended or not self._left or bool(self._generator.is_done())
                return token, np.array(self._generator.get_output("logits")[0, -1])
            except Exception as error:
                raise self._model._failed(error) from None
