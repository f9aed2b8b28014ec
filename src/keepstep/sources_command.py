"""`keepstep show --sources`: which copy of each region a restore would take, and how long it takes.

Asks the keepers that live, by the hints in the store. It promises nothing and changes nothing.
"""

from __future__ import annotations

import errno
import fnmatch
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from rich.console import Console
from rich.table import Table
from rich.text import Text

from keepstep import views
from keepstep.ckpt.errors import NoSuchState
from keepstep.ckpt.explain import SPEEDS, Explanation, explain
from keepstep.ckpt.lineage import Lineage, state_words
from keepstep.ckpt.mosaic import Distance
from keepstep.ckpt.sizes import size_text
from keepstep.ckpt.survey import Others, Survey, other_inventories, racks_of
from keepstep.storage.store import Store
from keepstep.storage.token import TOKEN_VARIABLE, Token, find_token

_TIMEOUT_S = 2.0
_IMAGES_SHOWN_MAX = 64


def find_sources(
    store: Store, lineage: Lineage, step: int | None, host: str, match: Sequence[str]
) -> tuple[Explanation, list[str]]:
    """Where the state at `step` (None: the newest that is all there) would come from.

    Args:
        store: the durable one; `lineage`: of its log.
        step: which.
        host: the reader; "": a new one.
        match: globs of the tensors whose regions to list.

    Returns it and what is worth saying besides. Raises NoSuchState if nothing is all there.
    """
    notes: list[str] = []

    def tell(kind: str, reason: str, **details: object) -> None:
        if kind != "host_silent":  # said below, of all together
            notes.append(reason)

    token = _token(store)
    if token is None:
        notes.append(f"keepers were not asked: {TOKEN_VARIABLE} is not set")
    job = lineage.job or ""
    others = other_inventories(store, (), job, token, _TIMEOUT_S, None, tell)
    inventories = others.inventories
    if token is not None:
        notes += _silence(others)
    survey = Survey(
        store,
        lineage,
        inventories,
        here="",
        keeper=None,
        token=token,
        timeout_s=_TIMEOUT_S,
        tell=tell,
        step=step,
    )
    found = survey.next()
    notes += survey.passed_over
    if found is None:
        wanted = "state" if step is None else f"state at step {step}"
        said = "; ".join(("", *notes)) if notes else ""
        raise NoSuchState(f"{store.url} and the keepers that answer have no whole {wanted}{said}")
    distance = Distance(host, racks_of(inventories))
    explained = explain(
        found.settled,
        is_committed=found.is_committed,
        distance=distance,
        wants=lambda name: any(fnmatch.fnmatchcase(name, glob) for glob in match),
    )
    return explained, notes


def sources_json(found: Explanation, notes: Sequence[str]) -> dict[str, Any]:
    """For machines."""
    return {
        "state": found.state,
        "is_committed": found.is_committed,
        "read_on": found.here,
        "images": [
            {
                "rank": one.image,
                "size_bytes": one.size_bytes,
                "places": [{"tier": p.tier.value, "host": p.host} for p in one.places],
            }
            for one in found.images
        ],
        "regions": [
            {
                "tensor": one.tensor,
                **asdict(one.box),
                "size_bytes": one.size_bytes,
                "image": one.image,
                "from": {"tier": one.place.tier.value, "host": one.place.host},
            }
            for one in found.regions
        ],
        "bytes": dict(found.bytes_by_speed),
        "predicted_s": found.seconds,
        "speeds": {
            kind: {"bytes_per_s": speed, "measured": source}
            for kind, (speed, source) in SPEEDS.items()
        },
        "notes": [*notes, *found.odd],
    }


def show_sources(found: Explanation, notes: Sequence[str], console: Console) -> None:
    """For people."""
    committed = "committed" if found.is_committed else "not committed: a snapshot alone"
    reader = found.here or "a host that has none of it itself"
    pairs = [
        ("state", f"{state_words(found.state)}, {committed}"),
        ("read on", reader),
        *(
            (kind, f"{size_text(size)} at {SPEEDS[kind][0] / 1e9:.1f} GB/s")
            for kind, size in found.bytes_by_speed.items()
        ),
        ("predicted", f"{_seconds_text(found.seconds)} for one host that reads all of it"),
    ]
    console.print(views.facts(pairs), Text())
    images = Table(box=None, pad_edge=False)
    for title in ("image", "size", "from", "also in"):
        images.add_column(title, justify="right" if title in ("image", "size") else "left")
    for one in found.images[:_IMAGES_SHOWN_MAX]:
        first, *others = map(str, one.places) if one.places else ["nowhere"]
        images.add_row(
            str(one.image), size_text(one.size_bytes), Text(first), Text(", ".join(others))
        )
    console.print(images)
    if len(found.images) > _IMAGES_SHOWN_MAX:
        console.print(Text(f"... and {len(found.images) - _IMAGES_SHOWN_MAX} more (see --json)"))
    if found.regions:
        regions = Table(box=None, pad_edge=False)
        for title in ("tensor", "offsets", "sizes", "image", "from"):
            regions.add_column(title)
        for region in found.regions:
            offsets, sizes = (
                ",".join(map(str, numbers)) for numbers in (region.box.offsets, region.box.sizes)
            )
            regions.add_row(
                Text(region.tensor), offsets, sizes, str(region.image), Text(str(region.place))
            )
        console.print(Text(), regions)
    for note in (*notes, *found.odd):
        console.print(Text(f"note: {note}"))


def _seconds_text(seconds: float) -> str:
    return "< 0.01 s" if seconds < 0.01 else f"{seconds:.2f} s"


def _silence(others: Others) -> list[str]:
    """What to say of keepers that gave no inventory: calm if there are none left at all."""
    silent = others.silent
    gone = os.strerror(errno.ECONNREFUSED)
    if silent and not others.inventories and all(gone in why for why in silent.values()):
        hosts = ", ".join(silent)
        return [f"no keeper is left ({hosts}), as after every run that has ended"]
    return [f"{host}: {why}" for host, why in silent.items()]


def _token(store: Store) -> Token | None:
    """The job's: of the environment, else beside the store where `train` puts it."""
    url = urlsplit(store.url)
    beside = Path(unquote(url.path)).parent / "token" if url.scheme == "file" else None
    if not os.environ.get(TOKEN_VARIABLE) and (beside is None or not beside.exists()):
        return None
    return find_token(os.environ, beside)
