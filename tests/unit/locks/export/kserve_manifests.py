# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Manifests against the models of the package kserve: ``python kserve_manifests.py FILE…`` prints what does not fit.

The constructors of these models refuse what is missing; that no key is unknown is checked here.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import kserve.models
import kubernetes.client
import yaml

_DOCUMENTS = {"ClusterServingRuntime": "V1alpha1ClusterServingRuntime", "InferenceService": "V1beta1InferenceService"}
_PLAIN: dict[str, type] = {"str": str, "int": int, "bool": bool, "object": object}


def problems(value: Any, kind: str, where: str) -> list[str]:
    """Return what of a value is not of a type, which is written as generated clients write theirs."""
    if many := re.fullmatch(r"[Ll]ist\[(.*)\]", kind):
        if not isinstance(value, list):
            return [f"{where}: {value!r} is no list"]
        return [problem for at, item in enumerate(value) for problem in problems(item, many[1], f"{where}[{at}]")]
    if pairs := re.fullmatch(r"(?:dict\(|Dict\[)str, (.*)[)\]]", kind):
        return [problem for key, one in value.items() for problem in problems(one, pairs[1], f"{where}.{key}")]
    if kind in _PLAIN:
        return [] if isinstance(value, _PLAIN[kind]) else [f"{where}: {value!r} is no {kind}"]
    if kind == "IntOrString":
        return [] if isinstance(value, (int, str)) else [f"{where}: {value!r} is no {kind}"]
    model = getattr(kserve.models, kind, None) or getattr(kubernetes.client, kind)
    if not isinstance(value, dict):
        return [f"{where}: {value!r} is no {kind}"]
    attributes = {key: name for name, key in model.attribute_map.items()}
    texts = [f"{where}: unknown key {key!r}" for key in value.keys() - attributes.keys()]
    given = {attributes[key]: one for key, one in value.items() if key in attributes}
    for name, one in given.items():
        texts += problems(one, model.openapi_types[name], f"{where}.{model.attribute_map[name]}")
    try:
        model(**given)
    except ValueError as error:
        texts.append(f"{where}: {error}")
    return texts


def main() -> None:
    found = []
    for name in sys.argv[1:]:
        document = yaml.safe_load(Path(name).read_text())
        found += problems(document, _DOCUMENTS[document["kind"]], document["kind"])
    json.dump(found, sys.stdout)


main()
