"""Is this host fit for a run: shared memory, disk, store, clock, token. Numbers, and what to do.

Each check gives one `Finding`. Nothing here raises for what a check is about: that is the finding.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import TypeAlias

from keepstep.ckpt.memory_room import MemoryRoom, memory_room
from keepstep.ckpt.sizes import size_text
from keepstep.storage.disk_trial import try_disk
from keepstep.storage.errors import (
    Denied,
    MissingPackage,
    NoSpace,
    NotFound,
    OutcomeUnknown,
    StoreError,
    Transient,
)
from keepstep.storage.store import Store
from keepstep.storage.token import TOKEN_VARIABLE, Token, find_token
from keepstep.storage.trial import RACING_WRITERS, try_appends, try_puts

Figures: TypeAlias = Mapping[str, float | int | str | bool | None]

SHM_BYTES_MIN = 1 << 30
"""A /dev/shm below this is a container's default (64 MiB), not one that somebody sized."""
DISK_BYTES_PER_S_MIN = 50e6
_CLOCK_TOLD_S = 5.0


class Verdict(Enum):
    """What a check came to."""

    GOOD = "good"
    NOTE = "note"
    """For a person to know; nothing that the product depends on."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """What one check found.

    Attributes:
        check: its name.
        verdict: what it came to.
        what: a sentence with the numbers.
        fix: what to do, if it failed.
        figures: the numbers, units last in their names.
    """

    check: str
    verdict: Verdict
    what: str
    fix: str = ""
    figures: Figures = field(default_factory=dict)


def failed(check: str, what: object, fix: str, figures: Figures | None = None) -> Finding:
    """A failure, and what to do about it."""
    return Finding(check, Verdict.FAILED, str(what), fix, figures or {})


def check_memory(directory: str, pool_bytes: int) -> list[Finding]:
    """Shared memory: how much there is, and whether the directory there is safely ours.

    Args:
        directory: that of pools; it need not exist yet.
        pool_bytes: what a pool will need on this host; 0: not known.
    """
    try:
        room = memory_room(directory)
    except OSError as error:
        return [failed("memory", f"{directory}: {error}", "mount a tmpfs there")]
    return [_memory(directory, room, pool_bytes), _directory(directory)]


def _memory(directory: str, room: MemoryRoom, pool_bytes: int) -> Finding:
    limit = "none" if room.limit_left_bytes is None else f"{size_text(room.limit_left_bytes)} left"
    what = (
        f"{room.mount} ({room.kind}) has {size_text(room.size_bytes)},"
        f" {size_text(room.free_bytes)} free; the host has {size_text(room.available_bytes)}"
        f" available; container limit {limit}; a pool may have {size_text(room.room_bytes)}"
    )
    figures: Figures = {
        "mount": room.mount,
        "kind": room.kind,
        "size_bytes": room.size_bytes,
        "free_bytes": room.free_bytes,
        "available_bytes": room.available_bytes,
        "limit_left_bytes": room.limit_left_bytes,
        "room_bytes": room.room_bytes,
        "pool_bytes": pool_bytes,
    }
    if room.kind != "tmpfs":
        fix = f"snapshots there would be as slow as a disk: put {directory} on a tmpfs (--shm-dir)"
        return Finding("memory", Verdict.FAILED, what, fix, figures)
    if pool_bytes > room.room_bytes:
        fix = f"the pool needs {size_text(pool_bytes)}: {_grow(room, pool_bytes)}"
        return Finding("memory", Verdict.FAILED, what, fix, figures)
    if room.size_bytes < SHM_BYTES_MIN:
        fix = f"that is a container's default size: {_grow(room, SHM_BYTES_MIN)}"
        return Finding("memory", Verdict.FAILED, what, fix, figures)
    return Finding("memory", Verdict.GOOD, what, "", figures)


def _grow(room: MemoryRoom, wanted_bytes: int) -> str:
    """What to do about the limit that is the tightest."""
    if room.limit_left_bytes is not None and room.limit_left_bytes <= room.free_bytes:
        return "raise the container's memory limit, which counts shared memory too"
    if room.available_bytes <= room.free_bytes:
        return "free memory on this host, keep fewer slots or peers' copies, or use more hosts"
    gib = -(-wanted_bytes // (1 << 30))
    return (
        f"docker run --shm-size={gib}g; in Kubernetes an emptyDir with medium: Memory mounted at"
        f" {room.mount}; on a host mount -o remount,size={gib}G {room.mount}; or another --shm-dir"
    )


def _directory(directory: str) -> Finding:
    """Whether a pool's directory is, or can be made, this user's alone."""
    check = "shm-dir"
    try:
        status = os.lstat(directory)
    except FileNotFoundError:
        above = os.path.dirname(os.path.abspath(directory))
        if os.access(above, os.W_OK | os.X_OK):
            return Finding(check, Verdict.GOOD, f"{directory} is not there yet, and can be made")
        return failed(
            check,
            f"{directory} is not there, and this user may not make it in {above}",
            f"make it, owned by user {os.geteuid()}, with mode 0700, or name another: --shm-dir",
        )
    except OSError as error:
        return failed(check, f"{directory}: {error.strerror}", "name another: --shm-dir")
    mode = stat.S_IMODE(status.st_mode)
    figures: Figures = {"mode": f"{mode:04o}", "owner": status.st_uid}
    what = f"{directory} has mode {mode:04o} and owner {status.st_uid}"
    if not stat.S_ISDIR(status.st_mode):
        kind = "a symbolic link" if stat.S_ISLNK(status.st_mode) else "no directory"
        return failed(check, f"{directory} is {kind}", f"remove it: rm {directory}", figures)
    if status.st_uid != os.geteuid():
        fix = f"another user made it: let them remove it, or name another than {directory}"
        return failed(check, what, f"{fix}: --shm-dir", figures)
    if mode & 0o077:
        return failed(check, what, f"others may look into it: chmod 0700 {directory}", figures)
    return Finding(check, Verdict.GOOD, what, "", figures)


def check_disk(directory: str, bytes_max: int, bytes_per_s_min: float) -> Finding:
    """The speed of a disk for files of the size of images. Writes at most `bytes_max`."""
    if not os.path.isdir(directory):
        fix = f"mkdir -p {shlex.quote(directory)}, or name another: --disk DIR"
        return failed("disk", f"there is no directory {directory}", fix)
    try:
        trial = try_disk(directory, bytes_max)
    except NoSpace as error:
        return failed("disk", error, f"free space in {directory}, or name another: --disk")
    except StoreError as error:
        fix = "check that it is there and writable, or name another: --disk DIR"
        return failed("disk", error, fix)
    how = "direct" if trial.is_direct else "through the page cache: no O_DIRECT here"
    what = (
        f"{directory}: write {_speed(trial.write_bytes_per_s)}, read"
        f" {_speed(trial.read_bytes_per_s)} ({how}; {size_text(trial.size_bytes)});"
        f" fsync of a small file {trial.fsync_ms:.1f} ms;"
        f" {size_text(trial.free_bytes)} of {size_text(trial.total_bytes)} free"
    )
    figures: Figures = {
        "directory": directory,
        "write_bytes_per_s": round(trial.write_bytes_per_s),
        "read_bytes_per_s": round(trial.read_bytes_per_s),
        "fsync_ms": round(trial.fsync_ms, 3),
        "is_direct": trial.is_direct,
        "size_bytes": trial.size_bytes,
        "free_bytes": trial.free_bytes,
        "total_bytes": trial.total_bytes,
    }
    if trial.write_bytes_per_s < bytes_per_s_min:
        fix = (
            f"expected at least {_speed(bytes_per_s_min)}: use a local disk, not a network's or a"
            " container's overlay; look at what else writes to it (iostat -x 1)"
        )
        return failed("disk", what, fix, figures)
    return Finding("disk", Verdict.GOOD, what, "", figures)


def check_store(store: Store) -> list[Finding]:
    """Puts, conditional puts, and the store's clock."""
    try:
        trial = try_puts(store)
    except StoreError as error:
        return [store_failure("store", error)]
    figures: Figures = {
        "url": store.url,
        "put_ms": round(trial.put_ms, 3),
        "get_ms": round(trial.get_ms, 3),
    }
    what = f"{store.url}: put of 4.10 kB {trial.put_ms:.1f} ms, get {trial.get_ms:.1f} ms"
    findings = [Finding("store", Verdict.GOOD, what, "", figures)]
    if not trial.is_same:
        fix = "it gives back other bytes than it was given: do not use it"
        findings = [failed("store", what, fix, figures)]
    clock: Figures = {"ahead_s": round(trial.ahead_s, 3), "within_s": round(trial.within_s, 3)}
    findings.append(
        Finding("clock", Verdict.NOTE, _clock(trial.ahead_s, trial.within_s), "", clock)
    )
    findings.append(_conditional_puts(store))
    return findings


