# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`capture_decode`: have a model of transformers generate by CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from xpuruntime.argument_types import COUNT, COUNTS, FLAG, NUMBER, ArgumentType, check_types
from xpuruntime.errors import InputError, ModelError, UnsupportedOperationError
from xpuruntime.pytorch.capture.api import compiled_by, device_of
from xpuruntime.pytorch.capture.captured_state import CapturedState
from xpuruntime.pytorch.capture.graph_recorder import CudaRecorder
from xpuruntime.pytorch.generation.captured_decode import CapturedDecode
from xpuruntime.pytorch.generation.decode_calls import refuse_training, why_apart, why_plain

_LEAST_EXTENT = 128
_RANGES = ArgumentType("'pow2' or a list of whole numbers", lambda value: _is_pow2(value) or COUNTS.fits(value))
_COMPILE = ArgumentType(
    "True, False or a mapping of options of torch.compile", lambda value: isinstance(value, (bool, Mapping))
)


def capture_decode(
    model: Any,
    *,
    max_length: int,
    batch: int | Sequence[int] = 1,
    kv_ranges: Literal["pow2"] | Sequence[int] = "pow2",
    check_every: int = 4,
    max_graphs: int = 32,
    fuse: bool = True,
    tolerance: float | None = None,
    compile: bool | Mapping[str, Any] = True,
    strict: bool | None = None,
) -> CapturedDecode:
    """Have a model of transformers generate by CUDA graphs of whole decode steps.

    A graph holds forward, logits processors, the choice of the token and the end of texts, over a static cache that
    stays for all calls. It belongs to a batch size, a range of the cache that attention reads, the processors and their
    values, sampling or not, and the kernel policy; each is captured when it first comes, after the first token was
    returned. Without a CUDA device the same loop runs eagerly, with the same tokens.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A decoder in evaluation mode, on one device.
    max_length : int
        Most tokens of a text, prompt included: the length of the cache.
    batch : int or sequence of int
        Batch sizes that have a cache, returned sequences included.
    kv_ranges : "pow2" or sequence of int
        How many positions of the cache attention may read; the least that holds the text is taken. ``"pow2"``: powers
        of two from 128, and `max_length`.
    check_every : int
        After how many tokens the host asks whether all texts have ended. Tokens beyond are cut off, and random numbers
        drawn for them are given back. With a streamer, it asks after each.
    max_graphs : int
        The least recently used gives way to another.
    fuse : bool
        Where no kernel policy is in force, which would name single operations: have decode steps of Llama-like models
        run five Triton kernels a layer, on CUDA devices; elsewhere, compute products of one input as one, q, k, v and
        gate, up. A probe of each layer and batch size decides whether it is used, and the time of a step whether a
        product is computed by such a kernel or by cuBLAS; the report has a line for each.
        Weights become views of joined ones until `CapturedDecode.reset`; none is held twice.
    tolerance : float, optional
        By how much results of a layer and its kernels may differ in the probe, as a share of the largest magnitude.
        Default: five roundings of bfloat16 (5 * 2**-8), of float32 2**-16. 0 leaves what has the same bits, as joined
        products may.
    compile : bool or mapping
        Have ``torch.compile`` compile each step before it is captured, with these options. Steps that run eagerly
        are not compiled.
    strict : bool, optional
        Whether what would run eagerly is an error; ``True`` needs a CUDA device. Default: as the mode of the policy
        that is in force at a call, for what that call asks.

    Returns
    -------
    CapturedDecode

    Raises
    ------
    InputError
        A length, batch size or range does not fit.
    ModelError
        The model has no ``generate``, or is in training mode.
    UnsupportedOperationError
        With ``strict=True``, nothing can be captured.

    Notes
    -----
    Beams, assisted decoding, other logits processors and stopping criteria, stop strings, scores and attentions in the
    result, embeddings and images as a prompt, encoder-decoders and models on several devices are left to plain
    ``generate``; `CapturedDecode.report` has each reason. So are models that do not run over ranges of a cache: two
    tokens are tried, and counted in evidence, when a batch size first comes.

    Examples
    --------
    >>> import xpuruntime.pytorch as xrt_torch
    >>> captured = xrt_torch.capture_decode(model, max_length=2048, batch=(1, 8))  # doctest: +SKIP
    >>> captured.generate(ids, attention_mask=mask, max_new_tokens=256)  # doctest: +SKIP
    """
    batches: Any = (batch,) if COUNT.fits(batch) else batch
    types = {
        "max_length": COUNT, "check_every": COUNT, "max_graphs": COUNT, "batch": COUNTS, "kv_ranges": _RANGES,
        "fuse": FLAG, "tolerance": NUMBER, "compile": _COMPILE, "strict": FLAG,
    }  # fmt: skip
    check_types(types, {**locals(), "batch": batches}, optional=["tolerance", "strict"])
    if not isinstance(model, torch.nn.Module) or not hasattr(model, "prepare_inputs_for_generation"):
        raise ModelError(
            f"capture_decode takes a model of transformers that generates, got a {type(model).__name__}. Fix: give an "
            "AutoModelForCausalLM"
        )
    refuse_training(model)
    batches = tuple(batches)
    if min((max_length, check_every, max_graphs, *batches)) < 1 or not batches:
        raise InputError("max_length, batch, check_every and max_graphs are at least 1, such as batch=(1, 8)")
    if tolerance is not None and not 0 <= tolerance < 1:
        raise InputError(f"tolerance is {tolerance}, and a share of the largest magnitude is from 0 to below 1")
    device, reason = device_of(CapturedState(modules=[model]), ())
    plain = why_plain(model) or why_apart(model)
    if strict and (plain or reason):
        fix = "leave strict=True out to have it run eagerly"
        raise UnsupportedOperationError(f"capture_decode: {plain or reason}", fix=fix)
    recorder = None if plain or reason else CudaRecorder(device)
    extents = _extents(kv_ranges, max_length)
    settings = (max_length, batches, extents, check_every, max_graphs, fuse, tolerance, compile, strict)
    if compile is not True:  # options that torch.compile refuses are refused here
        compiled_by(lambda: None, compile)
    return CapturedDecode(model, device, recorder, *settings, reason)


def _is_pow2(value: Any) -> bool:
    return isinstance(value, str) and value == "pow2"


def _extents(kv_ranges: Any, max_length: int) -> tuple[int, ...]:
    if _is_pow2(kv_ranges):
        powers = (2**power for power in range(_LEAST_EXTENT.bit_length() - 1, max_length.bit_length()))
        return tuple(sorted({*(power for power in powers if power < max_length), max_length}))
    kv_ranges = tuple(kv_ranges)
    if not all(0 < end <= max_length for end in kv_ranges):
        raise InputError(f"kv_ranges is 'pow2', or lengths from 1 to max_length={max_length}, got {kv_ranges!r:.60}")
    return tuple(sorted({*kv_ranges, max_length}))
