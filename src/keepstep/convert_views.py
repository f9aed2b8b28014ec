"""How diff, reshard, import and export show what they did, to people and to machines."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table
from rich.text import Text

from keepstep.ckpt.diff import Diff, TensorDiff
from keepstep.ckpt.hf_export import Exported
from keepstep.ckpt.hf_import import Imported
from keepstep.ckpt.manifest import Manifest
from keepstep.ckpt.reshard import Resharded
from keepstep.ckpt.sizes import size_text
from keepstep.views import count_text

_SHOWN_MAX = 20
_VALUE_CHARS_MAX = 60


@contextmanager
def byte_bar(title: str, total_bytes: int, *, is_shown: bool) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that is told of bytes done; does nothing if it is not to be shown."""
    if not is_shown:
        yield lambda _: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(*columns, TransferSpeedColumn(), console=console, transient=True) as bar:
        task = bar.add_task(title, total=total_bytes)
        yield lambda size_bytes: bar.advance(task, size_bytes)


def data_bytes(manifest: Manifest) -> int:
    """Bytes of all images of a checkpoint."""
    return sum(image.size_bytes for image in manifest.images)


def diff_report(found: Diff, console: Console) -> None:
    """The differences, worst first, and one line that sums them up."""
    if found.differing:
        console.print(_tensor_table(found.differing), Text())
    for title, lines in (
        ("only in A", found.only_in_a),
        ("only in B", found.only_in_b),
        ("changed", [f"{name}: {how}" for name, how in found.changed.items()]),
        ("values", [f"{path}: {_short(a)} | {_short(b)}" for path, (a, b) in found.values.items()]),
    ):
        if lines:
            console.print(Text(f"{title} ({len(lines)})", style="bold"))
            for line in lines[:_SHOWN_MAX]:
                console.print(Text(f"  {line}"))
            if len(lines) > _SHOWN_MAX:
                console.print(Text(f"  and {len(lines) - _SHOWN_MAX} more"))
    console.print(Text(diff_summary(found)), soft_wrap=True)


def diff_summary(found: Diff) -> str:
    """One line: what is equal, what is not."""
    same = f"{count_text(found.identical, 'tensor')} identical ({size_text(found.identical_bytes)})"
    only = len(found.only_in_a) + len(found.only_in_b)
    parts = [
        f"{len(found.differing)} different",
        f"{only} only on one side",
        f"{len(found.changed)} changed in shape, dtype or tie",
        f"{count_text(len(found.values), 'value')} different",
    ]
    if found.not_compared:
        parts.append(f"{len(found.not_compared)} of single ranks not compared (other layout)")
    verdict = "same" if found.is_same else "different"
    return f"{verdict}: {same}, {', '.join(parts)}"


def _tensor_table(differing: list[TensorDiff]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("tensor", overflow="fold")
    for header in ("elements", "max abs", "max rel", "NaN", "at"):
        table.add_column(header, justify="right", no_wrap=True)
    for each in differing[:_SHOWN_MAX]:
        table.add_row(
            Text(each.name),
            f"{each.differing}/{each.elements}",
            f"{each.max_abs:.3g}",
            f"{each.max_rel:.3g}",
            str(each.nan_against_number),
            str(list(each.where)),
        )
    if len(differing) > _SHOWN_MAX:
        table.add_row(f"and {len(differing) - _SHOWN_MAX} more")
    return table


def diff_json(found: Diff) -> dict[str, Any]:
    """The differences as JSON values; an infinite difference is the string "inf"."""
    return {
        "same": found.is_same,
        "identical": found.identical,
        "identical_bytes": found.identical_bytes,
        "differing": [
            {
                "name": each.name,
                "elements": each.elements,
                "differing": each.differing,
                "max_abs": _json_float(each.max_abs),
                "max_rel": each.max_rel,
                "nan_against_number": each.nan_against_number,
                "where": each.where,
            }
            for each in found.differing
        ],
        "only_in_a": found.only_in_a,
        "only_in_b": found.only_in_b,
        "changed": found.changed,
        "values": {path: {"a": a, "b": b} for path, (a, b) in found.values.items()},
        "not_compared": found.not_compared,
    }


def _json_float(number: float) -> float | str:
    return number if math.isfinite(number) else "inf"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _VALUE_CHARS_MAX else text[: _VALUE_CHARS_MAX - 3] + "..."


def reshard_text(done: Resharded, url: str) -> list[str]:
    """What a reshard wrote, in lines for people."""
    lines = [
        f"step {done.state.step} in layout {done.layout}: {size_text(done.size_bytes)} in {url}"
    ]
    if done.dropped:
        lines.append(
            f"left out: {count_text(len(done.dropped), 'item')} of single ranks, such as "
            f"{done.dropped[0]}; a run makes them anew"
        )
    return [*lines, f"go on from it: keepstep train ... --store {url} --layout {done.layout}"]


def reshard_json(done: Resharded, url: str) -> dict[str, Any]:
    """What a reshard wrote, as JSON values."""
    return {
        "store": url,
        "step": done.state.step,
        "generation": done.state.generation,
        "layout": done.layout,
        "size_bytes": done.size_bytes,
        "dropped": done.dropped,
    }


def export_text(done: Exported, url: str) -> list[str]:
    """What an export wrote, in lines for people."""
    size = size_text(done.weight_bytes)
    first = f"{count_text(len(done.files), 'file')} in {url}: {size} of {done.dtype} weights"
    return [first, *(f"note: {note}" for note in done.notes)]


def export_json(done: Exported, url: str) -> dict[str, Any]:
    """What an export wrote, as JSON values."""
    return {
        "target": url,
        "files": done.files,
        "weight_bytes": done.weight_bytes,
        "dtype": done.dtype,
        "notes": done.notes,
    }


def import_text(done: Imported, url: str) -> list[str]:
    """What an import wrote, in lines for people."""
    llama = done.llama
    what = f"a Llama of {llama.layers} layers, width {llama.dim}, vocabulary {llama.vocab_size}"
    return [
        f"{what}, in {done.dtype}: {size_text(done.size_bytes)} in {url}, as step 0",
        *(f"note: {note}" for note in done.notes),
        f"begin from it: keepstep train ... --init-from {url} --weights-only",
    ]


def import_json(done: Imported, url: str) -> dict[str, Any]:
    """What an import wrote, as JSON values."""
    return {
        "store": url,
        "step": done.state.step,
        "generation": done.state.generation,
        "model": done.llama,
        "size_bytes": done.size_bytes,
        "dtype": done.dtype,
        "notes": done.notes,
    }
