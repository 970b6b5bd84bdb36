# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""A decoder of transformers that generates: by ``generate`` of transformers, or by CUDA graphs of its decode steps."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from xpuruntime.engines.base import Judgement, Observed, Request, closed
from xpuruntime.engines.generation import Generated, GenerationModel
from xpuruntime.engines.model.file import MODEL_CONFIG
from xpuruntime.engines.torch.names import DecoderSettings, precision_dtype, torch_precision, translate
from xpuruntime.engines.torch.pinning import Pins, hold
from xpuruntime.errors import EngineFailed, EngineUnavailable, InputError, ModelError, UnsupportedOperationError
from xpuruntime.runtime.packages import installed

if TYPE_CHECKING:
    from xpuruntime.pytorch.switches.shared_switches import SwitchClaim

#: Most prompts of one call that captured steps have a cache for; each is made on first use.
_ROWS = 64
_SHOWN = 4
#: Held while random numbers of the process are those of a seed.
_drawing = threading.Lock()


def load_decoder(request: Request, judgement: Judgement[DecoderSettings]) -> DecoderModel:
    """Return the loaded decoder; leaves nothing behind when it fails."""
    from xpuruntime.pytorch.call_scope import generation_phases

    request.model.check_unchanged()
    with contextlib.ExitStack() as undo:
        switches = hold(judgement.settings, request)
        undo.callback(switches.release)
        unsupported = {control.key for control in judgement.controls if control.enforceability == "unsupported"}
        pins = Pins(request.policy, (), unsupported)
        undo.callback(pins.release)
        generation_phases.require()
        undo.callback(generation_phases.release)
        try:
            module = _module(request, judgement.settings)
        except Exception as error:
            failure = translate(error, doing=f"loading {request.model.path}", device=request.device)
            if type(failure) is EngineFailed:  # whatever transformers makes of a configuration that is none
                fix = f"correct {MODEL_CONFIG}, or save the model again: model.save_pretrained(folder)"
                failure = ModelError(str(failure), fix=fix, engine="torch", device=request.device)
            raise failure from None
        model = DecoderModel(module, request, judgement, pins, switches)
        model.undo = undo.pop_all()
    return model


def _module(request: Request, settings: DecoderSettings) -> Any:
    from xpuruntime.pytorch.weights import quantize, quiet_torchao

    try:
        from transformers import AutoModelForCausalLM
    except Exception as error:  # it imports many packages, each of which may fail
        version = installed("transformers").get("transformers")
        if version is None:
            raise EngineUnavailable("transformers is not installed", fix="pip install transformers") from None
        msg = f"transformers {version} does not import: {' '.join(str(error).split())}"
        raise EngineUnavailable(msg, fix="pip install --upgrade transformers", engine="torch") from None
    folder = request.model.source.folder
    with quiet_torchao(), _without_progress():  # the module of the model imports torchao where it is installed
        module, loading_info = AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # to be told which; they are refused below
            dtype="auto" if settings.dtype is None else precision_dtype(settings.dtype),
        )
    for name in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if keys := sorted(map(str, loading_info.get(name) or ())):
            shown = ", ".join(keys[:_SHOWN]) + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
            reason = f"{folder}: weights have {name.replace('_', ' ')} for {type(module).__name__}: {shown}"
            raise ModelError(reason, fix="save the model again: model.save_pretrained(folder)")
    module = module.to(request.device).eval()
    if request.policy.execution.weights.storage is not None:
        quantize(module, request.policy)
    return module


@contextlib.contextmanager
def _without_progress() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


