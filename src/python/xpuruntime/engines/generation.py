# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Language models that generate: their folder, checked and read, and what every engine that runs one does alike."""

from __future__ import annotations

import threading
import time
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, NoReturn, Protocol

import msgspec
import numpy as np

from xpuruntime.engines.host_model import HostModel
from xpuruntime.engines.input_binding import ConversionLog
from xpuruntime.engines.model.external import ExternalFile
from xpuruntime.engines.model.facts import TensorInfo
from xpuruntime.engines.model.file import MODEL_CONFIG, refuse
from xpuruntime.engines.model.info import ModelInfo
from xpuruntime.errors import EngineError, EngineFailed, InputError, UnsupportedOperationError
from xpuruntime.files.paths import kind_of, reason_of
from xpuruntime.files.reading import decode_unique, read_regular
from xpuruntime.generation.logprobs import normalized

if TYPE_CHECKING:
    from xpuruntime.engines.base import Binding, Observed, Request

INT32 = 2**31 - 1
#: Files beside a model that a tokenizer is read from.
TOKENIZER = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_LARGEST_CONFIG = 16 << 20


class GenerationFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What was read of a folder: sizes, tokens that end a text, and how the next token is chosen by default."""

    folder: str
    kind: str
    vocabulary: int
    context: int
    ends: tuple[int, ...]
    #: Whether the logits of all tokens of a prompt are given, and not of the last one only.
    every_logit: bool = True
    search: dict[str, Any]


def decoder_info(
    facts: GenerationFolder,
    *,
    form: str,
    beside: tuple[ExternalFile, ...],
    graph_name: str = "",
    weights: dict[str, int] | None = None,
) -> ModelInfo:
    """Describe a folder with ``config.json`` whose graph is not read: it takes token ids and returns logits."""
    written = (Path(facts.folder) / MODEL_CONFIG).stat()
    return ModelInfo(
        path=facts.folder,
        size=written.st_size,
        mtime_ns=written.st_mtime_ns,
        base_dir=facts.folder,
        graph_file=MODEL_CONFIG,
        format=form,
        graph_name=graph_name,
        inputs=(TensorInfo(name="tokens", dtype="int64", shape=(1, "length")),),
        outputs=(TensorInfo(name="logits", dtype="float32", shape=(1, "length", facts.vocabulary)),),
        nodes=(),
        ops={},
        opsets={},
        ir_version=0,
        weights=weights or {},
        external_files=beside,
        source=facts,
    )


class ConfigFile:
    """A JSON file of a folder whose values are checked one by one."""

    def __init__(self, folder: Path, name: str, again: str) -> None:
        self.folder, self.name, self._again = folder, name, again
        path = folder / name
        try:
            config = decode_unique(read_regular(path, _LARGEST_CONFIG))
        except OSError as error:
            raise refuse(str(folder), f"{name} cannot be read ({reason_of(error)})", "restore the file") from None
        except msgspec.DecodeError as error:
            raise refuse(str(folder), f"{name} is no JSON: {error}", again) from None
        if not isinstance(config, dict):
            raise self.wrong(name, "an object", config)
        self.values: dict[str, Any] = config

    def refuse(self, reason: str, fix: str) -> Exception:
        """Return the error that names the folder."""
        return refuse(str(self.folder), reason, fix)

    def wrong(self, name: str, kind: str, value: Any) -> Exception:
        """Return the error about a value of another kind."""
        return self.refuse(f"{name} is {value!r:.60}, not {kind}", f"correct it in {self.name}, or {self._again}")

    def section(self, config: dict[str, Any], name: str) -> dict[str, Any]:
        """Return an object by the last part of its name."""
        value = config.get(name.rpartition(".")[2])
        if not isinstance(value, dict):
            raise self.wrong(name, "an object", value)
        return value

    def text(self, section: dict[str, Any], name: str) -> str:
        """Return text that is not empty."""
        value = section.get(name.rpartition(".")[2])
        if not isinstance(value, str) or not value:
            raise self.wrong(name, "text", value)
        return value

    def count(self, section: dict[str, Any], name: str) -> int:
        """Return a whole number above 0 that fits 32 bits."""
        value = section.get(name.rpartition(".")[2])
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= INT32:
            raise self.wrong(name, f"a whole number from 1 to {INT32}", value)
        return value

    def ends(self, section: dict[str, Any], name: str) -> tuple[int, ...]:
        """Return the tokens that end a text."""
        stated = section.get(name.rpartition(".")[2], [])
        ends = stated if isinstance(stated, list) else [] if stated is None else [stated]
        if not all(isinstance(end, int) and not isinstance(end, bool) and 0 <= end <= INT32 for end in ends):
            raise self.wrong(name, "a token id or a list of them", stated)
        return tuple(ends)

    def only(self, section: dict[str, Any], where: str, values: dict[str, Any]) -> None:
        """Refuse options of which only one value is run."""
        for name, value in values.items():
            stated = section.get(name, value)
            if stated is not None and stated != value:
                fix = f"set {where}{name} to {value} in {self.folder / self.name}"
                raise self.refuse(f"{where}{name} is {stated!r:.40}, and only {value} is run", fix)

    def penalty(self, section: dict[str, Any], name: str) -> None:
        """Refuse a penalty of repetitions that is no number above 0; engines tell of it at the first token."""
        value = section.get("repetition_penalty")
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or value <= 0):
            raise self.wrong(name, "a number above 0", value)

    def file_name(self, name: str, key: str, what: str) -> str:
        """Return the name of a file that must be in the folder itself."""
        if name != PurePath(name).name or "\\" in name or "\0" in name or name in ("", ".."):
            reason = f"{key} is {name!r:.200}, and {what} must be a file in the folder itself"
            raise self.refuse(reason, f"move the file there and name it alone in {self.name}")
        return name


def files_beside(folder: Path, names: Iterable[str]) -> tuple[ExternalFile, ...]:
    """Return which of these files are there. A pipe, for which an engine would wait, is refused."""
    kinds = {name: kind_of(folder / name) for name in names}
    for name, kind in kinds.items():
        if kind not in ("file", "missing"):
            raise refuse(str(folder), f"{name} in it is a {kind}, not a file", "remove it, or put the file there")
    return tuple(
        ExternalFile(location=name, size=(folder / name).stat().st_size, tensors=0)
        for name, kind in kinds.items()
        if kind == "file"
    )


#: Argument to its type, least and largest value, and these in words. Engines take any number, also below 0.
_SAMPLING: dict[str, tuple[Any, float, float, str]] = {
    "temperature": ((int, float), 0.0, 1e6, "a temperature of 0, which takes the best token, or more"),
    "top_k": (int, 1, INT32, "top_k as a whole number of 1 or more"),
    "top_p": ((int, float), 1e-9, 1.0, "top_p above 0 and at most 1"),
    "seed": (int, 0, INT32, f"seed as a whole number from 0 to {INT32}"),
}


class Generated(NamedTuple):
    """New tokens, whether the last of them ends the text, their logprobs where asked for, and when the first came."""

    tokens: list[int]
    ended: bool
    likely: list[float]
    first_ns: int


class GrowingSequence(Protocol):
    """A sequence that grows by a token in each step. Not to be shared between threads."""

    done: bool
    ended: bool

    def step(self) -> tuple[int, np.ndarray[Any, Any]]:
        """Return the next token, and the logits that it was chosen from.

        The last step sets `done`, and `ended` too where its token ends the text.
        """
        ...


class GenerationModel(HostModel):
    """A decoder whose cache the engine keeps."""

    #: The engine's name, that of its product, and what makes a folder again.
    engine: ClassVar[str]
    product: ClassVar[str]
    again: ClassVar[str]

    def __init__(self, handle: Any, request: Request, *, strict: bool) -> None:
        super().__init__(handle, request.model, ["logits"], strict=strict, observer=self._watch, log=ConversionLog())
        self.folder: GenerationFolder = request.model.source
        self.device = request.device
        self._request = request
        self._turn = threading.Lock()

    @abstractmethod
    def _logits(self, handle: Any, tokens: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Return the logits of checked tokens, ``[1, tokens or 1, vocabulary]``, by one run."""

    @abstractmethod
    def _watch(self, ready: Mapping[str, Any], runs: int) -> Observed:
        """Observe the prefill of a prompt, and decode steps after it."""

    @abstractmethod
    def sequence(self, tokens: Any, new: int, sampling: Mapping[str, Any]) -> GrowingSequence:
        """Start a sequence of at most `new` more tokens: run its prompt."""

    @abstractmethod
    def forced(self, checked: Any, prefill: int) -> np.ndarray[Any, Any]:
        """Return the logits after the first `prefill` of tokens, which run at once, and after each of the others."""

    @abstractmethod
    def requests(self, prompts: Sequence[Any], new: int, sampling: Mapping[str, Any]) -> list[tuple[list[int], str]]:
        """Run several prompts side by side; return their new tokens, and why each ended."""

    @abstractmethod
    def tokenizer(self) -> Any:
        """Return what has ``encode`` and ``decode`` of the folder's tokenizer. Raises `InputError` without one."""

    @property
    def changes_logits(self) -> tuple[str, ...]:
        """Search options of the folder that have the engine write into the logits of a step."""
        return ()

    def generated(self, tokens: Any, new: int, sampling: Mapping[str, Any], *, logprobs: bool) -> Generated:
        """Generate at most `new` tokens after a prompt."""
        began = time.perf_counter_ns()
        new_tokens: list[int] = []
        likely: list[float] = []
        first = 0
        sequence = self.sequence(tokens, new, sampling)
        while not sequence.done:
            token, logits = sequence.step()
            first = first or time.perf_counter_ns() - began
            new_tokens.append(token)
            if logprobs:
                likely.append(float(normalized(logits[None])[0, token]))
        return Generated(new_tokens, sequence.ended, likely, first)

    def _execute(self, handle: Any, ready: Mapping[str, Any]) -> Sequence[Any]:
        tokens = self.checked_tokens(ready["tokens"][0])
        logits = self._logits(handle, tokens)
        rows = len(tokens) if self.folder.every_logit else 1
        if logits.shape != (1, rows, self.folder.vocabulary):
            msg = f"running {self.folder.folder} gave logits of shape {list(logits.shape)} for {len(tokens)} tokens"
            raise EngineFailed(msg, fix=self.again, engine=self.engine, device=self.device)
        return [logits]

    def _execute_tensors(self, handle: Any, tensors: Mapping[str, Any]) -> NoReturn:
        del handle, tensors
        raise UnsupportedOperationError(
            "logits in bfloat16 are not handed over", engine=self.engine, device=self.device
        )

    def checked_tokens(self, tokens: Any, room: int = 0) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return tokens as engines take them, with `room` more in the context; refuse those they would misread."""
        array = np.asarray(tokens)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            shown = f"{array.dtype} of shape {list(array.shape)}"
            raise InputError(f"a prompt is a list of token ids, got {shown}", fix="pass whole numbers, [1, 2, 3]")
        if not len(array):
            raise InputError("the prompt is empty", fix="begin it with the first token of the model (bos_token_id)")
        stated = self._info.inputs[0]
        limits = (stated.limits or (None, None))[1]
        if isinstance(stated.shape, tuple) and isinstance(stated.shape[1], int):
            limits = (stated.shape[1], stated.shape[1])
        if limits is not None and not limits[0] <= len(array) <= limits[1]:
            size = str(limits[0]) if limits[0] == limits[1] else f"from {limits[0]} to {limits[1]}"
            fix = "give a prompt of such a length, or change execution.shapes.tokens"
            raise InputError(f"the prompt has {len(array)} tokens, and execution.shapes states {size}", fix=fix)
        if len(array) + room > self.folder.context:
            length_text = f"{len(array)} tokens" + (f" and {room} new ones" if room else "")
            fix = "shorten the prompt" + (", or lower max_new_tokens" if room else "")
            raise InputError(f"{length_text} do not fit the context of {self.folder.context} tokens", fix=fix)
        wrong = array[(array < 0) | (array >= self.folder.vocabulary)]
        if len(wrong):
            fix = f"use ids from 0 to {self.folder.vocabulary - 1}, of the tokenizer of this folder"
            raise InputError(f"token {int(wrong[0])} is not in the vocabulary", fix=fix)
        return array.astype(np.int32)

    def search_of(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """Return search options for `temperature`, `top_k`, `top_p` and `seed`; those left out are the folder's."""
        stated = {name: value for name, value in sampling.items() if value is not None}
        for name, value in stated.items():
            kind, low, high, words = _SAMPLING[name]
            if isinstance(value, bool) or not isinstance(value, kind) or not low <= value <= high:
                raise InputError(f"{name} is {value!r:.40}", fix=f"state {words}")
        drawn = stated["temperature"] > 0
        search = {"do_sample": drawn, **stated}
        if not drawn:
            del search["temperature"]
        idle = [name for name in ("top_k", "top_p", "seed") if name in stated]
        if idle and not drawn:
            fix = "state a temperature above 0, or leave it out"
            raise InputError(f"{idle[0]} has no effect where the best token is taken", fix=fix)
        return search

    def check_alive(self) -> None:
        """Refuse a step of what was begun before the process was forked."""
        if self.forked:
            fix = "open the session again in this process"
            raise EngineError("this sequence was begun before the process was forked", fix=fix, engine=self.engine)

    def bind(self, inputs: Mapping[str, Any] | None, outputs: Mapping[str, Any] | None, stream: Any = None) -> Binding:
        """Refuse: the engine owns its buffers."""
        del inputs, outputs
        self.check_bind(stream)
        msg = f"{self.product} keeps inputs, outputs and cache in its own buffers"
        fix = "use run(), or generate() of a GenerationSession"
        raise UnsupportedOperationError(msg, fix=fix, engine=self.engine, device=self.device)
