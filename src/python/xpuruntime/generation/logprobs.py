# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`LogprobSource`: what a model says about the next token, whichever engine runs it; and the texts it is asked on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import msgspec
import numpy as np

from xpuruntime.errors import InputError, UnsupportedOperationError
from xpuruntime.files.reading import read_regular

if TYPE_CHECKING:
    import os

Array = np.ndarray[Any, Any]
_LARGEST_TEXTS = 1 << 30
#: Inputs of a decoder that can be made of the token ids alone.
_MADE: dict[str, Callable[[Array], Array]] = {
    "attention_mask": np.ones_like,
    "position_ids": lambda ids: np.broadcast_to(np.arange(ids.shape[1]), ids.shape),
}


@runtime_checkable
class LogprobSource(Protocol):
    """What a model says about the next token.

    A source may also have ``generate(tokens, count)``, which returns up to `count` greedy tokens after `tokens`, and
    ``encode(text)``, which returns the token ids of a text.
    """

    def logprobs(self, tokens: Sequence[int]) -> Array:
        """Return an array of shape ``(rows, vocabulary)``, of logits or of their logarithmic softmax.

        The last row is of the last token, as the tokens before it predict it, the row before of the token before, and
        so on; a source has as many rows as it can tell, and at most one less than there are tokens.
        """


class Texts(NamedTuple):
    """Held-out texts, each as token ids or as a string, and the SHA-256 of their file."""

    texts: tuple[list[int] | str, ...]
    sha256: str


def read_texts(path: str | os.PathLike[str]) -> Texts:
    """Read held-out texts: a JSON file with a list of texts, each a list of token ids, or a string.

    Raises
    ------
    InputError
        The file cannot be read, or holds something else.
    """
    try:
        data = read_regular(path, _LARGEST_TEXTS)
        texts = msgspec.json.decode(data, type=list[list[int] | str])
    except (OSError, msgspec.DecodeError) as error:
        raise InputError(
            f"the texts {path} cannot be read: {error}. Fix: write a JSON list of texts, such as [[1, 5, 7], [1, 9]]"
        ) from None
    if not texts:
        raise InputError(f"the texts {path} are empty. Fix: write at least one text, such as [[1, 5, 7]]")
    return Texts(tuple(texts), hashlib.sha256(data).hexdigest())


def token_ids(text: Sequence[int] | str, source: LogprobSource) -> list[int]:
    """Return the token ids of a text; a string is encoded by the source."""
    if not isinstance(text, str):
        if wrong := [token for token in text if isinstance(token, bool) or not hasattr(token, "__index__")]:
            raise InputError(f"a text has {wrong[0]!r:.40} in place of a token id. Fix: write whole numbers")
        return [int(token) for token in text]
    encode = getattr(source, "encode", None)
    if encode is None:
        raise InputError(
            "a text is a string, and the model comes without a tokenizer. Fix: write the texts as token ids, such as "
            "json.dump([tokenizer.encode(text) for text in texts], file)"
        )
    return [int(token) for token in encode(text)]


def normalized(rows: Any) -> Array:
    """Return logits, or logprobs, as logprobs in float64; minus infinity stays."""
    wide, found = None, "imaginary parts"
    if not np.iscomplexobj(rows):
        try:
            wide = np.asarray(rows, dtype=np.float64)
            found = str(wide.shape)
        except (TypeError, ValueError):
            found = f"the type {type(rows).__name__}, of no real numbers"
    if wide is None or wide.ndim != 2:
        raise InputError(
            f"logprobs have the shape (rows, vocabulary), and these have {found}. Fix: have the source return one row "
            "of real numbers for each next token"
        )
    largest = wide.max(axis=1, keepdims=True, initial=-np.inf)
    with np.errstate(invalid="ignore", divide="ignore"):
        array: Array = wide - (largest + np.log(np.exp(wide - largest).sum(axis=1, keepdims=True)))
    return array


def greedy_tokens(source: LogprobSource, tokens: Sequence[int], count: int) -> list[int]:
    """Return up to `count` greedy tokens after `tokens`, by the source's own ``generate`` where it has one."""
    generate = getattr(source, "generate", None)
    if generate is not None:
        return [int(token) for token in generate(list(tokens), count)]
    numbers: list[int] = []
    while len(numbers) < count:
        # The row of a token does not depend on that token.
        numbers.append(int(np.argmax(np.asarray(source.logprobs([*tokens, *numbers, 0]))[-1])))
    return numbers


class SessionLogprobs:
    """A decoder without a cache that takes token ids, as a source.

    Parameters
    ----------
    run : callable
        Maps inputs by name to outputs by name, as ``InferenceSession.run`` does.
    model : ModelInfo
        Its inputs and outputs.

    Raises
    ------
    UnsupportedOperationError
        The model is no such decoder.
    """

    def __init__(self, run: Callable[[Mapping[str, Any]], Mapping[str, Any]], model: Any) -> None:
        self._run = run
        self._inputs = {info.name: info for info in model.inputs}
        integers = [info for info in model.inputs if "int" in str(info.dtype) and len(info.shape or ()) == 2]
        ids = next((info for info in integers if info.name == "input_ids"), None)
        ids = ids or next((info for info in integers if info.name not in _MADE), None)
        rows = [info for info in model.outputs if len(info.shape or ()) == 3 and "float" in str(info.dtype)]
        logits = next((info for info in rows if info.name == "logits"), rows[0] if len(rows) == 1 else None)
        unknown = [name for name in self._inputs if name not in _MADE and (ids is None or name != ids.name)]
        if ids is None or logits is None or unknown:
            note = f", and the inputs {', '.join(unknown)} cannot be made of token ids" if ids and unknown else ""
            raise UnsupportedOperationError(
                f"{model.path} does not compute logits, in 3 dimensions, of token ids, in 2, without a cache{note}",
                fix="export the decoder without a cache (use_cache=False), or leave verify.generation out",
            )
        self._ids, self._logits = ids, logits

    def logprobs(self, tokens: Sequence[int]) -> Array:
        """Return the logits of every token but the first, by a single run."""
        logits = self._run(self.feeds(tokens))[self._logits.name]
        if hasattr(logits, "detach"):  # of PyTorch, whose bfloat16 NumPy lacks
            logits = logits.detach().float().cpu()
        array: Array = np.asarray(logits)[0, : len(tokens) - 1]
        return array

    def feeds(self, tokens: Sequence[int]) -> dict[str, Array]:
        """Return the inputs of a run."""
        rows, length = (extent if isinstance(extent, int) else None for extent in self._ids.shape)
        if length is not None and len(tokens) > length:
            raise InputError(f"a text has {len(tokens)} tokens, and the model takes {length}. Fix: write shorter texts")
        padded = [*tokens, *[tokens[-1]] * ((length or 0) - len(tokens))]  # a decoder does not look ahead
        ids = np.tile(np.asarray(padded, dtype=_numpy_name(self._ids.dtype)), (rows or 1, 1))
        return {
            name: np.ascontiguousarray(_MADE.get(name, np.array)(ids)).astype(_numpy_name(info.dtype))
            for name, info in self._inputs.items()
        }


def _numpy_name(dtype: Any) -> str:
    return str(dtype).rpartition(".")[2]
