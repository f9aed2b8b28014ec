"""`keepstep doctor`: is this host fit for a run. Numbers, a fix for each failure, exit status 1."""

from __future__ import annotations

import os
import socket
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from keepstep.ckpt.doctor import (
    DISK_BYTES_PER_S_MIN,
    Finding,
    Verdict,
    check_disk,
    check_memory,
    check_store,
    check_token,
    place_for_store,
    store_failure,
)
from keepstep.ckpt.doctor_peers import Peer, check_peers, hinted_peers
from keepstep.ckpt.hostdir import default_shm_dir
from keepstep.printing import print_json
from keepstep.storage.errors import MissingPackage, NotFound, StoreError
from keepstep.storage.locate import check_location, directory_of, open_store
from keepstep.storage.store import Store
from keepstep.storage.token import Token

_MARKS = {
    Verdict.GOOD: ("ok", "green"),
    Verdict.NOTE: ("note", "cyan"),
    Verdict.FAILED: ("FAIL", "red"),
}


def doctor(
    store: Annotated[
        str, typer.Option("--store", metavar="URL", help="Where checkpoints will go.")
    ],
    disk: Annotated[
        list[str] | None,
        typer.Option("--disk", metavar="DIR", help="Of the disk tier; may repeat."),
    ] = None,
    disk_mb: Annotated[
        int, typer.Option(min=16, help="Write at most so many MB to each disk; removed again.")
    ] = 256,
    disk_mb_per_s: Annotated[
        float, typer.Option(min=0.0, help="A disk that writes slower fails.")
    ] = DISK_BYTES_PER_S_MIN / 1e6,
    shm_dir: Annotated[
        str | None, typer.Option(metavar="DIR", help="Of pools. Default: /dev/shm/keepstep-UID.")
    ] = None,
    pool_gb: Annotated[
        float, typer.Option(min=0.0, help="What a pool will need on this host, in GB.")
    ] = 0.0,
    token_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Has the job's token; mode 0600.")
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option("--peer", metavar="HOST:PORT", help="A keeper to reach; may repeat."),
    ] = None,
    no_hints: Annotated[
        bool, typer.Option("--no-hints", help="Leave out the keepers that the store names.")
    ] = False,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, metavar="S", help="For each peer's answer.")
    ] = 5.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for machines.")] = False,
) -> None:
    """Check shared memory, disk, store, clock, token and peers of this host, before a run."""
    try:
        check_location(store)
    except MissingPackage:
        pass  # a finding among others, below
    except StoreError as error:
        sys.stderr.write(f"keepstep: {error}\n")
        sys.exit(2)
    findings = check_memory(shm_dir or str(default_shm_dir()), round(pool_gb * 1e9))
    for directory in disk or ():
        findings.append(check_disk(directory, disk_mb * 1_000_000, disk_mb_per_s * 1e6))
    place, store_findings = _store(store)
    findings += store_findings
    peers = [Peer(address, address) for address in peer or ()]
    if place is not None and not no_hints:
        try:
            peers += hinted_peers(place)
        except StoreError as error:
            findings.append(store_failure("peers", error))
    is_needed = bool(peer) or any(not one.is_local for one in peers)
    token_finding, token = check_token(os.environ, token_file, is_needed=is_needed)
    findings.append(token_finding)
    findings += _peers(peers, token, timeout_s)
    if as_json:
        print_json(_json(findings))
    else:
        _print(findings, Console())
    raise typer.Exit(1 if any(one.verdict is Verdict.FAILED for one in findings) else 0)


def _store(url: str) -> tuple[Store | None, list[Finding]]:
    """The store, if there is one, and what is to be said of it.

    Where there is none yet, the file system that would have it is tried out, and nothing is made.
    """
    try:
        place = open_store(url)
        return place, check_store(place)
    except NotFound as error:
        path = directory_of(url)
        if path is None:  # a bucket's prefix: nothing is there until the first put
            return _new_prefix(url)
        above = place_for_store(path)
        findings = check_store(open_store(above))
        note = f"{error}; tried out {above} instead"
        return None, [Finding("store", Verdict.NOTE, note), *findings]
    except StoreError as error:
        return None, [store_failure("store", error)]


def _new_prefix(url: str) -> tuple[Store | None, list[Finding]]:
    try:
        place = open_store(url, create=True)
        note = Finding("store", Verdict.NOTE, f"{url} is new: its mark was written")
        return place, [note, *check_store(place)]
    except StoreError as error:
        return None, [store_failure("store", error)]


def _peers(peers: list[Peer], token: Token | None, timeout_s: float) -> list[Finding]:
    if not peers:
        return [Finding("peers", Verdict.NOTE, "none named, and none known to the store")]
    if token is None:
        where = " on this host" if all(one.is_local for one in peers) else ""
        what = f"{len(peers)}{where} not asked, for want of a token"
        return [Finding("peers", Verdict.NOTE, what)]
    return check_peers(peers, token, timeout_s)


def _json(findings: list[Finding]) -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "is_good": all(one.verdict is not Verdict.FAILED for one in findings),
        "findings": [
            {
                "check": one.check,
                "verdict": one.verdict.value,
                "what": one.what,
                "fix": one.fix,
                "figures": dict(one.figures),
            }
            for one in findings
        ],
    }


def _print(findings: list[Finding], console: Console) -> None:
    for one in findings:
        word, colour = _MARKS[one.verdict]
        line = Text.assemble((f"{word:<5}", colour), (f"{one.check}: ", "bold"), one.what)
        console.print(line, soft_wrap=True)
        if one.fix:
            console.print(Text(f"     -> {one.fix}"), soft_wrap=True)
    bad = sum(one.verdict is Verdict.FAILED for one in findings)
    console.print(Text(f"{bad} of {len(findings)} failed" if bad else "this host is fit for a run"))
