"""How the commands show things to people: tables that fit 80 columns, sizes and ages in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, TextColumn, TransferSpeedColumn
from rich.progress import Progress as ProgressBar
from rich.table import Table
from rich.text import Text

from keepstep.ckpt import gc, verify
from keepstep.ckpt.entry import (
    Body,
    Commit,
    End,
    Generation,
    Operator,
    Record,
    Retire,
    Rewind,
    Term,
    Verdict,
)
from keepstep.ckpt.inspect import (
    CheckpointRow,
    TensorRow,
    groups,
    layout_text,
    placement_text,
)
from keepstep.ckpt.lineage import Committed, Lineage, Status, state_words
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.sizes import size_text

_COLOURS = {Status.LIVE: "green", Status.VOID: "dim", Status.BAD: "red", Status.RETIRED: "dim"}
_SHOWN_STATES = 8
_SHOWN_ABOVE = frozenset({"step", "layout"})


def age_s(at: str, now: datetime) -> float:
    """Seconds from a time as the log writes it to `now`; never negative: clocks differ."""
    then = datetime.fromisoformat(at.replace("Z", "+00:00"))
    return max((now - then).total_seconds(), 0.0)


def age_text(seconds: float) -> str:
    """An age in one unit: "40 s", "12 min", "5 h", "3 d"."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86_400:.0f} d"


def count_text(count: int, noun: str, plural: str = "") -> str:
    """A number and its noun: "1 tensor", "2 tensors"."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def now_utc() -> datetime:
    """The time, for ages."""
    return datetime.now(UTC)


@contextmanager
def progress_bar(
    title: str, *, is_shown: bool
) -> Iterator[Callable[[verify.Progress], None] | None]:
    """A bar on stderr while a verification goes on; gives None if it is not to be shown."""
    if not is_shown:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with ProgressBar(*columns, TransferSpeedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=None)

        def on_progress(now: verify.Progress) -> None:
            bar.update(task, completed=now.done_bytes, total=now.total_bytes)

        yield on_progress


def _table(*columns: tuple[str, dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for header, options in columns:
        table.add_column(header, **options)
    return table


_RIGHT: dict[str, Any] = {"justify": "right", "no_wrap": True}
_LEFT: dict[str, Any] = {"no_wrap": True}
_FOLD: dict[str, Any] = {"overflow": "fold"}


def checkpoint_table(rows: Iterable[CheckpointRow], now: datetime) -> Table:
    """The checkpoints of a store, one a line; why one is not live stands beside it."""
    table = _table(
        ("step", _RIGHT),
        ("gen", _RIGHT),
        ("layout", _LEFT),
        ("size", _RIGHT),
        ("age", _RIGHT),
        ("state", _FOLD),
    )
    for row in rows:
        commit = row.commit
        state = Text(commit.status.value, style=_COLOURS[commit.status])
        if row.verdict == "good":
            state.append(", verdict good")
        if commit.reason:
            state.append(f": {commit.reason}", style="dim")
        table.add_row(
            str(commit.state.step),
            str(commit.state.generation),
            layout_text(row.mesh),
            size_text(commit.size_bytes),
            age_text(age_s(commit.at, now)),
            state,
        )
    return table


def facts(pairs: Iterable[tuple[str, str]]) -> Table:
    """Names and values in two columns; empty values are left out."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value:
            table.add_row(name, Text(value))
    return table


def store_facts(url: str, lineage: Lineage) -> Table:
    """Whose store it is, and how far the run has come."""
    retired = sum(commit.status is Status.RETIRED for commit in lineage.commits)
    dead = len(lineage.commits) - retired - len(lineage.live)
    ignored = f", {len(lineage.ignored)} of them ignored" if lineage.ignored else ""
    pairs = [
        ("store", url),
        ("job", lineage.job or ""),
        ("checkpoints", f"{len(lineage.live)} live, {dead} void or bad, {retired} retired"),
        ("log", f"{count_text(lineage.next_seq, 'entry', 'entries')}{ignored}"),
        ("term", f"{lineage.term}, taken by {lineage.term_by}" if lineage.term else ""),
    ]
    newest = lineage.generation
    if newest is not None:
        pairs += _generation_facts(newest)
    if lineage.end is not None:
        pairs.append(("ended", f"{lineage.end.reason} ({state_words(lineage.end.state)})"))
    return facts(pairs)


