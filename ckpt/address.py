"""STORE@STEP: how people name a checkpoint, and which commit that is. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

from keepstep.ckpt.errors import NoSuchState
from keepstep.ckpt.lineage import Committed, Lineage, Status, state_words

_STEP = re.compile(r"[0-9]{1,12}", re.ASCII)
_SHOWN_MAX = 10


@dataclass(frozen=True, slots=True)
class Address:
    """A store, and a step in it (None: the newest)."""

    store: str
    step: int | None


def parse_address(text: str) -> Address:
    """`text` cut at its last "@", if a number follows; else all of it is the store.

    ``@latest`` is the same as no step.
    """
    store, at, step = text.rpartition("@")
    if at and store and step == "latest":
        return Address(store, None)
    if at and store and _STEP.fullmatch(step) is not None:
        return Address(store, int(step))
    return Address(text, None)


def find_live(lineage: Lineage, step: int | None, where: str) -> Committed:
    """The live commit at `step` (None: the newest). Raises NoSuchState, which says what is."""
    for commit in lineage.live:
        if step is None or commit.state.step == step:
            return commit
    dead = [c for c in lineage.commits if step is None or c.state.step == step]
    if dead:
        fate = f"{state_words(dead[0].state)} is {dead[0].status.value}: {dead[0].reason}"
        raise NoSuchState(f"{where} has no live {_wanted(step)}; {fate}{_choice(lineage)}")
    raise NoSuchState(f"{where} has no {_wanted(step)}{_choice(lineage)}")


def find_present(lineage: Lineage, step: int | None, where: str) -> Committed:
    """As `find_live`, but if none is live, the last that is void or bad: its files are still there.

    To look at; never to restore from.
    """
    if not any(step in (None, commit.state.step) for commit in lineage.live):
        for commit in lineage.commits:
            if commit.status is not Status.RETIRED and step in (None, commit.state.step):
                return commit
    return find_live(lineage, step, where)


def _wanted(step: int | None) -> str:
    return "checkpoint" if step is None else f"checkpoint at step {step}"


def _choice(lineage: Lineage) -> str:
    steps = [str(commit.state.step) for commit in lineage.live]
    if not steps:
        return ""
    more = f", and {len(steps) - _SHOWN_MAX} older" if len(steps) > _SHOWN_MAX else ""
    return f"; it has {', '.join(steps[:_SHOWN_MAX])}{more}"
