# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""`ModuleOutputs`: the tensors of a graph that are the results of each module, by the names of its nodes."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from xpuruntime.evidence.metadata import module_of_node

__all__ = ["ModuleOutputs"]


class ModuleOutputs:
    """The tensors that leave the modules of a model whose nodes are called ``"<path of the module>/<operator>"``."""

    def __init__(self, model: Any) -> None:
        nodes = [node for node in model.nodes if not node.graph]
        results = {info.name for info in model.outputs}
        readers: dict[str, set[str]] = defaultdict(set)
        for node in nodes:
            path = _path_of(node)
            for name in node.inputs:
                readers[name].add(path)
        #: Path to the tensors made inside, in the order of the graph, each with whether others surely read it.
        self._found: dict[str, list[tuple[str, bool]]] = {}
        for node in nodes:
            for path in _paths_around(_path_of(node)):
                leaving = self._found.setdefault(path, [])
                for name in node.outputs:
                    read = name in results or any(not _inside(one, path) for one in readers.get(name, ()))
                    if name and (read or name not in readers):
                        leaving.append((name, read))

    def has(self, path: str) -> bool:
        """Say whether the model has nodes of a module."""
        return path in self._found

    def of(self, path: str, count: int) -> tuple[str, ...]:
        """Return the tensors that nodes of a module make for others, in the order of the graph.

        Those that nobody reads, such as statistics of a norm, are among them only where `count` shows that the module
        returns them.
        """
        found = self._found.get(path, [])
        read = tuple(name for name, sure in found if sure)
        return tuple(name for name, _ in found) if len(read) != count == len(found) else read


def _path_of(node: Any) -> str:
    return node.result_of or module_of_node(node.name)


def _inside(path: str, around: str) -> bool:
    return path == around or path.startswith(f"{around}.")


def _paths_around(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[: i + 1]) for i in range(len(parts))]