def _generation_facts(newest: Generation) -> list[tuple[str, str]]:
    hosts = sorted(set(newest.hosts))
    where = ", ".join(hosts[:4]) + (f" and {len(hosts) - 4} more" if len(hosts) > 4 else "")
    origin = "anew" if newest.base is None else f"from {state_words(newest.base)}"
    ranks = count_text(len(newest.hosts), "rank")
    layout = layout_text(newest.mesh)
    pairs = [("generation", f"{newest.number}, {layout}, {ranks} on {where}, begun {origin}")]
    if newest.parent is not None:
        what = "weights" if newest.parent.weights_only else "weights and optimizer"
        source = f"{newest.parent.store}, {state_words(newest.parent.state)}"
        pairs.append(("parent", f"{what} of job {newest.parent.job}, {source}"))
    return pairs


def checkpoint_facts(commit: Committed, manifest: Manifest, now: datetime) -> RenderableType:
    """One checkpoint: what it is, what is in it, and the values beside the tensors."""
    sizes = [image.size_bytes for image in manifest.images] or [0]
    images = f"{count_text(len(manifest.images), 'image')}, {size_text(min(sizes))}"
    if min(sizes) != max(sizes):
        images += f" to {size_text(max(sizes))}"
    age = age_text(age_s(commit.at, now))
    fate = f" ({commit.reason})" if commit.reason else ""
    pairs = [
        ("checkpoint", state_words(commit.state)),
        ("state", f"{commit.status.value}{fate}"),
        ("committed", f"{commit.at}, {age} ago, entry {commit.seq} of the log"),
        ("layout", layout_text(manifest.mesh)),
        ("size", f"{size_text(commit.size_bytes)} in {images}"),
        ("plan", manifest.plan_digest),
    ]
    values = sorted(manifest.values.items())
    pairs += [(name, _value_text(value)) for name, value in values if name not in _SHOWN_ABOVE]
    table = _table(("part", _LEFT), ("tensors", _RIGHT), ("elements", _RIGHT), ("size", _RIGHT))
    for group in groups(manifest):
        size = size_text(group.size_bytes)
        table.add_row(escape(group.name), f"{group.tensors:,}", f"{group.elements:,}", size)
    return Group(facts(pairs), Text(), table)


def _value_text(value: object) -> str:
    """A value of the manifest in one line; of a nested one just how much there is."""
    if isinstance(value, dict):
        if all(not isinstance(each, dict | list) for each in value.values()) and len(value) <= 6:
            return " ".join(f"{name}={each}" for name, each in value.items())
        return f"{count_text(len(value), 'key')}: {', '.join(sorted(value))}"
    if isinstance(value, list):
        return count_text(len(value), "item") if value else "none"
    return str(value)


def tensor_table(rows: Iterable[TensorRow], *, with_norms: bool) -> Table:
    """Tensors, one a line."""
    columns = [
        ("tensor", _FOLD),
        ("dtype", _LEFT),
        ("shape", _LEFT),
        ("placement", {"overflow": "fold"}),
        ("size", _RIGHT),
    ]
    if with_norms:
        columns = [*columns[:3], ("l2 norm", _RIGHT), ("max", _RIGHT), ("not finite", _RIGHT)]
    table = _table(*columns)
    for row in rows:
        name = Text(row.name)
        for alias in row.aliases:
            name.append(f"\n  = {alias}", style="dim")
        shape = "x".join(map(str, row.shape)) or "scalar"
        cells: list[RenderableType] = [name, row.dtype, shape]
        if not with_norms:
            cells += [placement_text(row.placement), size_text(row.size_bytes)]
        elif row.norms is None:
            cells += ["-", "-", "-"]
        else:
            found = row.norms.not_finite
            wrong = Text(f"{found:,}", style="red" if found else "")
            cells += [f"{row.norms.l2:.6g}", f"{row.norms.abs_max:.6g}", wrong]
        table.add_row(*cells)
    return table


