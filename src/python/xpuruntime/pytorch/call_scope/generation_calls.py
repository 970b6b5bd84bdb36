# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Generation by models of transformers: what it depends on beside kernels, and what transformers changes by itself.

transformers replaces attention, experts, logits processors and compiled code by others with a line in its log. Each
such switch is read back: a strict policy refuses it, another one warns, and `explain` has it.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import json
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch

from xpuruntime.errors import UnsupportedOperationError, warn
from xpuruntime.evidence.difference import Difference
from xpuruntime.lockfile.drift import DriftCode, drift_error, shown
from xpuruntime.pytorch.dispatch.context import active_policy

#: What of a configuration says how long to generate and what to return, and nothing of what is computed.
_LENGTHS = frozenset(
    ("max_length", "max_new_tokens", "max_time", "min_length", "min_new_tokens", "output_hidden_states",
     "output_logits", "output_scores", "return_dict_in_generate", "transformers_version")
)  # fmt: skip
_CONFIG = "generation_config."
#: Arguments of ``generate`` that change its tokens.
_ARGUMENTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "custom_generate")
#: Facts that each forward is asked for; others are those of a call of ``generate``.
_OF_FORWARD = ("attn_implementation", "cache", "experts_implementation", "quantization")
#: What of a model's configuration is a fact of its own, or says where the model is from.
_NOT_COMPUTED = frozenset(("architectures", "dtype", "transformers_version", "use_cache"))
_STRICT = "or state mode: prefer"
_UNKNOWN = {"arguments": "unknown, since generate was taken from the model before the policy began, or is its own"}


