# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Files that Ray nodes need for a search: model, external data, calibration inputs, samples."""

from __future__ import annotations

from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from xpuruntime.engines.model import ModelInfo
    from xpuruntime.tuning.executors.runner import RunnerJob

__all__ = ["SAMPLES", "job_on_node", "search_files"]

SAMPLES = "samples"
_MODEL, _CALIBRATION = "model", "calibration"


def search_files(
    model: Path, info: ModelInfo, calibration: str | None, samples: Path
) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Return the files by their names on a node, and which of these are the model's."""
    found = _within(_MODEL, model)
    for one in info.external_files:
        found[f"{_MODEL}/{PurePosixPath(one.location)}"] = Path(info.base_dir or model.parent) / one.location
    mine = tuple(found)
    if calibration is not None:
        found |= _within(_CALIBRATION, Path(calibration))
    found |= {f"{SAMPLES}/{path.relative_to(samples).as_posix()}": path for path in _files(samples)}
    return found, mine


def job_on_node(job: RunnerJob, *, shared: bool) -> RunnerJob:
    """Return a job with paths on a node: relative to its folder, but for a model that it has at the same path."""
    return msgspec.structs.replace(
        job,
        model=job.model if shared else f"{_MODEL}/{Path(job.model).name}",
        calibration=None if job.calibration is None else f"{_CALIBRATION}/{Path(job.calibration).name}",
        samples=SAMPLES,
    )


def _within(folder: str, path: Path) -> dict[str, Path]:
    if not path.is_dir():
        return {f"{folder}/{path.name}": path}
    return {f"{folder}/{path.name}/{one.relative_to(path).as_posix()}": one for one in _files(path)}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
