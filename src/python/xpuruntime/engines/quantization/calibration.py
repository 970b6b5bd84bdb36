# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`Calibration`: inputs of a model to quantize it with, checked, counted and digested."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from xpuruntime.engines.arrays import digest_parts
from xpuruntime.engines.input_binding import ConversionLog, InputValidator
from xpuruntime.engines.quantization.sample_sources import open_source
from xpuruntime.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np

    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.engines.quantization.sample_sources import CalibrationSamples

__all__ = ["Calibration"]


class Calibration:
    """Inputs to quantize a model with: each sample is what one `run` of the model would get.

    Everything is read once when this is made: each sample is checked against the model, counted, and goes into the
    digest. A generator is kept in a temporary file from then on; files and lists are read again where they are.

    Parameters
    ----------
    data : path, array, mapping, list or iterable
        * The path of an ``.npz`` file, or a mapping of input name to array: the first axis counts samples. An array
          with as many dimensions as the input is cut into batches of the size that the model fixes, else of 1; one
          with one dimension more holds whole inputs. Or one array for each input and sample, ``"<input>/0"``,
          ``"<input>/1"``, …
        * The path of an ``.npy`` file, or an array: the same for a model with one input.
        * The path of a folder: each ``.npz`` file in it is one sample, an array for each input; with one input also
          ``.npy``. In the order of their names.
        * A list or any iterable of mappings of input name to array, or of arrays for a model with one input: each item
          is one sample.
    model : ModelInfo
        As the policy's shapes make it.

    Attributes
    ----------
    count : int
        Samples.
    digest : str
        SHA-256 in hex over names, dtypes, shapes and values of all samples in their order.
    content : str
        The same over the samples in any order.
    origin : str
        Where they come from, for messages.

    Raises
    ------
    InputError
        There are no samples, or one does not fit the model, or has NaN or infinity in it; the sample is named.
    """

    def __init__(self, data: Any, model: ModelInfo) -> None:
        self._source: CalibrationSamples = open_source(data, model)
        self.origin = self._source.origin
        self._check = InputValidator(
            (*model.inputs, *model.overridable_inputs), [t.name for t in model.overridable_inputs]
        )
        digest, count, each = hashlib.sha256(), 0, []
        for sample in self._checked():
            own = hashlib.sha256()
            for part in digest_parts(sample):
                digest.update(part)
                own.update(part)
            digest.update(b"\n")
            each.append(own.digest())
            count += 1
        if not count:
            raise InputError(
                f"calibration: {self.origin} holds no samples; quantizing needs inputs like those that the model will "
                "get, some tens to some hundreds of them"
            )
        self.count = count
        self.digest = digest.hexdigest()
        self.content = hashlib.sha256(b"".join(sorted(each))).hexdigest()

    @classmethod
    def of(cls, data: Any, model: ModelInfo) -> Calibration | None:
        """Return `data` as a calibration of `model`; ``None``, and what is one already, stays as it is."""
        return data if data is None or isinstance(data, cls) else cls(data, model)

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        """Yield name to array, C-contiguous, one sample at a time: the same samples each time."""
        seen = 0
        for sample in self._checked():
            seen += 1
            yield sample
        if seen != self.count:
            raise InputError(
                f"calibration: {self.origin} held {self.count} samples when it was checked, and holds {seen} now; "
                "leave it as it is until the session is open"
            )

    def __repr__(self) -> str:
        return f"<Calibration {self.count} samples of {self.origin}, sha256 {self.digest[:12]}>"

    def _checked(self) -> Iterator[dict[str, np.ndarray[Any, Any]]]:
        import numpy as np

        log = ConversionLog()
        for index, (origin, sample) in enumerate(self._source):
            try:
                ready = self._check.on_host(sample, strict=False, log=log)
                for name, array in ready.items():
                    if not isinstance(array, np.ndarray) or array.dtype.kind not in "biufV":
                        kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
                        raise InputError(f"input {name!r} is {kind}. Fix: give tensors of numbers")
                    if array.dtype.kind == "f" and not np.isfinite(array).all():
                        raise InputError(
                            f"input {name!r} has NaN or infinity, which would become its range. Fix: leave it out"
                        )
            except InputError as error:
                raise InputError(f"calibration sample {index} ({origin}): {error}") from None
            yield ready
