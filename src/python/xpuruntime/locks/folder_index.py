# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
"""Many reports, locks and verifications of the same models, and which of them is the odd one out.

`index_folder` takes those of a folder, `index_reports` saved reports, which it also compares with a baseline.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from xpuruntime.errors import InputError, XpuRuntimeError
from xpuruntime.evidence import Report, compare_reports
from xpuruntime.evidence.difference import listed
from xpuruntime.evidence.documents import Page
from xpuruntime.files.paths import kind_of, user_path
from xpuruntime.files.reading import decode_json, read_regular
from xpuruntime.lockfile.canonical import load_lock
from xpuruntime.lockfile.drift import shown
from xpuruntime.locks.verification.result import VerificationResult

if TYPE_CHECKING:
    from rich.console import RenderableType

    from xpuruntime.lockfile.records import Lock

Kind = Literal["report", "lock", "verification"]
#: Schemas by their beginning, and the most bytes of a file that is looked into.
_SCHEMAS: dict[str, Kind] = {
    "xpuruntime.report/": "report",
    "xpuruntime.lock/": "lock",
    "xpuruntime.verification/": "verification",
}
_MOST = 1 << 28
_SCHEMA = re.compile(rb'"schema": ?"(xpuruntime\.[a-z]+/)')
#: Files of a kind and a model below which none is the odd one out.
_FEW = 3
#: Columns of the table that holds reports against a baseline.
_AGAINST = ("report", "engine", ">median", "differs")


class OddFact(msgspec.Struct, frozen=True, kw_only=True):
    """A fact of a file that most others of the same kind and model have otherwise.

    Attributes
    ----------
    name : str
        Such as ``"packages.onnxruntime-gpu"`` or ``"unit conv1"``.
    value, usual : str
        Of this file, and of most; ``"nothing"`` where there is none.
    agreeing, of : int
        How many files have the usual value, of how many.
    """

    name: str
    value: str
    usual: str
    agreeing: int
    of: int


class IndexedFile(msgspec.Struct, frozen=True, kw_only=True):
    """One file of an index.

    Attributes
    ----------
    path : str
        From the folder.
    kind : {"report", "lock", "verification"}
    model : str
        The name of its file.
    engine, device, created, headline : str
        Empty where they are not known.
    good : bool
        Whether the report is honoured or the verification passed; of a lock, whether it can be read.
    odd : tuple of OddFact
    error : str
        Why it cannot be read.
    median_us : float or None
        Of a report, the median of whole runs without instruments.
    changes : str
        How a report differs from the baseline; empty where there is none, and of the baseline itself.
    same : bool
        Whether nothing else ran than in the baseline.
    """

    path: str
    kind: Kind
    model: str = ""
    engine: str = ""
    device: str = ""
    created: str = ""
    headline: str = ""
    good: bool = True
    odd: tuple[OddFact, ...] = ()
    error: str = ""
    median_us: float | None = None
    changes: str = ""
    same: bool = True


class FolderIndex(Page, frozen=True, kw_only=True):
    """An index of the reports, locks and verifications of a folder.

    Attributes
    ----------
    schema : str
    folder : str
    base : str
        The folder, as seen from the page.
    files : tuple of IndexedFile
        Those that differ from the others first.
    undecided : tuple of str
        Facts that no majority agrees on, with the kind and the model.
    baseline : str
        The path of the report that the others are compared with; empty where there is none.
    """

    NOUN: ClassVar = "the index"
    STATED: ClassVar = ("headline",)
    TABLE: ClassVar = "files"

    schema: str = "xpuruntime.index/1"
    folder: str
    base: str = "."
    files: tuple[IndexedFile, ...]
    undecided: tuple[str, ...] = ()
    baseline: str = ""

    @property
    def odd(self) -> tuple[IndexedFile, ...]:
        """The files that differ from most others of their kind and model, or cannot be read."""
        return tuple(file for file in self.files if file.odd or file.error)

    @property
    def headline(self) -> str:
        """How many files there are, and how many differ from the others, or from the baseline and which is odd."""
        if self.baseline:
            apart = sum(not file.same for file in self.files)
            worst = sorted(self.odd, key=lambda file: -len(file.odd))
            odd = f"; odd among all: {listed([file.path for file in worst], 2)}" if worst else ""
            verb = "differs" if apart == 1 else "differ"
            return f"{apart} of {len(self.files) - 1} reports {verb} from {self.baseline}{odd}"
        many = f"{len(self.files)} file{'' if len(self.files) == 1 else 's'}"
        return f"{many}, {len(self.odd)} odd" if self.odd else f"{many}, none odd"

    def to_html(self) -> str:
        """Return one page for a browser, which loads nothing from elsewhere."""
        from xpuruntime.evidence.page.document import assemble
        from xpuruntime.notebook import escaped, fragment, fragment_table

        names = ("file", "kind", "model", "engine", "device", "says")
        rows = [(file.path, file.kind, file.model, file.engine, file.device, file.headline) for file in self.files]
        bad = self.odd or not all(file.same for file in self.files)
        head = f"<p class='xrt-headline xrt-{'substituted' if bad else 'honoured'}'>{escaped(self.headline)}</p>"
        parts = [head, fragment_table("Files", names, rows)]
        if self.baseline:
            parts.insert(1, fragment_table(f"Against {self.baseline}", _AGAINST, self._against()))
        places = {file.path: Path(self.base, file.path).as_posix() for file in self.files}
        links = {path: f"./{quote(place, errors='backslashreplace')}" for path, place in places.items()}
        medians = {row[0]: row[2] for row in self._against()}
        data = {**self.to_dict(), "links": links, "medians": medians}
        script = ("elements", "indexed", "shell", "index")
        return assemble("index.html", "index", script, self.headline, data, fragment(parts))

    def _against(self) -> list[tuple[str, str, str, str]]:
        from xpuruntime.evidence.render_text.changes import duration_text

        return [
            (
                file.path,
                f"{file.engine}@{file.device}",
                "-" if file.median_us is None else duration_text(file.median_us),
                file.changes or "baseline",
            )
            for file in self.files
        ]

    def __rich__(self) -> RenderableType:
        """Return the headline, what differs from the baseline, and a table of what is odd."""
        from rich.console import Group
        from rich.text import Text

        from xpuruntime.tables import rows_table

        bad = self.odd or not all(file.same for file in self.files)
        parts: list[RenderableType] = [Text(self.headline, "bold yellow" if bad else "bold green")]
        if self.baseline:
            parts += rows_table(f"against {self.baseline}", _AGAINST, self._against(), most=None)
        rows = [
            (file.path, fact.name, fact.value, f"{fact.usual} ({fact.agreeing} of {fact.of})")
            for file in self.files
            for fact in file.odd
        ]
        parts += rows_table("odd ones", ("file", "fact", "value", "most others"), rows) if rows else []
        parts += [Text(f"not readable: {file.path}: {file.error}", "yellow") for file in self.files if file.error]
        parts += [Text(f"no majority: {fact}") for fact in self.undecided]
        return Group(*parts)


class _Read(NamedTuple):
    file: IndexedFile
    facts: Mapping[str, str]


def index_folder(folder: str | os.PathLike[str], *, page: str | os.PathLike[str] | None = None) -> FolderIndex:
    """Read all reports, locks and verifications below a folder, and compare those of the same kind and model.

    A fact that more than half of at least three files agree on makes the others odd. Times and notes are not compared,
    and files of other tools are left out.

    Parameters
    ----------
    folder : str or path
    page : str or path, optional
        Where the page will be written, from which its links lead to the files; default: in the folder.

    Raises
    ------
    InputError
        There is no such folder, or nothing in it to index.
    """
    root = user_path(folder, "the folder")
    if kind_of(root) != "folder":
        raise InputError(f"{folder} is not a folder. Fix: give the folder that the reports and locks lie in")
    read = [entry for path in sorted(root.rglob("*")) if (entry := _read(path, root)) is not None]
    if not read:
        raise InputError(
            f"{folder} has no report, lock or verification. Fix: save some there, such as with `xrt explain -o`"
        )
    files, undecided = _indexed(read)
    files.sort(key=lambda file: (not file.error, -len(file.odd), file.path))
    page_folder = root if page is None else user_path(page, "the page").parent
    base = os.path.relpath(root, page_folder)
    return FolderIndex(folder=str(folder), base=base, files=tuple(files), undecided=tuple(undecided))


def index_reports(
    reports: Sequence[str | os.PathLike[str]],
    baseline: str | os.PathLike[str] | None = None,
    *,
    noise: float = 0.10,
    noise_us: float = 1.0,
    page: str | os.PathLike[str] | None = None,
) -> FolderIndex:
    """Hold saved reports of one model against one of them, and name the odd one among all.

    Parameters
    ----------
    reports : sequence of str or path
    baseline : str or path, optional
        Default: the first report.
    noise, noise_us : float
        As in `compare_reports`.
    page : str or path, optional
        Where the page will be written, from which its links lead to the reports; default: in their folder.

    Raises
    ------
    InputError
        A file is no report, or of another model than the baseline.
    """
    first = reports[0] if baseline is None else baseline
    paths = list(dict.fromkeys(user_path(path, "the report").absolute() for path in (first, *reports)))
    root = Path(os.path.commonpath([path.parent for path in paths]))
    loaded = {str(path.relative_to(root)): Report.load(path) for path in paths}
    files, undecided = _indexed([_of_report(name, report) for name, report in loaded.items()])
    names = list(loaded)
    compared = []
    for file in sorted(files, key=lambda file: names.index(file.path)):
        if file.path == names[0]:
            compared.append(file)
            continue
        try:
            comparison = compare_reports(loaded[names[0]], loaded[file.path], noise=noise, noise_us=noise_us)
        except InputError as error:
            raise InputError(f"{file.path}, compared with {names[0]}: {error}") from error
        compared.append(msgspec.structs.replace(file, changes=comparison.headline, same=comparison.same))
    page_folder = root if page is None else user_path(page, "the page").parent.absolute()
    return FolderIndex(
        folder=os.path.relpath(root), base=os.path.relpath(root, page_folder), files=tuple(compared),
        undecided=tuple(undecided), baseline=names[0],
    )  # fmt: skip


def _indexed(read: Sequence[_Read]) -> tuple[list[IndexedFile], list[str]]:
    groups: dict[tuple[str, str], list[_Read]] = defaultdict(list)
    for entry in read:
        groups[entry.file.kind, entry.file.model].append(entry)
    files: list[IndexedFile] = []
    undecided: list[str] = []
    for (kind, model), members in sorted(groups.items()):
        readable = [member for member in members if not member.file.error]
        usual, open_ = _usual([entry.facts for entry in readable])
        undecided += [f"{kind} of {model}: {name}" for name in open_]
        files += [
            msgspec.structs.replace(entry.file, odd=tuple(_odd(entry.facts, usual, len(readable))))
            for entry in readable
        ]
        files += [member.file for member in members if member.file.error]
    return files, undecided


def _usual(facts: Sequence[Mapping[str, str]]) -> tuple[dict[str, tuple[str, int]], list[str]]:
    """Return by fact the value that most have, with their number; and the facts that no majority agrees on."""
    usual: dict[str, tuple[str, int]] = {}
    undecided = []
    for name in dict.fromkeys(name for fact in facts for name in fact):
        value, count = Counter(fact.get(name, "nothing") for fact in facts).most_common(1)[0]
        if count == len(facts):
            continue
        if len(facts) >= _FEW and 2 * count > len(facts):
            usual[name] = value, count
        else:
            undecided.append(name)
    return usual, undecided


def _odd(facts: Mapping[str, str], usual: Mapping[str, tuple[str, int]], of: int) -> Iterator[OddFact]:
    for name, (value, count) in usual.items():
        if (own := facts.get(name, "nothing")) != value:
            yield OddFact(name=name, value=own, usual=value, agreeing=count, of=of)


def _read(path: Path, root: Path) -> _Read | None:
    """Read a file; ``None`` where it is none of ours."""
    if path.suffix not in (".json", ".lock") or kind_of(path) != "file":
        return None
    name = str(path.relative_to(root))
    try:
        data = read_regular(path, _MOST)
    except OSError:
        return None
    kind = next((_SCHEMAS[match.decode()] for match in _SCHEMA.findall(data) if match.decode() in _SCHEMAS), None)
    if kind is None:
        return None
    try:
        if kind == "lock":
            return _of_lock(name, load_lock(path))
        if kind == "report":
            return _of_report(name, Report.load(path))
        return _of_verification(name, decode_json(data, VerificationResult))
    except (XpuRuntimeError, msgspec.MsgspecError) as error:
        return _Read(IndexedFile(path=name, kind=kind, good=False, error=str(error)), {})


def _of_report(path: str, report: Report) -> _Read:
    plan = report.plan
    facts = {name: plan.get(name) for name in ("engine", "engine_version", "device", "precision", "mode")}
    facts["model.sha256"] = (plan.get("model") or {}).get("sha256")
    facts |= dict(_flat(report.environment))
    facts |= {
        f"key {observation.key}": f"{observation.observed} ({observation.status})"
        for observation in report.observations
    }
    for unit in report.units:
        ran = (unit.op, unit.device, unit.precision_run, unit.layout, unit.kernel)
        facts[f"unit {'+'.join(unit.source_nodes) or unit.id}"] = " ".join(part for part in ran if part)
    return _Read(
        IndexedFile(
            path=path,
            kind="report",
            model=_base((plan.get("model") or {}).get("path")),
            engine=str(plan.get("engine", "")),
            device=str(plan.get("device", "")),
            created=report.created,
            headline=report.headline,
            good=report.honoured,
            median_us=None if report.latency is None else report.latency.median_us,
        ),
        _texts(facts),
    )


def _of_lock(path: str, lock: Lock) -> _Read:
    identity, plan = lock.identity, lock.identity.plan
    facts: dict[str, Any] = {
        f"{validator.kind} {validator.key}": shown(validator.expect) for validator in identity.validators
    }
    if plan is not None:
        facts |= {"engine": plan.engine, "device": plan.device, "precision": plan.precision}
        facts |= {f"plan {key}": f"{value} ({level})" for key, value, level in plan.controls}
    for unit in identity.entries:
        ran = (unit.op, unit.on, unit.precision, unit.layout, unit.kernel)
        facts[f"unit {unit.unit}"] = " ".join(part for part in ran if part)
    facts |= {f"call {call.name}": call.kernel for call in identity.calls}
    facts |= {f"output {output.name}": output.sha256 for output in identity.outputs}
    return _Read(
        IndexedFile(
            path=path,
            kind="lock",
            model=_base(identity.model.name if identity.model is not None else identity.subject),
            engine="" if plan is None else plan.engine,
            device="" if plan is None else plan.device,
            created=lock.provenance.created,
            headline=lock.digest,
        ),
        _texts(facts),
    )


def _of_verification(path: str, result: VerificationResult) -> _Read:
    facts = {
        name: getattr(result, name) for name in ("engine", "device", "model_sha256", "policy_sha256", "lock_sha256")
    }
    facts |= {f"claim {claim.id}": claim.verdict for claim in result.claims}
    return _Read(
        IndexedFile(
            path=path,
            kind="verification",
            model=_base(result.model),
            engine=result.engine or "",
            device=result.device or "",
            created=result.created,
            headline=result.headline,
            good=result.exit_code == 0,
        ),
        _texts(facts),
    )


def _flat(part: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in part.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def _texts(facts: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in facts.items() if value is not None}


def _base(path: object) -> str:
    return re.split(r"[/\\]", str(path or ""))[-1]