class DecoderModel(GenerationModel):
    """A decoder of transformers under the kernels of its session, which hold for its calls alone."""

    engine = "torch"
    product = "The torch engine"
    again = "save the model again: model.save_pretrained(folder)"

    def __init__(
        self,
        module: Any,
        request: Request,
        judgement: Judgement[DecoderSettings],
        pins: Pins,
        switches: SwitchClaim,
    ) -> None:
        settings = judgement.settings
        super().__init__(module, request, strict=settings.strict)
        self.module, self.settings, self.controls, self.pins = module, settings, judgement.controls, pins
        self._switches = switches
        self._threads_after: int | None = None
        self.undo: contextlib.ExitStack | None = None
        self.captured: Any = None
        if settings.graph != "off":
            from xpuruntime.pytorch.generation.capture import capture_decode

            self.captured = capture_decode(
                module,
                max_length=settings.max_length,
                batch=range(1, _ROWS + 1),
                compile=settings.compile_options if settings.mode == "compile" else False,
                strict=settings.graph == "require",
            )
        #: Precision of the weights, which is that of the arithmetic.
        self.computes = torch_precision(next(iter(module.parameters())).dtype)
        if self.computes != "fp32":
            self._log.add("logits handed over in fp32", f"the model computes in {self.computes}")

    @contextlib.contextmanager
    def running(self) -> Iterator[Any]:
        """Run the module in the block: under the session's kernels, without gradients. Failures are translated."""
        import torch

        module = self._handle
        if module is None:
            closed()
        try:
            with torch.no_grad(), self.pins.hold():
                yield module
        except Exception as error:
            raise translate(error, doing=f"running {self.folder.folder}", device=self.device) from None

    def _ids(self, tokens: Any) -> Any:
        import torch

        return torch.as_tensor(np.asarray(tokens, np.int64), device=self.device)[None]

    def _logits(self, handle: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        del handle
        with self.running() as module:
            return _host(module(self._ids(tokens), use_cache=True, return_dict=True).logits)

    def sequence(self, tokens: Any, new: int, sampling: Mapping[str, Any]) -> DecoderSequence:
        """Start a sequence of eager steps."""
        checked, search = self.checked_tokens(tokens, new), self.search_of(sampling)
        if self.settings.graph == "require":
            fix = "use generate(), or state execution.cuda_graph: prefer"
            raise UnsupportedOperationError("single steps of a stream run eagerly", fix=fix, engine="torch")
        return DecoderSequence(self, self._ids(checked), new, search)

    def generated(self, tokens: Any, new: int, sampling: Mapping[str, Any], *, logprobs: bool) -> Generated:
        """Generate by captured steps where the policy states it, else step by step."""
        if self.captured is None:
            return super().generated(tokens, new, sampling, logprobs=logprobs)
        if logprobs:
            fix = "read session.logprobs([*prompt, *result])"
            raise InputError("the logits of captured steps stay inside of the graph", fix=fix)
        checked, search = self.checked_tokens(tokens, new), self.search_of(sampling)
        seen = _FirstToken()
        new_tokens = self._whole([checked], new, search, streamer=seen)[0]
        return Generated(new_tokens, bool(new_tokens) and new_tokens[-1] in self.folder.ends, [], seen.first_ns)

    def requests(self, prompts: Sequence[Any], new: int, sampling: Mapping[str, Any]) -> list[tuple[list[int], str]]:
        """Run several prompts as one batch, padded on the left."""
        checked, search = [self.checked_tokens(prompt, new) for prompt in prompts], self.search_of(sampling)
        if "seed" in search:
            raise InputError("several prompts take no seed", fix="call generate() for each prompt, or leave seed out")
        sequences = self._whole(checked, new, search)
        return [
            (sequence, "stop" if sequence and sequence[-1] in self.folder.ends else "length") for sequence in sequences
        ]

    def _whole(self, prompts: list[Any], new: int, search: dict[str, Any], **extra: Any) -> list[list[int]]:
        import torch

        longest = max(map(len, prompts))
        ids = torch.full((len(prompts), longest), self._padding, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, longest - len(prompt) :] = torch.from_numpy(prompt.astype(np.int64))
            mask[row, longest - len(prompt) :] = 1
        options = {**_options(search, self._padding), **extra, "max_new_tokens": new}
        options["attention_mask"] = mask.to(self.device)
        # Captured steps share their cache, so that calls take turns.
        turn = contextlib.nullcontext() if self.captured is None else self._turn
        with turn, self.running() as module, _drawn(search.get("seed"), self.device):
            generate = module.generate if self.captured is None else self.captured.generate
            rows = generate(ids.to(self.device), **options)[:, longest:].tolist()
        return [_until(row, self.folder.ends) for row in rows]

    @property
    def _padding(self) -> int:
        stated = self.module.generation_config.pad_token_id
        return int(stated if stated is not None else next(iter(self.folder.ends), 0))

    def begin(self, module: Any, ids: Any, new: int, search: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Return the logits processors of a call, and the cache as an argument, as ``generate`` prepares them."""
        begun: list[Any] = []

        def instead(
            model: Any,
            input_ids: Any,
            logits_processor: Any,
            stopping_criteria: Any,
            generation_config: Any,
            **kept: Any,
        ) -> Any:
            del model, stopping_criteria, generation_config
            caches = {name: kept[name] for name in ("cache", "past_key_values") if kept.get(name) is not None}
            begun.extend((logits_processor, caches))
            return input_ids

        module.generate(ids, max_new_tokens=new, custom_generate=instead, **_options(search, self._padding))
        if not begun[1]:
            fix = "give a decoder with attention"
            raise UnsupportedOperationError("the model keeps no keys and values of tokens", fix=fix, engine="torch")
        return begun[0], begun[1]

    def forced(self, checked: Any, prefill: int) -> np.ndarray[Any, Any]:
        """Return the logits after the first tokens, which run at once, and after each of the others."""
        ids = self._ids(checked)
        parts: list[Any] = [ids]
        cache: dict[str, Any] = {}
        with self.running() as module:
            if prefill < len(checked):
                parts = [ids[:, :prefill], *ids[:, prefill:].split(1, dim=1)]
                cache = self.begin(module, parts[0], len(checked), {"do_sample": False})[1]
            rows = [_host(module(part, use_cache=True, return_dict=True, **cache).logits)[0] for part in parts]
        return np.concatenate(rows)

    def tokenizer(self) -> Any:
        """Return the tokenizer of transformers of this folder."""
        from transformers import AutoTokenizer

        try:
            return AutoTokenizer.from_pretrained(self.folder.folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:
            fix = "pass token ids, or put tokenizer.json and tokenizer_config.json into the folder"
            text = " ".join(str(error).split())
            raise InputError(f"the tokenizer of {self.folder.folder} cannot be read: {text:.300}", fix=fix) from None

    def _watch(self, ready: Mapping[str, Any], runs: int) -> Observed:
        from xpuruntime.engines.torch.observing.decoder_rows import observe_decoder

        return observe_decoder(self, self.checked_tokens(ready["tokens"][0]), runs)

    def switches(self) -> dict[str, Any]:
        """Return the process-wide switches that this session holds, as they are now."""
        return self._switches.values()

    def memory(self) -> dict[str, int]:
        """Return the bytes of parameters and buffers, and of the caches of captured steps."""
        held = {t.data_ptr(): t.numel() * t.element_size() for t in (*self.module.parameters(), *self.module.buffers())}
        usage = {"weights": sum(held.values())}
        return usage if self.captured is None else {**usage, "cache": self.captured.report.cache_bytes}

    def close(self) -> None:
        """Release the module, its graphs and what holds for the process."""
        super().close()
        undo, self.undo = self.undo, None
        if undo is None:
            return
        if self.captured is not None:
            self.captured.reset()
        self.module = self.captured = None
        threads = "num_threads" in self._switches.values()
        undo.close()
        if threads:
            import torch

            self._threads_after = torch.get_num_threads()

    def restore_thread(self) -> None:
        """Give the calling thread the number of threads of the process, which OpenMP keeps for each thread."""
        threads, self._threads_after = self._threads_after, None
        if threads is not None:
            import torch

            torch.set_num_threads(threads)


class DecoderSequence:
    """A sequence that grows by a token in each step; its prompt runs with the first."""

    def __init__(self, model: DecoderModel, ids: Any, new: int, search: dict[str, Any]) -> None:
        self._model, self._ids, self._left, self._search = model, ids, new, search
        self._pending = ids
        self._begun: tuple[Any, dict[str, Any]] | None = None
        self._random: Any = None
        self.done = self.ended = False

    def step(self) -> tuple[int, np.ndarray[Any, Any]]:
        """Return the next token, and the logits of the model before processors change them."""
        import torch

        model = self._model
        model.check_alive()
        with model.running() as module:
            if self._begun is None:
                self._begun = model.begin(module, self._ids, self._left, self._search)
                if "seed" in self._search:
                    self._random = torch.Generator(model.device).manual_seed(self._search["seed"])
            processors, cache = self._begun
            result = module(self._pending, use_cache=True, return_dict=True, logits_to_keep=1, **cache)
            logits = result.logits[:, -1].to(copy=True, dtype=torch.float32)
            scores = processors(self._ids, logits.clone())
            if self._search["do_sample"]:
                chosen = torch.multinomial(scores.softmax(-1), 1, generator=self._random)
            else:
                chosen = scores.argmax(-1, keepdim=True)
            self._pending = chosen
            self._ids = torch.cat([self._ids, chosen], dim=1)
            token = int(chosen.item())
            self._left -= 1
            self.ended = token in model.folder.ends
            self.done = self.ended or not self._left
            return token, _host(logits)[0]


class _FirstToken:
    """A streamer that says when the first new token was there."""

    def __init__(self) -> None:
        self._began, self._calls, self.first_ns = time.perf_counter_ns(), 0, 0

    def put(self, value: Any) -> None:
        del value
        self._calls += 1
        if self._calls == 2:
            self.first_ns = time.perf_counter_ns() - self._began

    def end(self) -> None:
        """Take the end of the text."""


def _options(search: Mapping[str, Any], padding: int) -> dict[str, Any]:
    """Return arguments of ``generate``; what has no effect on the best token is left out, so that nothing warns."""
    drawn = {name: search[name] for name in ("temperature", "top_k", "top_p") if name in search}
    free = {} if search["do_sample"] else dict.fromkeys(("temperature", "top_k", "top_p"))
    return {"do_sample": search["do_sample"], "num_beams": 1, "pad_token_id": padding, **free, **drawn}


@contextlib.contextmanager
def _drawn(seed: int | None, device: str) -> Iterator[None]:
    if seed is None:
        yield
        return
    import torch

    with _drawing, torch.random.fork_rng([device] if device != "cpu" else []):
        torch.manual_seed(seed)
        yield


def _until(tokens: list[int], ends: Sequence[int]) -> list[int]:
    end = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: end + 1]


def _host(tensor: Any) -> np.ndarray[Any, Any]:
    array: np.ndarray[Any, Any] = tensor.float().cpu().numpy()
    return array