def log_table(records: Iterable[Record], lineage: Lineage) -> Table:
    """The entries of a log, and why some do not count."""
    ignored = {each.seq: each.reason for each in lineage.ignored}
    table = _table(
        ("entry", _RIGHT), ("time (UTC)", _LEFT), ("term", _RIGHT), ("kind", _LEFT), ("", _FOLD)
    )
    for record in records:
        text = Text(_body_text(record.body))
        if record.seq in ignored:
            text.append(f"\nignored: {ignored[record.seq]}", style="yellow")
        at = record.at[:19].replace("T", " ")
        kind = type(record.body).__name__.lower()
        table.add_row(str(record.seq), at, str(record.term), kind, text)
    return table


def _body_text(body: Body) -> str:
    match body:
        case Term():
            return f"taken by {body.by}"
        case Generation():
            origin = "anew" if body.base is None else f"from {state_words(body.base)}"
            return f"{body.number}, {layout_text(body.mesh)}, {origin}"
        case Commit():
            return f"{state_words(body.state)}, {size_text(body.size_bytes)}"
        case Verdict():
            judged = "good" if body.good else "bad"
            return f"{state_words(body.state)} is {judged}: {body.reason}"
        case Rewind():
            return f"to {state_words(body.to)}: {body.reason}"
        case Retire():
            shown = ", ".join(state_words(state) for state in body.states[:_SHOWN_STATES])
            more = len(body.states) - _SHOWN_STATES
            return f"{shown}{f' and {more} more' if more > 0 else ''}: {body.reason}"
        case Operator():
            return f"{body.action}, by {body.who}: {body.why}"
        case End():
            return f"at {state_words(body.state)}: {body.reason}"


def verify_report(report: verify.Report, console: Console) -> None:
    """What a verification found: wrong things first, then a line that says how it ended."""
    for finding in report.findings:
        names = finding.tensors[:_SHOWN_STATES]
        more = len(finding.tensors) - len(names)
        pairs = [
            ("  part", finding.part),
            ("  tensor", ", ".join(names) + (f" and {more} more" if more else "")),
            ("  expected", finding.expected),
            ("  found", finding.found),
        ]
        console.print(Text(finding.file, style="bold red"), facts(pairs), Text(), sep="\n")
    if report.unreferenced:
        table = _table(("unreferenced file", _FOLD), ("size", _RIGHT), ("why", _FOLD))
        for each in report.unreferenced:
            table.add_row(Text(each.file), size_text(each.size_bytes), Text(each.reason))
        console.print(table, Text())
    checked = (
        f"{count_text(report.entries, 'log entry', 'log entries')} and "
        f"{count_text(len(report.states), 'checkpoint')} ({size_text(report.read_bytes)}) read"
    )
    if report.findings:
        wrong = count_text(len(report.findings), "finding")
        console.print(Text(f"{checked}: {wrong}", style="bold red"))
    else:
        console.print(Text(f"{checked}: every byte is as it was written", style="green"))


def gc_report(report: gc.Report, console: Console) -> None:
    """What a collection deleted, or would delete, and what stays."""
    by_state: dict[tuple[str, str], tuple[int, int]] = {}
    for doomed in report.deleted:
        place = doomed.key.rsplit("/", 1)[0]
        files, size_bytes = by_state.get((place, doomed.reason), (0, 0))
        by_state[place, doomed.reason] = (files + 1, size_bytes + doomed.size_bytes)
    if by_state:
        goes = "would go" if report.is_dry_run else "deleted"
        table = _table((goes, _FOLD), ("files", _RIGHT), ("size", _RIGHT), ("why", _FOLD))
        for (place, reason), (files, size_bytes) in by_state.items():
            table.add_row(Text(place), f"{files:,}", size_text(size_bytes), Text(reason))
        console.print(table, Text())
    if report.foreign:
        shown = ", ".join(info.key for info in report.foreign[:_SHOWN_STATES])
        more = len(report.foreign) - _SHOWN_STATES
        tail = f" and {more} more" if more > 0 else ""
        console.print(Text(f"not ours, left alone: {shown}{tail}", style="yellow"))
    steps = ", ".join(str(state.step) for state in report.kept[:_SHOWN_STATES])
    kept = count_text(len(report.kept), "checkpoint")
    verb = "would free" if report.is_dry_run else "freed"
    what = f"{size_text(report.deleted_bytes)} in {count_text(len(report.deleted), 'file')}"
    tail = f" (step {steps})" if steps else ""
    console.print(Text(f"{verb} {what}; {kept} kept{tail}"))
