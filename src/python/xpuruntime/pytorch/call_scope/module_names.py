# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Module paths: one path for each ``nn.Module``, however it is called.

It is the name in ``named_modules()`` of a root: of the one that a policy names, or of the largest one that has been
called. Wrappers, such as ``DistributedDataParallel``, have the path of what they hold.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from typing import NamedTuple

import torch

from xpuruntime.pytorch import _private_api

#: Classes of wrappers, by module and name since few programs import them, and where they keep what they wrap.
_WRAPPERS = {
    ("torch.nn.parallel.data_parallel", "DataParallel"): "module",
    ("torch.nn.parallel.distributed", "DistributedDataParallel"): "module",
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel"): "_fsdp_wrapped_module",
    ("torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "ActivationWrapper"): "_checkpoint_wrapped_module",
    ("torch._dynamo.eval_frame", "OptimizedModule"): "_orig_mod",
    ("torch.optim.swa_utils", "AveragedModel"): "module",
    ("lightning.fabric.wrappers", "_FabricModule"): "_forward_module",
    ("lightning_fabric.wrappers", "_FabricModule"): "_forward_module",
    ("deepspeed.runtime.engine", "DeepSpeedEngine"): "module",
}


class Known(NamedTuple):
    """A module with a path, and how it is reached, so that it is seen when another one has come to its place."""

    module: weakref.ref[torch.nn.Module]
    path: str
    root: weakref.ref[torch.nn.Module]
    keys: tuple[str, ...]

    def holds(self) -> bool:
        """Say whether the path leads to the module still."""
        module = self.module()
        at: torch.nn.Module | None = self.root()
        for key in self.keys:
            at = None if at is None else _private_api.child_modules(at).get(key)
        return module is not None and at is module


class _Root(NamedTuple):
    module: weakref.ref[torch.nn.Module]
    path: str  # of the root itself: of a replica that of its original


_MOST = 4096
#: Roots that are gone and are kept; with one more, all of them are dropped.
_MOST_DEAD = 16
_inner_names: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def inner_name(kind: type) -> str:
    """Return where a class of wrappers keeps what it wraps; empty: it is no such class."""
    wrapper = _inner_names.get(kind)
    if wrapper is None:
        names = ((base.__module__, base.__qualname__) for base in kind.__mro__)
        wrapper = _inner_names[kind] = next((_WRAPPERS[name] for name in names if name in _WRAPPERS), "")
    return wrapper


def walk(root: torch.nn.Module, path: str = "") -> Iterator[tuple[torch.nn.Module, str, tuple[str, ...]]]:
    """Yield each module of a root once, as ``named_modules()`` does, with its path and with the keys that lead to it.

    Of a module with several names the first one counts.
    """
    done: set[int] = set()
    left: list[tuple[torch.nn.Module, str, tuple[str, ...]]] = [(root, path, ())]
    while left:
        module, path, keys = left.pop()
        if id(module) in done:
            continue
        done.add(id(module))
        yield module, path, keys
        inner = inner_name(type(module))
        inside = [
            (child, path if key == inner else f"{path}.{key}".lstrip("."), (*keys, key))
            for key, child in _private_api.child_modules(module).items()
            if child is not None
        ]
        # What is wrapped comes first, since a wrapper may have it by another name, too.
        inside.sort(key=lambda entry: entry[2][-1] != inner)
        left += reversed(inside)


def _named_in(root: torch.nn.Module, path: str) -> Iterator[tuple[int, Known]]:
    start = weakref.ref(root)
    return ((id(module), Known(weakref.ref(module), name, start, keys)) for module, name, keys in walk(root, path))


def _all_in(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    done: set[int] = set()
    left = [root]
    while left:
        module = left.pop()
        if id(module) in done:
            continue
        done.add(id(module))
        yield module
        left += [child for child in _private_api.child_modules(module).values() if child is not None]


class ModuleNames:
    """The modules that are known, each with its path. There is one in a process, `NAMES`."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        #: By `id`; read without the lock, iterated with it.
        self._known: dict[int, Known] = {}
        self._seen: dict[int, _Root] = {}
        #: Roots that policies name, and whether those come first.
        self._named: list[tuple[bool, torch.nn.Module]] = []
        self._named_ids: frozenset[int] = frozenset()
        #: Modules, each with a root that it is in, that have their path from a larger one; by `id`.
        self._shared: set[tuple[int, int]] = set()
        #: By `id`, the modules of a root, each by its `id`, while a module runs that none calls: what a forward makes
        #: anew is looked for in there.
        self._members: dict[int, frozenset[int]] = {}
        #: The same until PyTorch tells that a module comes into another one, or all are named anew: in there is looked
        #: for what is of a class that was new and in none before, such as a loss that each step makes. Layers of
        #: PyTorch's with weights, which any model may take in, are not.
        self._kept_members: dict[int, frozenset[int]] = {}
        self._apart: weakref.WeakSet[type] = weakref.WeakSet()
        #: Of the ``DataParallel`` that ran last, by the class of what it holds, the path.
        self._parallel: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()

    def name_root(self, root: torch.nn.Module, *, first: bool) -> None:
        """Have paths begin at this module, until `forget_root`.

        At one that is not `first` they begin where no such one holds it.
        """
        with self._lock:
            self._named.append((first, root))
            self._named_ids = frozenset(id(root) for _, root in self._named)
            self._name_all()

    def forget_root(self, root: torch.nn.Module, *, first: bool) -> None:
        """Undo one `name_root`."""
        with self._lock:
            for at in range(len(self._named) - 1, -1, -1):
                if self._named[at][0] is first and self._named[at][1] is root:
                    del self._named[at]
                    break
            self._named_ids = frozenset(id(root) for _, root in self._named)
            self._see(root)
            self._name_all()

    def find(self, number: int) -> Known | None:
        """Return what is known of a module, by its `id`."""
        entry = self._known.get(number)
        return entry if entry is not None and entry.holds() else None

    def known(self) -> list[str]:
        """Return all paths of modules that are known, in the order of their roots."""
        with self._lock:
            return list(dict.fromkeys(known.path for known in self._known.values() if known.module() is not None))

    def outermost(self, module: torch.nn.Module) -> Known:
        """Return what is known of a module that is called by none."""
        number = id(module)
        entry = self._known.get(number)
        self._members = {}
        if entry is None or entry.module() is not module or not entry.holds():
            with self._lock:
                self._see(module)
                if not self._name_apart(module):
                    self._name_all()
                entry = self._known[number]
        if type(module) is torch.nn.DataParallel:
            self._parallel[type(module.module)] = entry.path
        return entry

    def inside(self, module: torch.nn.Module, outer: str, root: torch.nn.Module | None) -> str:
        """Return the path of a module that is called by another one."""
        entry = self._known.get(id(module))
        if entry is not None and entry.module() is module:
            if (entry.root() is root or id(entry.root()) in self._named_ids) and entry.holds():
                return self._noted(module, entry.path)
            # Of another root it may be, as what two models share. Or it has come into this one since.
            if entry.holds() and ((id(module), id(root)) in self._shared or not self._is_in(module, root)):
                return self._noted(module, entry.path)
        elif not self._is_in(module, root):
            return f"{outer}.{type(module).__name__}".lstrip(".")
        with self._lock:
            self._name_all()
            entry = self._known.get(id(module))
            if entry is not None and entry.root() is not root:
                self._shared.add((id(module), id(root)))
        return f"{outer}.{type(module).__name__}".lstrip(".") if entry is None else self._noted(module, entry.path)

    def _noted(self, module: torch.nn.Module, path: str) -> str:
        if type(module) is torch.nn.DataParallel:
            self._parallel[type(module.module)] = path
        return path

    def _is_in(self, module: torch.nn.Module, root: torch.nn.Module | None) -> bool:
        roots = [named_root for _, named_root in self._named]
        if root is not None:
            roots.append(root)
        return any(id(module) in self._members_of(root, self._members) for root in roots)

    @staticmethod
    def _members_of(root: torch.nn.Module, members: dict[int, frozenset[int]]) -> frozenset[int]:
        member_ids = members.get(id(root))
        if member_ids is None:
            member_ids = members[id(root)] = frozenset(map(id, _all_in(root)))
        return member_ids

    def note_registration(self, parent: torch.nn.Module) -> None:
        """Take note that a module comes into another one."""
        entry = self._known.get(id(parent))
        if entry is not None and entry.module() is parent:  # and not one that is gone, at the same address
            self._members, self._kept_members = {}, {}

    def _see(self, module: torch.nn.Module) -> None:
        # DataParallel runs copies, which are new ones in each call.
        path = self._parallel.get(type(module), "") if _private_api.is_replica(module) else ""
        self._seen[id(module)] = _Root(weakref.ref(module), path)
        self._kept_members.pop(id(module), None)

    def _name_apart(self, module: torch.nn.Module) -> bool:
        """Name the modules of a new root alone, such as a new loss of each step; not where roots share some."""
        roots = [root.module() for root in self._seen.values()]
        if roots.count(None) > _MOST_DEAD:
            self._drop_dead()
        own = dict(_named_in(module, self._seen[id(module)].path))
        for number in own:
            entry = self._known.get(number)
            if entry is not None and entry.module() is not None:
                return False
        roots += [root for _, root in self._named]
        new = type(module) not in self._apart
        if new:  # of some ways into another module PyTorch tells nothing
            self._kept_members = {}
        for root in roots:
            if root is not None and root is not module and id(module) in self._members_of(root, self._kept_members):
                return False
        holds = new and next(module.parameters(recurse=False), None) is not None
        if new and not (holds and type(module).__module__.startswith("torch.")):
            self._apart.add(type(module))
        self._known.update(own)
        return True

    def _drop_dead(self) -> None:
        self._seen = {number: root for number, root in self._seen.items() if root.module() is not None}
        self._known = {number: entry for number, entry in self._known.items() if entry.module() is not None}

    def _name_all(self) -> None:
        if len(self._shared) > _MOST:
            self._shared.clear()
        self._drop_dead()
        known_by_id: dict[int, Known] = {}
        named = [(root, "") for first in (True, False) for is_first, root in self._named if is_first is first]
        seen = [(module, root.path) for root in self._seen.values() if (module := root.module()) is not None]
        seen.sort(key=lambda entry: -sum(1 for _ in _all_in(entry[0])))
        for at, (root, path) in enumerate((*named, *seen)):
            if at >= len(named) and id(root) in known_by_id:
                continue  # in a larger one
            for number, known in _named_in(root, path):
                known_by_id.setdefault(number, known)
        self._known = known_by_id
        self._kept_members = {}


NAMES = ModuleNames()
find = NAMES.find
forget_root = NAMES.forget_root
inside = NAMES.inside
known = NAMES.known
name_root = NAMES.name_root
note_registration = NAMES.note_registration
outermost = NAMES.outermost
