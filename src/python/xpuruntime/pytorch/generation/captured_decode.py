# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`CapturedDecode`: whole decode steps of a model of transformers as CUDA graphs, under its own ``generate``."""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from xpuruntime.errors import UnsupportedOperationError, XpuRuntimeError
from xpuruntime.notebook import one_line
from xpuruntime.printable import bytes_text, error_line, printable
from xpuruntime.pytorch import _private_api
from xpuruntime.pytorch.call_scope.generation_calls import generate_of
from xpuruntime.pytorch.capture.api import compiled_by
from xpuruntime.pytorch.capture.captured_state import CapturedState, StateSnapshot
from xpuruntime.pytorch.capture.graph_key import GraphInfo, GraphKey
from xpuruntime.pytorch.capture.step_program import uncached_autocast, warnings_of_torch
from xpuruntime.pytorch.dispatch import context, tuning
from xpuruntime.pytorch.explanation.graph_calls import watched_capture
from xpuruntime.pytorch.generation.decode_calls import (
    NotCapturedError,
    check_prompt,
    choice_of,
    refuse_mode,
    refuse_training,
    why_apart,
    why_plain,
)
from xpuruntime.pytorch.generation.decode_lanes import Lane, ModelFacts
from xpuruntime.pytorch.generation.fused_decoder import FusedDecoder, NotFusedError, kernels_for
from xpuruntime.pytorch.generation.joined_products import JoinedProducts
from xpuruntime.pytorch.weights import few_rows

if TYPE_CHECKING:
    from xpuruntime.pytorch.capture.graph_recorder import CapturedGraph, GraphRecorder
    from xpuruntime.pytorch.explanation.graph_calls import GraphCalls
    from xpuruntime.pytorch.generation.decode_calls import Choice

_WARMUP = 3
_signature_of = functools.cache(inspect.signature)
#: Arguments of ``generate`` that its own loops alone know, or that transformers keeps from a callable.
_LEFT = ("custom_generate", "cache", "past_key_values", "inputs_embeds", "assistant_model", "tokenizer")


@dataclass(frozen=True)
class DecodeReport:
    """What of the decoding ran as graphs, what did not, and why.

    Attributes
    ----------
    device : str
    reasons : dict of str to int
        Why tokens were made eagerly, and how many calls that were; of a device without graphs, how many calls so far.
    notes : tuple of str
    graphs : tuple of GraphInfo
        Least recently used first.
    captures, replays : int
    eager_tokens : int
        Steps of the loop that ran eagerly: first tokens, and all where nothing is captured.
    host_reads : int
        How often the host asked the device whether all texts had ended.
    kv_ranges : tuple of int
    cache_bytes : int
        Caches and static tensors of all batch sizes so far.
    """

    device: str
    reasons: dict[str, int]
    notes: tuple[str, ...]
    graphs: tuple[GraphInfo, ...]
    captures: int
    replays: int
    eager_tokens: int
    host_reads: int
    kv_ranges: tuple[int, ...]
    cache_bytes: int

    def __str__(self) -> str:
        lines = [
            f"decode on {self.device}: {self.captures} graphs captured, {self.replays} steps replayed, "
            f"{self.eager_tokens} eager; the host asked {self.host_reads} times for the end",
            f"  cache: {bytes_text(self.cache_bytes)}, read up to {', '.join(map(str, self.kv_ranges))}",
            *(f"  graph {graph.key}: {bytes_text(graph.bytes)}, {graph.hits} steps" for graph in self.graphs),
            *(f"  eager: {reason} ({count} calls)" for reason, count in self.reasons.items()),
            *(f"  note: {note}" for note in self.notes),
        ]
        return printable("\n".join(lines))

    __repr__ = one_line

    def _repr_html_(self) -> str:
        from xpuruntime.notebook import fragment, fragment_lines

        return fragment([fragment_lines(str(self).splitlines())])


@dataclass
class _Graph:
    recording: CapturedGraph
    name: str
    #: What the graph refers to, apart from the lane: processors, tokens that end a text, the policy with its kernels.
    kept: tuple[Any, ...]
    calls: GraphCalls