def _conditional_puts(store: Store) -> Finding:
    check = "conditional puts"
    url = store.url
    try:
        if not store.capabilities.put_if_absent:
            fix = (
                "use another server; if only one run ever writes there, add ?single_writer=true to"
                " the URL, and know that two runs would then overwrite each other's log"
            )
            return failed(check, f"{url} cannot keep two writers apart", fix)
        # Such a server may break under two writers, and nobody is to bring it two.
        is_alone = "single_writer=true" in url
        trial = try_appends(store, 1 if is_alone else RACING_WRITERS)
    except StoreError as error:
        return store_failure(check, error)
    figures: Figures = {
        "writers": trial.writers,
        "winners": trial.winners,
        "is_kept": trial.is_kept,
        "append_ms": round(trial.append_ms, 3),
    }
    what = (
        f"{trial.writers} writers at once, {trial.winners} told that they were first; one append"
        f" {trial.append_ms:.1f} ms"
    )
    if trial.is_good:
        if is_alone:
            what = f"single_writer is set: never two runs; one append {trial.append_ms:.1f} ms"
            return Finding(check, Verdict.NOTE, what, "", figures)
        return Finding(check, Verdict.GOOD, what, "", figures)
    fix = "two runs would overwrite each other's log there: use another store"
    return failed(check, what, fix, figures)


