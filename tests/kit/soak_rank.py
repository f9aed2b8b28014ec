"""A rank of the soak: forked from a warm parent, it begins, checks what it got, and steps on."""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import mmap
import os
import random
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import torch
import torch.distributed as dist
from tests.kit.begins import Site
from tests.kit.evolving import Evolving
from tests.kit.keepers import JOB

from keepstep.ckpt.agree import gather_structure
from keepstep.ckpt.begin import Wanted, begin
from keepstep.ckpt.level_exchange import LevelExchange, Said
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import State
from keepstep.ckpt.slots import STEP_NONE
from keepstep.ckpt.snapshots import Snapshots
from keepstep.ckpt.tiers import Due
from keepstep.storage.locate import open_store

SIZES = (2, 2)
"""dp and tp: half of what a rank holds, its replica holds too."""

PAUSE_MAX_S = 0.005
SLOTS = 3
WAIT_S = 600.0
_PR_SET_PDEATHSIG = 1


class Word(IntEnum):
    """What a rank writes on the board, one word each."""

    STATUS = 0
    BASE_GENERATION = 1
    BASE_STEP = 2
    GENERATION = 3
    AGREED = 4
    CAPTURED = 5
    SKIPPED = 6
    FAILED_COPIES = 7


class Status(IntEnum):
    """How far a rank is."""

    STARTED = 0
    BEGUN = 1
    WRONG = 2
    """What it was given is not the state that it was told."""


class Board:
    """Shared memory in which ranks say how far they are: it outlives them, and costs no file."""

    def __init__(self, ranks: int) -> None:
        self._map = mmap.mmap(-1, ranks * len(Word) * 8, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self._words = memoryview(self._map).cast("q")

    def get(self, rank: int, word: Word) -> int:
        """One word of one rank."""
        return self._words[rank * len(Word) + word]

    def set(self, rank: int, word: Word, value: int) -> None:
        """Write it."""
        self._words[rank * len(Word) + word] = value

    def clear(self) -> None:
        """Before ranks are forked."""
        for index in range(len(self._words)):
            self._words[index] = 0
        for rank in range(len(self._words) // len(Word)):
            self.set(rank, Word.AGREED, STEP_NONE)


@dataclass(frozen=True)
class Post:
    """What all ranks of one generation are told."""

    site: Site
    board: Board
    rendezvous: Path
    output: Path
    seed: int


def fork_rank(rank: int, post: Post) -> int:
    """Its pid. The child never returns from here."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        fd = os.open(post.output, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        os.close(fd)
        _run(rank, post)
    except BaseException:  # noqa: BLE001  of a forked child: nobody else would say it
        sys.stderr.write(f"rank {rank}: {traceback.format_exc()}\n")
        sys.stderr.flush()
    finally:
        os._exit(code)


def _run(rank: int, post: Post) -> None:
    torch.set_num_threads(1)
    world = SIZES[0] * SIZES[1]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{post.rendezvous}",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=WAIT_S),
    )
    state = Evolving(*SIZES, rank)
    structure = gather_structure(None, state.registry)
    snapshots = Snapshots(state.registry, structure, JOB)
    store = open_store(post.site.store)
    with contextlib.ExitStack() as stack:
        begun = begin(
            None,
            state.registry,
            structure,
            store,
            Log(store, job=JOB) if rank == 0 else None,
            post.site.home(rank, stack),
            Wanted(
                job=JOB,
                by=f"soak rank {rank}",
                header=snapshots.header,
                image_bytes_max=snapshots.size_bytes,
            ),
        )
    board, base = post.board, begun.base
    board.set(rank, Word.GENERATION, begun.generation)
    board.set(rank, Word.BASE_GENERATION, 0 if base is None else base.generation)
    board.set(rank, Word.BASE_STEP, 0 if base is None else base.step)
    if not state.is_true or state.step != (0 if base is None else base.step):
        board.set(rank, Word.STATUS, Status.WRONG)
        raise SystemExit(f"rank {rank} has not the state after step {state.step}, from {base}")
    assert begun.entered is not None
    snapshots.open(begun.entered, begun.generation, SLOTS, is_from_nothing=base is None)
    board.set(rank, Word.STATUS, Status.BEGUN)
    exchange = LevelExchange(
        dist.new_group(backend="gloo"), STEP_NONE if base is None else base.step
    )
    _step(rank, post, state, snapshots, exchange, begun.generation)


def _step(
    rank: int,
    post: Post,
    state: Evolving,
    snapshots: Snapshots,
    exchange: LevelExchange,
    generation: int,
) -> None:
    """Evolve and capture until killed."""
    board, chance = post.board, random.Random(post.seed + rank)
    while True:
        time.sleep(chance.uniform(0.0, PAUSE_MAX_S))
        state.advance()
        agreed = exchange.take().level
        made = snapshots.capture(State(generation, state.step), Due.NOWHERE, agreed)
        exchange.start(Said(snapshots.level()))
        board.set(rank, Word.AGREED, agreed.acked)
        if made.skipped:
            board.set(rank, Word.SKIPPED, board.get(rank, Word.SKIPPED) + 1)
        else:
            board.set(rank, Word.CAPTURED, board.get(rank, Word.CAPTURED) + 1)
        lost = len(snapshots.take_problems())
        if lost:
            board.set(rank, Word.FAILED_COPIES, board.get(rank, Word.FAILED_COPIES) + lost)