class GenerationWatch:
    """Keeps what generated in a block: for each class of models its facts, and the switches of transformers."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, dict[str, list[dict[str, Any]]]] = {}
        self._switches: dict[str, None] = {}

    def note(self, model: str, group: str, facts: dict[str, Any]) -> None:
        """Take note of facts of a model, of which a group is noted as a whole."""
        with self._lock:
            kinds = self._seen.setdefault(model, {}).setdefault(group, [])
            if facts not in kinds:
                kinds.append(facts)

    def switched(self, what: str) -> None:
        """Take note of a switch."""
        with self._lock:
            self._switches[what] = None

    @property
    def switches(self) -> tuple[str, ...]:
        """What transformers changed by itself, a sentence each."""
        return tuple(self._switches)

    def facts(self) -> dict[str, dict[str, Any]]:
        """Return class of a model to its facts; a list where they differed."""
        return {model: dict(sorted(_merged(groups))) for model, groups in sorted(self._seen.items())}


def _merged(groups: Mapping[str, list[dict[str, Any]]]) -> Iterator[tuple[str, Any]]:
    for kinds in groups.values():
        for name in {name: None for facts in kinds for name in facts}:
            values = sorted({json.dumps(facts.get(name)) for facts in kinds})
            yield name, json.loads(values[0]) if len(values) == 1 else [json.loads(value) for value in values]


#: Of the blocks that are being explained.
WATCHES: list[GenerationWatch] = []


class LockedGeneration:
    """What a lock expects of generation: class of a model to its facts; and the model that it is of."""

    def __init__(self, path: str, expected: Mapping[str, Mapping[str, Any]], take: str, model: str = "") -> None:
        self.path, self._expected, self._take, self.model = path, expected, take, model

    def check(self, model: str, group: str, facts: Mapping[str, Any]) -> None:
        """Raise `LockError` where facts of a model are not those of the lock."""
        if not self._expected:  # a lock without generation
            return
        expected = self._expected.get(model)
        if expected is None:
            drifts = [_drift(model, " ".join(self._expected), model)]
        else:
            names = sorted({*facts, *(name for name in expected if _group(name) == group)})
            comparisons = [(name, expected.get(name), facts.get(name)) for name in names]
            drifts = [_drift(f"{model} {name}", *pair) for name, *pair in comparisons if not _is_one_of(*pair)]
        if drifts:
            raise drift_error(self.path, drifts, take=self._take)


def _is_one_of(expected: Any, value: Any) -> bool:
    return bool(value in expected if isinstance(expected, list) else value == expected)


def _group(name: str) -> str:
    return "model" if name in _OF_FORWARD else "generate"


def _drift(subject: str, expected: Any, actual: Any) -> Difference:
    return Difference(code=DriftCode.GENERATION, subject=subject, before=shown(expected), after=shown(actual))


class _Generate:
    """One call of ``generate``; of one that is not followed, its beginning alone is seen."""

    def __init__(self, arguments: Mapping[str, Any], *, followed: bool = True) -> None:
        # What is not followed is not told when the call has ended, and would keep the model.
        self.model: Any = arguments["self"] if followed else None
        self.arguments: Mapping[str, Any] = arguments if followed else {}
        self.followed = followed
        self.compile = self.compiled = False


class _Thread(threading.local):
    generate: _Generate | None = None


_thread = _Thread()
#: Models whose weights were compared with what they are declared to be.
_weighed: weakref.WeakSet[Any] = weakref.WeakSet()


def _note(model: Any, group: str, facts: dict[str, Any]) -> None:
    name = type(model).__name__
    for watch in WATCHES:
        watch.note(name, group, facts)
    active = active_policy()
    if active is not None and active.generation is not None:
        active.generation.check(name, group, facts)


def _is_noted() -> bool:
    active = active_policy()
    return bool(WATCHES) or (active is not None and active.generation is not None)


def _switched(what: str, fix: str) -> None:
    """Report that transformers changed something by itself; raises under a strict policy."""
    for watch in WATCHES:
        watch.switched(what)
    active = active_policy()
    if active is None or active.policy.mode == "auto":
        return
    if active.strict:
        _refuse(what, fix)
    if active.is_first(("generation", what)):
        warn(f"{what}. Fix: {fix}")


def _refuse(what: str, fix: str) -> NoReturn:
    raise UnsupportedOperationError(f"{what}. Fix: {fix}, {_STRICT}", engine="torch")


def forward(model: Any, cache: Any, phase: str) -> None:
    """Take note of a forward of a model that generates, before it runs."""
    generate = _thread.generate
    if generate is not None and generate.compile and not generate.compiled and phase == "decode":
        generate.compile = False
        _switched(
            "generate() has a compile_config, and transformers runs the forward uncompiled, since the model, its cache "
            "or its device does not meet its criteria",
            "give cache_implementation='static' on a CUDA device without offload, or leave compile_config out",
        )
    if cache is not None and _is_noted():
        _note(model, "model", _facts(model, cache))


def _facts(model: Any, cache: Any) -> dict[str, Any]:
    quantized = getattr(model.config, "quantization_config", None)
    method = quantized.get("quant_method") if isinstance(quantized, dict) else getattr(quantized, "quant_method", None)
    facts = {
        "attn_implementation": _attention(model),
        "cache": "" if cache is None else type(cache).__name__,
        "experts_implementation": _experts(model),
        "quantization": str(getattr(method, "value", method) or ""),
    }
    return {name: value for name, value in facts.items() if value}


def _attention(model: Any) -> str:
    return _implementations(model.config, "_attn_implementation")


def _experts(model: Any) -> str:
    return _implementations(model.config, "_experts_implementation")


def _implementations(config: Any, name: str) -> str:
    own = getattr(config, name, None)
    parts = {part: getattr(getattr(config, part, None), name, None) for part in getattr(config, "sub_configs", ())}
    others = [f"{part}: {value}" for part, value in sorted(parts.items()) if value is not None and value != own]
    return ", ".join(filter(None, (own, *others)))


def after_forward(model: Any) -> None:
    """Compare the weights of a model, after its first forward, with what its configuration says they are."""
    if getattr(model.config, "quantization_config", None) is None or model in _weighed:
        return
    _weighed.add(model)
    tensors = (*model.parameters(), *model.buffers())
    if any(map(_is_quantized, tensors)):
        return
    active = active_policy()
    if active is None or active.strict:
        _weighed.discard(model)  # to be told again
    method = _facts(model, None).get("quantization", "quantized")
    kind = str(model.dtype).removeprefix("torch.")
    _switched(
        f"the configuration of {type(model).__name__} says {method}, and all of its weights are "
        f"{kind} after the first forward: they were decompressed",
        "quantize the model by a method that computes from stored integers, such as torchao, or load a checkpoint of "
        f"{kind}",
    )


def _is_quantized(tensor: torch.Tensor) -> bool:
    """Whether a tensor may hold quantized values: of a class of its own, packed or of 8 bits."""
    if type(tensor) not in (torch.nn.Parameter, torch.Tensor) or type(tensor.data) is not torch.Tensor:
        return True
    packed = tensor.dtype == torch.int32 or (tensor.element_size() == 1 and tensor.dtype != torch.bool)
    return bool(packed) and tensor.dim() > 1


def follow_models(owner: Any, undo: list[Callable[[], None]]) -> None:
    """Follow the class of all models, ``PreTrainedModel``."""
    for name, replaced in (
        ("get_compiled_call", _get_compiled_call),
        ("_check_and_adjust_attn_implementation", _adjust_attention),
    ):
        _replace(owner, name, replaced, undo)


def follow_generation(module: Any, undo: list[Callable[[], None]]) -> None:
    """Follow ``generate`` and ``generate_batch``, which the module of ``GenerationMixin`` has."""
    _replace(module.GenerationMixin, "generate", _generate, undo)
    _replace(module.GenerationMixin, "_prepare_generation_config", _prepare_config, undo)
    _replace(module.GenerationMixin, "_optimize_model_for_decode", _optimize, undo)
    batches = next((cls for cls in module.GenerationMixin.__mro__ if "init_continuous_batching" in vars(cls)), None)
    if batches is not None:
        _replace(batches, "init_continuous_batching", _init_batches, undo)
        _replace(batches, "generate_batch", _generate_batch, undo)
        processors = getattr(inspect.getmodule(batches), "ContinuousBatchingLogitsProcessorList", None)
        if processors is not None:
            _replace(processors, "__init__", _keep_processors, undo)


def _replace(owner: Any, name: str, replaced: Callable[..., Any], undo: list[Callable[[], None]]) -> None:
    original = vars(owner).get(name)
    if original is None:
        return
    signature = inspect.signature(original)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            arguments = signature.bind(*args, **kwargs).arguments
        except TypeError:  # which the call itself explains
            return original(*args, **kwargs)
        return replaced(arguments, lambda: original(*args, **kwargs))

    def restore() -> None:
        if vars(owner).get(name) is call:
            setattr(owner, name, original)

    setattr(owner, name, call)
    undo.append(restore)


def _generate(arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
    before, _thread.generate = _thread.generate, _Generate(arguments)
    try:
        return run()
    finally:
        _thread.generate = before


def generate_of(model: Any) -> Any:
    """Return the ``generate`` of a model, as its class has it at each call: a policy puts there what follows it."""
    if "generate" in vars(model) or not hasattr(type(model), "generate"):
        return getattr(model, "generate", None)
    return lambda *args, **kwargs: type(model).generate(model, *args, **kwargs)


def _prepare_config(arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
    """Take note of the configuration that ``generate`` has made of its arguments, also where it is not followed."""
    prepared = run()
    model, config, generate = arguments["self"], prepared[0], _thread.generate
    if generate is None or generate.model is not model or not generate.followed:
        # A bound method that was taken before the policy began is the one that nothing has replaced.
        generate = _thread.generate = _Generate({"self": model}, followed=False)
    generate.compile = getattr(config, "compile_config", None) is not None and not config.disable_compile
    if _is_noted():
        facts = {**_config_facts(config, generate.arguments), **({} if generate.followed else _UNKNOWN)}
        _note(model, "generate", {**facts, **_made_of(model)})
    return prepared


def _config_facts(config: Any, arguments: Mapping[str, Any]) -> dict[str, Any]:
    stated = config.to_diff_dict()
    defaults: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    facts = {
        f"{_CONFIG}{name}": _plain(value)
        for name, value in stated.items()
        if name not in _LENGTHS
        and name[:1] != "_"
        and (value is not False if name not in defaults else value != defaults[name])
    }
    facts.update((name, _name_of(arguments[name])) for name in _ARGUMENTS if arguments.get(name))
    return {name: value for name, value in facts.items() if value is not None}


def _made_of(model: Any) -> dict[str, str]:
    """Return digests of the configuration of a model, and of names, types and sizes of its weights; and autocast."""
    weights = [(name, str(weight.dtype), list(weight.shape)) for name, weight in model.named_parameters()]
    facts = {"config": _digest(_computed(model.config.to_diff_dict())), "weights": _digest(weights)}
    kind = model.device.type
    if torch.is_autocast_enabled(kind):
        facts["autocast"] = str(torch.get_autocast_dtype(kind)).removeprefix("torch.")
    return facts


def _computed(config: dict[Any, Any]) -> dict[str, Any]:
    """Return what of a configuration is computed by; tokens that begin and end texts are facts of the generation."""
    return {
        str(name): _computed(value) if isinstance(value, dict) else value
        for name, value in config.items()
        if name not in _NOT_COMPUTED and not str(name).startswith("_") and not str(name).endswith("_token_id")
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=_parts_of)
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()[:16]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    keyed = {str(name): entry for name, entry in value.items()} if isinstance(value, dict) else value
    return json.dumps(keyed, sort_keys=True, default=_parts_of)


def _parts_of(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    return value.to_dict() if hasattr(value, "to_dict") else _name_of(value)


def _name_of(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return ", ".join(map(_name_of, value))
    if isinstance(value, functools.partial):
        return _name_of(value.func)
    return str(getattr(value, "__qualname__", type(value).__qualname__))


def _get_compiled_call(_: dict[str, Any], run: Callable[[], Any]) -> Any:
    if _thread.generate is not None:
        _thread.generate.compiled = True
    return run()


@contextlib.contextmanager
def _optimize(arguments: dict[str, Any], run: Callable[[], Any]) -> Iterator[None]:
    """Compare experts around what `generate` does before it decodes, however it was taken from the model."""
    model = arguments["self"]
    before = _experts(model)
    with run():
        if (after := _experts(model)) != before:
            _switched(
                f"generate() replaces the experts implementation {before} of {type(model).__name__} by {after} for "
                "decoding",
                f"call model.set_experts_implementation({model.get_experts_implementation()}) before, which then "
                "holds for all of it",
            )
        yield


def _adjust_attention(arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
    wanted, attention = arguments["attn_implementation"], run()
    if wanted is not None and attention != wanted.removeprefix("paged|") and attention != wanted:
        _switched(
            f"{type(arguments['self']).__name__} runs attention by {attention}, and attn_implementation is {wanted}",
            f"install what {wanted} needs, or ask for attn_implementation={attention!r}",
        )
    return attention


def _init_batches(arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
    model = arguments["self"]
    before, batches = _attention(model), run()
    after = _attention(model)
    if after != before and after != f"paged|{before}":
        try:
            _switched(
                f"generate_batch() replaces the attention {before} of {type(model).__name__} by {after}",
                "give continuous_batching_config=ContinuousBatchingConfig(auto_switch_to_flash=False), or load the "
                f"model with attn_implementation={after!r}",
            )
        except BaseException:
            model.set_attn_implementation(before)
            raise
    if _is_noted():
        config = arguments.get("generation_config") or model.generation_config
        _note(model, "generate", {**_config_facts(config, {}), **_made_of(model)})
        _note(model, "model", {**_facts(model, None), "cache": "paged"})
    return batches


def _keep_processors(arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
    stated = arguments["logits_processor"]
    run()
    kept = {id(processor) for processor in arguments["self"].logits_processor}
    dropped = [type(processor).__name__ for processor in stated if id(processor) not in kept]
    if dropped:
        _switched(
            f"generate_batch() drops {', '.join(dropped)}, which its generation_config asks for: the tokens are "
            "other ones",
            "generate one prompt at a time by generate(), or leave these options out",
        )


def _generate_batch(arguments: dict[str, Any], run: Callable[[], Any]) -> Any:
    model = arguments["self"]
    config = arguments.get("generation_config") or model.generation_config
    batch = run()
    requests = len(arguments["inputs"]) * (getattr(config, "num_return_sequences", None) or 1)
    errors = {name: output.error for name, output in batch.items() if output.error is not None}
    lost = requests - len(batch) + len(errors)
    if lost > 0:
        why = next((f", of {name}: {error}" for name, error in errors.items()), "")
        _switched(
            f"{lost} of {requests} requests of generate_batch() failed, and transformers raises nothing{why}",
            "generate these prompts by generate(), which shows the error",
        )
    return batch
