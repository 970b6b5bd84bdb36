# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Cells of the operator-pattern sweep: one engine and precision, patterns one after the other, a JSON line for each.

Started as a program by the test, in a process of its own: what crashes is the pattern whose line has no result.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

import operator_patterns

import xpuruntime as xrt

__all__ = ["CALIBRATION", "main"]

#: Seeds of the calibration; that of the input that is run is one of them, so that it lies within the ranges.
CALIBRATION = range(9)


def main(engine: str, precision: str, folder: str, explained: str, names: list[str]) -> None:
    """Run the patterns, and write a line when one begins and one with its result.

    Parameters
    ----------
    engine, precision, folder : str
    explained : str
        Names, separated by commas, of the patterns for which a report is made; the others only run, twice.
    names : list of str
    """
    warnings.simplefilter("ignore", xrt.XpuRuntimeWarning)
    for name in names:
        print(json.dumps({"pattern": name}), flush=True)
        row = _cell(engine, precision, Path(folder), name, explain=name in explained.split(","))
        print(json.dumps({"pattern": name, **row}), flush=True)


def _cell(engine: str, precision: str, folder: Path, name: str, *, explain: bool) -> dict[str, Any]:
    execution: dict[str, Any] = {"engine": engine, "device": "cpu", "precision": precision}
    if engine == "qnn":
        execution |= {"device": "npu", "provider_options": {"qnn": {"soc": "sm8650"}}}
    given = {}
    if precision == "int8" and name not in operator_patterns.QUANTIZED:
        given["calibration"] = [operator_patterns.inputs_of(name, seed) for seed in CALIBRATION]
    feeds = operator_patterns.inputs_of(name)
    try:
        path = operator_patterns.write(name, folder)
        with xrt.InferenceSession(path, policy={"execution": execution}, **given) as session:
            outputs = session.run(feeds)
            report = session.explain(feeds, runs=1) if explain else None
            again = session.run(feeds)
    except xrt.XpuRuntimeError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    except BaseException:
        return {"bare": traceback.format_exc()}
    ran = {"outputs": _plain(outputs), "again": _plain(again)}
    if report is None:
        return ran
    return {
        **ran,
        "honoured": report.honoured,
        "precision": next(
            (observation.status for observation in report.observations if observation.key == "execution.precision"),
            "missing",
        ),
        "deviations": [f"{deviation.key}: {deviation.reason}" for deviation in report.deviations],
    }


def _plain(outputs: Any) -> dict[str, Any]:
    return {
        name: {"dtype": str(array.dtype), "shape": list(array.shape), "values": array.ravel().tolist()}
        for name, array in outputs.items()
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4], sys.argv[5:])
