"""Where things lie in a store: keys made from states, ranks and sequence numbers, and back.

    log/000000/000000012                             entry 12
    states/g000003/s000000000120/manifest.json       state (3, 120)
    states/g000003/s000000000120/r00005.safetensors  its image of rank 5
    states/g000003/s000000000120/r00005.safetensors.zst  or that image in its second encoding
    states/g000003/s000000000120/r00005.json         the done record of that image: it is all there
    states/g000003/s000000000120/description.json    what the state is, on a host's disk
    hosts/h0.json                                    where the keeper of host h0 listens: a hint

Numbers have a fixed width, so that sorting keys sorts numbers. A key that these functions could not
have made belongs to somebody else: `parse_key` returns None, and gc does not touch it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

from keepstep.ckpt.manifest import Manifest, State

LOG_PREFIX = "log/"
STATES_PREFIX = "states/"
HOSTS_PREFIX = "hosts/"

SEQ_MAX = 10**9 - 1
ENTRIES_PER_DIRECTORY = 1_000

_ENTRY = re.compile(r"log/([0-9]{6})/([0-9]{9})")
_HOST = re.compile(r"hosts/([A-Za-z0-9][A-Za-z0-9._=-]{0,99})\.json")
_STATE_NAME = re.compile(r"g([0-9]{6})/s([0-9]{12})")
_STATE = re.compile(
    r"states/g([0-9]{6})/s([0-9]{12})/"
    r"(?:(manifest|description)\.json|r([0-9]{5})\.(safetensors|safetensors\.zst|json))"
)


@dataclass(frozen=True, slots=True)
class EntryKey:
    """The key of log entry `seq`."""

    seq: int


@dataclass(frozen=True, slots=True)
class ManifestKey:
    """The key of the manifest of `state`."""

    state: State


@dataclass(frozen=True, slots=True)
class ImageKey:
    """The key of the image of `rank` in `state`, or of its second encoding."""

    state: State
    rank: int
    is_encoded: bool = False


@dataclass(frozen=True, slots=True)
class DoneKey:
    """The key of the done record of `rank` in `state`."""

    state: State
    rank: int


@dataclass(frozen=True, slots=True)
class DescriptionKey:
    """The key of the description of `state`."""

    state: State


@dataclass(frozen=True, slots=True)
class HostKey:
    """The key of the hint of where the keeper of `host` listens."""

    host: str


StateKey: TypeAlias = ManifestKey | ImageKey | DoneKey | DescriptionKey
"""What belongs to one state."""

Key: TypeAlias = EntryKey | HostKey | StateKey


def entry_key(seq: int) -> str:
    """Key of log entry `seq`. Raises ValueError beyond nine digits."""
    return f"log/{_digits('seq', seq // ENTRIES_PER_DIRECTORY, 6)}/{_digits('seq', seq, 9)}"


def state_name(state: State) -> str:
    """A state as keys and image headers have it, always of one length: g000003/s000000000120."""
    generation = _digits("generation", state.generation, 6)
    return f"g{generation}/s{_digits('step', state.step, 12)}"


def parse_state_name(name: str) -> State | None:
    """The state called `name`, or None if `state_name` could not have made it."""
    match = _STATE_NAME.fullmatch(name)
    return None if match is None else State(generation=int(match[1]), step=int(match[2]))


def state_prefix(state: State) -> str:
    """What the keys of all files of `state` begin with; ends in "/"."""
    return f"{STATES_PREFIX}{state_name(state)}/"


def manifest_key(state: State) -> str:
    """Key of the manifest of `state`."""
    return f"{state_prefix(state)}manifest.json"


def image_key(state: State, rank: int) -> str:
    """Key of the image of `rank` in `state`."""
    return f"{state_prefix(state)}r{_digits('rank', rank, 5)}.safetensors"


def encoded_key(state: State, rank: int) -> str:
    """Key of the image of `rank` in `state`, if it is encoded (`encoding`)."""
    return f"{image_key(state, rank)}.zst"


def stored_key(manifest: Manifest, rank: int) -> str:
    """The key under which the image of `rank` lies in the store."""
    is_encoded = any(encoded.rank == rank for encoded in manifest.encoded)
    return (encoded_key if is_encoded else image_key)(manifest.state, rank)


def done_key(state: State, rank: int) -> str:
    """Key of the done record of `rank` in `state`: a `DoneRecord` as JSON.

    It is put when the image is durable, and read by whoever commits, from the store alone.
    """
    return f"{state_prefix(state)}r{_digits('rank', rank, 5)}.json"


def description_key(state: State) -> str:
    """Key of the description of `state` on a host's disk."""
    return f"{state_prefix(state)}description.json"


def host_key(host: str) -> str:
    """Key of the hint of where the keeper of `host` listens.

    Raises ValueError for a host id that no key can have: 1 to 100 of `A-Za-z0-9._=-`, the first a
    letter or digit.
    """
    key = f"{HOSTS_PREFIX}{host}.json"
    if _HOST.fullmatch(key) is None:
        raise ValueError(f"host id {host[:100]!r} is not 1 to 100 of A-Za-z0-9._=-")
    return key


def parse_key(key: str) -> Key | None:
    """What `key` names, or None if no function of this file could have made it."""
    match = _ENTRY.fullmatch(key)
    if match is not None:
        seq = int(match[2])
        return EntryKey(seq) if seq // ENTRIES_PER_DIRECTORY == int(match[1]) else None
    match = _HOST.fullmatch(key)
    if match is not None:
        return HostKey(match[1])
    match = _STATE.fullmatch(key)
    if match is None:
        return None
    state = State(generation=int(match[1]), step=int(match[2]))
    if match[3] is not None:
        return ManifestKey(state) if match[3] == "manifest" else DescriptionKey(state)
    rank = int(match[4])
    if match[5] == "json":
        return DoneKey(state, rank)
    return ImageKey(state, rank, is_encoded=match[5].endswith(".zst"))


def _digits(what: str, number: int, width: int) -> str:
    """`number` in exactly `width` digits. A wider one would break the order of keys."""
    if not 0 <= number < 10**width:
        raise ValueError(f"{what} {number} does not fit {width} digits")
    return f"{number:0{width}}"