def check_token(
    environment: Mapping[str, str], file: str | None, is_needed: bool
) -> tuple[Finding, Token | None]:
    """The job's token, and what is to be said of it. Never shows it.

    Args:
        environment: of this process.
        file: that may have it; None: none was named.
        is_needed: peers are to be asked with it.
    """
    if not environment.get(TOKEN_VARIABLE) and file is None and not is_needed:
        what = (
            f"{TOKEN_VARIABLE} is not set, and no file was named: `train` makes one for its hosts"
        )
        return Finding("token", Verdict.NOTE, what), None
    where = TOKEN_VARIABLE if environment.get(TOKEN_VARIABLE) else file or ""
    try:
        token = find_token(environment, file)
    except StoreError as error:
        fix = f"set {TOKEN_VARIABLE}, or name the run's file, of mode 0600: --token-file DIR/token"
        if where == file and isinstance(error, Denied):
            fix = f"chmod 0600 {file}, or, if others may have read it, make a new one"
        return failed("token", error, fix, {"where": where}), None
    return Finding("token", Verdict.GOOD, f"found in {where}", "", {"where": where}), token


def place_for_store(path: str) -> str:
    """The nearest directory that exists, of a store that is to be made at `path`."""
    place = Path(os.path.abspath(os.path.expanduser(path)))
    while not place.is_dir() and place != place.parent:
        place = place.parent
    return str(place)


def store_failure(check: str, error: StoreError) -> Finding:
    """What a store's error means to whoever wants to start a run."""
    fixes: dict[type[StoreError], str] = {
        MissingPackage: "pip install 'keepstep[s3]' on every host, then ask again",
        NotFound: "check the spelling of the URL, and what is mounted there",
        NoSpace: "free space, or raise the quota",
        Denied: "check who may write there: owner and mode, or credentials and the bucket's policy",
        Transient: "check the endpoint and the network from this host, then try again",
        OutcomeUnknown: "try again; if it stays so, look at what is between here and the store",
    }
    fix = next((text for kind, text in fixes.items() if isinstance(error, kind)), "see the message")
    return failed(check, error, fix, {"error": type(error).__name__, "errno": error.errno})


def _clock(ahead_s: float, within_s: float) -> str:
    word = "ahead of" if ahead_s >= 0 else "behind"
    text = f"the store's clock is {abs(ahead_s):.2f} s {word} this host's, within {within_s:.2f} s"
    if abs(ahead_s) > _CLOCK_TOLD_S + within_s:
        return f"{text}; nothing compares clocks, but a server may refuse requests: set it (NTP)"
    return text


def _speed(bytes_per_s: float) -> str:
    return f"{bytes_per_s / 1e6:,.0f} MB/s"