class CapturedDecode:
    """A model whose decode steps are replayed where they can be. Made by `capture_decode`.

    One thread at a time calls it. It cannot be copied or pickled: capture the copy of the model.
    """

    def __init__(
        self,
        model: Any,
        device: torch.device,
        recorder: GraphRecorder | None,
        max_length: int,
        batches: tuple[int, ...],
        extents: tuple[int, ...],
        check_every: int,
        max_graphs: int,
        fuse: bool,
        tolerance: float | None,
        compile: bool | Mapping[str, Any],
        strict: bool | None,
        why_eager: str,
    ) -> None:
        self._model = model
        self._generate = generate_of(model)
        self._device = device
        self._recorder = recorder
        self._max_length = max_length
        self._batches = batches
        self._extents = extents
        self._check_every = check_every
        self._max_graphs = max_graphs
        self._fuse = fuse
        self._tolerance = tolerance
        self._compile = compile
        self._strict = strict
        self._why_eager = why_eager
        self._lock = threading.Lock()
        #: By batch size and type of autocast, which is that of the cache.
        self._lanes: dict[tuple[int, torch.dtype | None], Lane] = {}
        self._graphs: OrderedDict[Any, _Graph] = OrderedDict()
        self._failed: dict[Any, str] = {}
        self._reasons: Counter[str] = Counter()
        self._notes: dict[str, None] = {}
        self._captures = self._replays = self._eager_tokens = self._host_reads = 0
        self._adopt()

    def _adopt(self) -> None:
        self._apart = why_apart(self._model)
        plain = self._apart or why_plain(self._model)
        self._joined = JoinedProducts(self._model) if self._fuse and not plain else None
        #: Made when it is first needed: the decoder, or why there is none.
        self._fused: FusedDecoder | str | None = None
        self._facts: ModelFacts | None = ModelFacts(self._model)
        self._surroundings = GraphKey(CapturedState(modules=[self._model]), self._device)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model's own ``generate`` does, with its arguments and its result."""
        return self._run(args, kwargs, ahead=False)

    def warm(self, **kwargs: Any) -> int:
        """Capture the graphs of all batch sizes and ranges for such arguments of ``generate``. Returns how many.

        Nothing is generated; without a CUDA device, nothing is captured.
        """
        before = self._captures
        if self._recorder is not None:
            for batch in self._batches:
                ids = torch.ones(batch, 1, dtype=torch.long, device=self._device)
                options = {"max_length": self._max_length, **kwargs, "attention_mask": torch.ones_like(ids)}
                self._run((ids,), options, ahead=True)
        return self._captures - before

    @contextlib.contextmanager
    def attached(self) -> Iterator[CapturedDecode]:
        """Have ``model.generate`` be this in the block, for code of others that calls it."""
        own = vars(self._model)
        before, mine = own.get("generate"), functools.partial(self.generate)
        if isinstance(before, functools.partial) and isinstance(getattr(before.func, "__self__", None), CapturedDecode):
            raise UnsupportedOperationError("this model is attached already", fix="leave its `attached()` block first")
        self._model.generate = mine
        try:
            yield self
        finally:
            if own.get("generate") is mine:  # else somebody has put another there since
                if before is None:
                    del self._model.generate
                else:
                    self._model.generate = before

    def reset(self) -> None:
        """Drop all graphs and caches, and give their memory back. Until the next call, weights are apart again."""
        with self._alone():
            self._drop_all()
            self._facts = None

    @property
    def report(self) -> DecodeReport:
        """What ran as graphs, what did not, and why."""
        return DecodeReport(
            device=str(self._device),
            reasons=dict(self._reasons),
            notes=tuple(self._notes),
            graphs=tuple(
                GraphInfo(key=graph.name, bytes=graph.recording.bytes, hits=graph.calls.replays)
                for graph in self._graphs.values()
            ),
            captures=self._captures,
            replays=self._replays,
            eager_tokens=self._eager_tokens,
            host_reads=self._host_reads,
            kv_ranges=self._extents,
            cache_bytes=sum(lane.bytes for lane in self._lanes.values()),
        )

    def __reduce__(self) -> Any:
        raise TypeError(
            "a captured model cannot be copied or pickled: its graphs refer to the tensors of its model. Fix: copy the "
            "model outside of an `attached()` block, and call capture_decode(copy, ...)"
        )

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._lock.acquire(blocking=False):
            raise UnsupportedOperationError(
                "a call of this captured model is still running, in another thread or around this one; its graphs "
                "share their cache",
                fix="call it in turn, or capture a model for each thread",
            )
        try:
            yield
        finally:
            self._lock.release()

    def _run(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, ahead: bool) -> Any:
        from transformers import GenerationMixin

        # Of a model around another, such as one with adapters, the arguments are those of the inner one.
        bound = _signature_of(GenerationMixin.generate).bind(self._model, *args, **kwargs).arguments
        options = {**bound.pop("kwargs", {}), **bound}
        del options["self"]
        check_prompt(options)
        try:
            if plain := why_plain(self._model) or self._apart:
                raise NotCapturedError(plain)
            for name in _LEFT:
                if options.get(name) is not None:
                    raise NotCapturedError(f"generate is called with {name}")
            # transformers tells a callable nothing of the streamer, and would put the prompt into it already.
            streamer = options.get("streamer")
            loop = functools.partial(
                self._loop, _streamer=streamer, _ahead=ahead, _placed=options.get("position_ids") is not None
            )
            loop.__signature__ = _signature_of(GenerationMixin._sample)  # type: ignore[attr-defined]  # read three times
            with self._alone():
                return self._generate(**{**options, "streamer": None, "custom_generate": loop})
        except NotCapturedError as reason:
            self._note_eager(str(reason))
        return self._generate(**options)

    def _note_eager(self, reason: str) -> None:
        self._reasons[reason] += 1
        strict = self._strict
        if strict is None:
            active = context.active_policy()
            strict = active is not None and active.policy.mode == "strict" and reason != self._why_eager
        if strict:
            raise UnsupportedOperationError(
                f"capture_decode: {reason}, so it would be generated eagerly",
                fix="leave that out of the call, or call capture_decode(..., strict=False)",
            ) from None

    def _loop(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        *,
        _streamer: Any,
        _ahead: bool,
        _placed: bool,
        **model_kwargs: Any,
    ) -> torch.Tensor:
        """Generate: what transformers calls in place of its own loop."""
        del streamer
        refuse_mode(generation_config, model_kwargs, synced=synced_gpus)
        batch, prompt = input_ids.shape
        if batch not in self._batches:
            raise NotCapturedError(f"there is no cache for {batch} rows, only for {', '.join(map(str, self._batches))}")
        here = torch.cuda.device(self._device) if self._device.type == "cuda" else contextlib.nullcontext()
        # Buffers outlive a block of inference mode around one call.
        with here, torch.inference_mode(False), torch.no_grad():
            mask = _moved(model_kwargs.get("attention_mask"), self._device)
            choice = choice_of(logits_processor, stopping_criteria, generation_config, mask, self._device)
            if choice.end > self._max_length:
                raise NotCapturedError(f"{choice.end} tokens do not fit into max_length={self._max_length}")
            ids = input_ids.to(self._device)
            self._follow_model()
            cast = torch.get_autocast_dtype(self._device.type) if torch.is_autocast_enabled(self._device.type) else None
            lane = self._lanes.get((batch, cast)) or self._new_lane(model, batch, cast)
            if self._recorder is not None:
                self._recorder.order()
            positions = _moved(model_kwargs.get("position_ids"), self._device)
            lane.fused = self._fused_for(lane, not _placed or positions is None or int(positions.max()) < prompt)
            lane.start(ids, mask, positions, choice)
            if _streamer is not None:
                _streamer.put(input_ids.cpu())
            lane.prefill(ids, choice)
            # As around its own loop, transformers may have experts computed otherwise in decode steps.
            with getattr(model, "_optimize_model_for_decode", contextlib.nullcontext)():
                if _ahead:
                    for extent in self._extents:
                        self._graph_for(lane, choice, batch, extent)
                    return input_ids
                counted = self._decode(lane, choice, prompt, _streamer)
            if _streamer is not None:
                _streamer.end()
            new_tokens = lane.history[:, prompt : prompt + counted].to(input_ids.device, input_ids.dtype)
            return torch.cat([input_ids, new_tokens], dim=1)

    def _new_lane(self, model: Any, batch: int, cast: torch.dtype | None) -> Lane:
        lane = Lane(model, batch, self._max_length, self._device)
        try:
            with warnings_of_torch():
                lane.try_out(self._extents)
        except (XpuRuntimeError, NotCapturedError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise NotCapturedError(f"the model does not run over ranges of a cache: {error_line(error)}") from None
        self._lanes[batch, cast] = lane
        return lane

    def _decode(self, lane: Lane, choice: Choice, prompt: int, streamer: Any) -> int:
        """Choose tokens until all rows have ended. Returns how many count."""
        generated, budget = 1, choice.end - prompt
        self._eager_tokens += 1
        surroundings: tuple[Any, ...] = ()
        every = 1 if streamer is not None else self._check_every
        generator = _generator(self._device)
        states: dict[int, torch.Tensor] = {}
        while True:
            if streamer is not None:
                streamer.put(lane.token[:, 0].cpu())
            if generated >= budget:
                break
            if choice.eos is not None and (generated == 1 or generated % every == 0):
                self._host_reads += 1
                if not bool(lane.unfinished.any()):
                    break
                states.clear()
            lane.read_up_to(extent := self._extent_for(prompt + generated))
            batch = lane.token.shape[0]
            surroundings = surroundings or self._surroundings.now()
            key = (batch, extent, choice.key, lane.fused is None, *surroundings)
            graph = None if self._recorder is None else self._graph_for(lane, choice, batch, extent, key)
            if graph is None:
                with self._joining(lane):
                    lane.step(choice)
                self._eager_tokens += 1
            else:
                graph.recording.graph.replay()
                graph.calls.replays += 1
                self._replays += 1
            generated += 1
            if choice.sample and choice.eos is not None:
                states[generated] = generator.get_state()
        if self._why_eager:
            self._reasons[self._why_eager] += 1
        counted = generated if choice.eos is None else int(lane.counted)
        if counted in states and counted < generated:
            generator.set_state(states[counted])  # the tokens after it were made in vain
        return counted

    def _extent_for(self, tokens: int) -> int:
        return next(extent for extent in self._extents if extent >= tokens)

    def _graph_for(self, lane: Lane, choice: Choice, batch: int, extent: int, key: Any = None) -> _Graph | None:
        """Return the graph of a step, captured now if need be; nothing where it has to run eagerly."""
        if key is None:
            key = (batch, extent, choice.key, lane.fused is None, *self._surroundings.now())
        graph = self._graphs.get(key)
        if graph is not None:
            self._graphs.move_to_end(key)
            return graph
        if key in self._failed:
            self._reasons[self._failed[key]] += 1
            return None
        lane.read_up_to(extent)
        while len(self._graphs) >= self._max_graphs:
            self._drop(next(iter(self._graphs)))
        try:
            if self._compile is not False and (few := few_rows(self._model, batch, self._device)):
                raise UnsupportedOperationError(few)
            recording, calls = self._record(lane, choice)
        except Exception as error:
            reason = f"the step of {batch} rows and {extent} positions cannot be captured: {error_line(error)}"
            self._failed[key] = reason
            self._note_eager(reason)
            return None
        self._captures += 1
        processors = [name for name, *_ in choice.key[0]]
        name = f"{batch} rows, {extent} positions, {'sampled' if choice.sample else 'greedy'}"
        name += "".join(f", {processor}" for processor in processors)
        graph = self._graphs[key] = _Graph(recording, name, (choice, context.active_policy()), calls)
        return graph

    def _record(self, lane: Lane, choice: Choice) -> tuple[CapturedGraph, GraphCalls]:
        """Capture a step; the lane is as before, since each run writes the keys and values of one position."""
        assert self._recorder is not None
        used = CapturedState(buffers=lane.state())
        snapshot = StateSnapshot(used, self._device)
        advance = compiled_by(lane.advance, self._compile)
        step = compiled_by(lane.step, self._compile) if lane.fused is None else _around(lane, lane.fused, advance)
        # All graphs are compiled of the same code, and beyond the limit Dynamo would leave it uncompiled.
        limit = _private_api.dynamo_config().patch(recompile_limit=4 * self._max_graphs)
        joined = self._joining(lane)
        with (
            joined,
            warnings_of_torch(),
            uncached_autocast(),
            tuning.replayed(),
            contextlib.nullcontext() if self._compile is False else limit,
            watched_capture(self._model, compiled=self._compile is not False) as (calls, recording),
        ):
            try:
                with self._recorder.warming():
                    for _ in range(_WARMUP):
                        step(choice)
                        snapshot.restore()
                with recording:
                    return self._recorder.record(lambda: step(choice), []), calls
            finally:
                snapshot.restore()
                if getattr(self._recorder, "cut_loose", False):
                    self._drop_graphs()  # they would go on with random numbers of their own
                    self._recorder.cut_loose = False  # type: ignore[attr-defined]

    def _joining(self, lane: Lane) -> contextlib.AbstractContextManager[None]:
        if self._joined is None or lane.fused is not None or not self._is_free():
            return contextlib.nullcontext()
        batch = lane.token.shape[0]
        self._notes.update(dict.fromkeys(self._joined.prove(batch)))
        return self._joined.used(batch)

    def _fused_for(self, lane: Lane, usual: bool) -> FusedDecoder | None:
        """Return the kernels of whole layers, where they are proved for a lane and no policy names single ones."""
        kernels = kernels_for(self._device)
        if self._joined is None or kernels is None or not usual or not self._is_free():
            return None
        if self._fused is None:
            try:
                self._fused = FusedDecoder(self._model, self._joined, kernels, self._extents)
            except NotFusedError as error:
                self._fused = f"layers are not fused: {error}"
        if isinstance(self._fused, str):
            self._notes[self._fused] = None
            return None
        rows = lane.token.shape[0]
        why = self._fused.verdicts.get(rows)
        if why is None:
            with warnings_of_torch():
                why = self._fused.prove(lane, self._tolerance)
            said = f"layers by five kernels each, {rows} rows: "
            self._notes[said + (f"not used, since {why}" if why else f"in {len(lane.cache.layers)} layers")] = None
            if not why:
                self._notes[self._fused.products(rows)] = None
        return None if why else self._fused

    def _is_free(self) -> bool:
        active = context.active_policy()
        free = active is None or active.leaves_kernels_open()
        return free and not torch.is_autocast_enabled(self._device.type)

    def _follow_model(self) -> None:
        if self._facts is not None and self._facts.hold():
            return
        self._facts = None  # until the model is adopted, however often it is refused before
        refuse_training(self._model)
        devices = {tensor.device for tensor in CapturedState(modules=[self._model]).tensors()}
        if devices != {self._device}:
            places = " and ".join(sorted(map(str, devices)))
            raise NotCapturedError(f"the model was captured on {self._device}, and is on {places} now")
        if self._graphs:
            self._notes["the model was changed, so graphs were captured anew"] = None
        self._drop_all()
        self._adopt()

    def _drop_graphs(self) -> None:
        for key in list(self._graphs):
            self._drop(key)

    def _drop_all(self) -> None:
        self._drop_graphs()
        self._failed.clear()
        self._lanes.clear()
        self._fused = None
        if self._joined is not None:
            self._joined.separate()

    def _drop(self, key: Any) -> None:
        assert self._recorder is not None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._graphs.pop(key).recording.graph.reset()
        self._recorder.released(1)


def _around(lane: Lane, fused: FusedDecoder, advance: Any) -> Any:
    return lambda choice: advance(fused.logits(lane), choice)


def _generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index or 0]
    return torch.default_generator


def _moved(tensor: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(device)
