"""The keeper of a host: `python -m keepstep.ckpt.keeper CONFIG.json`.

One process apart from the ranks, without torch. It makes the host's pool, seals what ranks capture,
has it copied to peers, disk and store, answers what it has, and adopts what an earlier keeper left.
It ends when no rank has been there for a patience, or when all have finished; then nothing is left
in shared memory. Asked to end (SIGTERM), it leaves the memory to a successor.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

import setproctitle

from keepstep.ckpt.bell import Bell
from keepstep.ckpt.control import Attach, Attached, Enter, Entered
from keepstep.ckpt.disk_tier import DiskTier
from keepstep.ckpt.entering import enter_rank
from keepstep.ckpt.errors import CheckpointError
from keepstep.ckpt.host_answers import HostAnswers, wait_adopted
from keepstep.ckpt.host_damage import explained
from keepstep.ckpt.hostdir import HostDir, host_dir_path, make_host_dir
from keepstep.ckpt.inventory import Inventory
from keepstep.ckpt.keeper_config import KeeperConfig, read_config
from keepstep.ckpt.keeper_control import ControlServer
from keepstep.ckpt.keeper_errors import KeeperRunning, Refusal
from keepstep.ckpt.keeper_events import KeeperEvents
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.keeper_record import KeeperRecord, read_record
from keepstep.ckpt.keeper_services import Services, open_disk
from keepstep.ckpt.last_words import end_with_any_thread
from keepstep.ckpt.manifest import State
from keepstep.ckpt.once import Once
from keepstep.ckpt.pool import Pool
from keepstep.ckpt.pool_errors import PoolError
from keepstep.ckpt.pool_table import Writer
from keepstep.ckpt.sealer import Sealer
from keepstep.ckpt.shelf import Shelf, Shelved
from keepstep.ckpt.structures import Structures

POLL_S = 0.05
"""How often the table is looked at without a ring."""

BEAT_S = 0.1
"""How often there is a sign of life, as long as the table is looked at."""

LEAVE_S = 2.0
"""How long services may take to end when the memory is left to a successor."""

FINISH_PATIENCES = 10
"""How many patiences, and a minute at least, may go by for what is due to reach its tiers."""

FINISH_MIN_S = 60.0


class Keeper:
    """One keeper; a `keeper_control.Served`."""

    def __init__(self, config: KeeperConfig, place: HostDir, events: KeeperEvents) -> None:
        """Open or make the pool, take up what an earlier keeper left, listen. Holds the lock.

        Raises CheckpointError; OSError if it cannot listen.
        """
        self._config = config
        self._place = place
        self._events = events
        record = self._read_record()
        self._port_before = _port_of(record.address)
        self._memory = KeeperMemory(
            config,
            place,
            Pool.open(place.pool) if place.pool.exists() else Pool.create(place.pool),
            Shelf(),
            Structures(place, config.job),
            record,
            events.tell,
        )
        self._sealer = Sealer(self._memory, self._on_sealed)
        disk = Once(lambda: DiskTier(open_disk(config))) if config.disk_dir else None
        self._answers = HostAnswers(
            self._memory, self._sealer, disk, self._on_promise, self._status
        )
        self._services: Services | None = None
        self._is_ready = threading.Event()
        self._has_looked = threading.Event()
        self._is_watching = True
        self._has_ended = threading.Event()
        self._wake, self._woken = _wake_pipe()
        self._bell = Bell(place.bell)
        self._control = ControlServer(place.control, self, self._on_refused)
        self._control.start()

    def run(self) -> str:
        """Serve until there is a reason to end, which is returned.

        Blocking; on return all threads have ended.
        """
        memory = self._memory
        self._services = Services(memory, self._answers, self._port_before)
        if memory.tenure is not None:
            self._services.enter(memory.tenure)
            if memory.promise.generation > memory.tenure.generation:
                self._services.promised(memory.promise.generation)
        self._sealer.start()
        self._is_ready.set()
        self._events.tell(
            "keeper_started",
            f"host {self._config.host} has a keeper",
            keeper_pid=memory.me.pid,
            address=memory.address,
            generation=memory.promise.generation,
            term=memory.promise.term,
        )
        beat = threading.Thread(target=self._beat, name="keepstep-beat", daemon=True)
        beat.start()
        reason = self._watch()
        self._is_watching = False
        if reason:
            is_over = self._finish(self._services)
        else:
            reason, is_over = "it was asked to end; the memory stays for its successor", False
            self._leave(self._services)
        self._has_ended.set()
        beat.join()
        self._events.tell("keeper_ended", reason, keeper_pid=memory.me.pid, is_removed=is_over)
        self._bell.close()
        memory.close()
        memory.pool.close()
        if is_over:
            self._place.remove()
        return reason

    # Served: called by the control socket's threads

    def attach(self, attach: Attach) -> Attached:
        """See `keeper_control.Served`. Waits until the keeper is ready."""
        self._is_ready.wait()
        memory = self._memory
        if attach.job != self._config.job:
            raise Refusal(f"this keeper serves job {self._config.job!r}, not {attach.job!r}")
        if not memory.arrive(Writer(attach.pid, attach.ticks)):
            raise Refusal(
                f"there is no process {attach.pid} that began at tick {attach.ticks} on this host"
            )
        return Attached(
            host=self._config.host,
            rack=self._config.rack,
            address=memory.address,
            pid=memory.me.pid,
            generation=memory.promise.generation,
            term=memory.promise.term,
        )

    def take_inventory(self, generation: int, term: int) -> Inventory:
        """See `keeper_control.Served`."""
        return self._answers.take_inventory(generation, term)

    def describe(self, state: State) -> bytes:
        """See `keeper_control.Served`."""
        return self._answers.describe(state)

    def enter(self, enter: Enter, writer: Writer) -> Entered:
        """See `keeper_control.Served`."""
        wait_adopted(self._memory)
        services = self._services
        assert services is not None  # `attach` came before, and waited
        return enter_rank(self._memory, enter, writer, services.enter)

    def leave(self, rank: int, writer: Writer, *, is_finished: bool) -> None:
        """See `keeper_control.Served`."""
        self._sealer.submit_captured()
        self._sealer.wait_idle(self._config.patience_s)
        self._memory.leave(rank, writer, is_finished=is_finished)

    def _beat(self) -> None:
        """Signs of life, for who minds this keeper: it is replaced when there is none for long.

        None while the table is not looked at, so that not only a stopped process is found: unless
        a rank enters, which holds that up for as long as it takes to make memory for its slots, or
        the keeper is ending, which is bounded.
        """
        while not self._has_ended.wait(BEAT_S):
            is_entered = self._memory.entering.locked()
            if self._has_looked.is_set() or is_entered or not self._is_watching:
                self._has_looked.clear()
                self._place.beat()

    def _watch(self) -> str:
        """Look at the table, at each ring and every so often, until there is a reason to end.

        "": the keeper was asked to end.
        """
        while True:
            poller = select.poll()
            for fd in (self._woken, self._bell.socket.fileno(), *self._memory.pidfds):
                poller.register(fd, select.POLLIN)
            ready = {fd for fd, _ in poller.poll(POLL_S * 1e3)}
            if self._woken in ready:
                return ""
            self._bell.clear()
            if ready - {self._bell.socket.fileno()}:
                self._memory.bury()
            self._sealer.submit_captured()
            self._has_looked.set()
            if not self._sealer.is_alive:
                raise SystemExit("the thread that seals has died: see above")
            reason = self._memory.why_end()
            if reason:
                return reason

    def _finish(self, services: Services) -> bool:
        """Seal and drain what is there. False if the keeper was asked to end meanwhile."""
        finish_s = max(FINISH_PATIENCES * self._config.patience_s, FINISH_MIN_S)
        self._sealer.close(self._config.patience_s)
        closing = threading.Thread(
            target=services.close, args=(finish_s,), name="keepstep-finish", daemon=True
        )
        closing.start()
        deadline_s = time.monotonic() + 2 * finish_s
        while closing.is_alive() and time.monotonic() < deadline_s:
            closing.join(POLL_S)
            if select.select([self._woken], [], [], 0)[0]:
                self._control.close()
                return False
        self._control.close()
        return True

    def _leave(self, services: Services) -> None:
        """End, with the memory as it is: what was captured is sealed."""
        self._sealer.submit_captured()
        self._control.close()
        self._sealer.close(self._config.patience_s)
        services.close(LEAVE_S)

    def _on_sealed(self, shelved: Shelved) -> None:
        if self._services is not None:
            self._services.sealed(shelved)

    def _on_promise(self, generation: int) -> None:
        if self._services is not None:
            self._services.promised(generation)

    def _status(self) -> dict[str, object]:
        return {} if self._services is None else self._services.status()

    def _on_refused(self, sentence: str) -> None:
        self._events.tell("client_refused", sentence)

    def _read_record(self) -> KeeperRecord:
        record = read_record(self._place.keeper_json)
        if not self._place.pool.exists():
            return KeeperRecord(
                address=record.address, generation=record.generation, term=record.term
            )
        return record


def _port_of(address: str) -> int:
    port = address.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def _wake_pipe() -> tuple[int, int]:
    """A pipe that becomes readable when the process is asked to end."""
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, frame: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return wake, woken


def _hold(place: HostDir, config: KeeperConfig) -> HostDir:
    """Become the keeper of the directory, which an ending keeper may be removing."""
    while True:
        try:
            place.hold()
        except FileNotFoundError:
            place = make_host_dir(Path(config.shm_dir), config.job, config.host)
        else:
            return place


def main(arguments: list[str]) -> int:
    """Run a keeper.

    Exit code 0: ended as it should; 2: bad configuration; 3: there is one; 4: the host directory
    cannot be used, or there is no room for it.
    """
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m keepstep.ckpt.keeper CONFIG.json\n")
        return 2
    try:
        config = read_config(Path(arguments[0]))
        events = KeeperEvents(config)
        path = host_dir_path(config.shm_dir, config.job, config.host)
        with explained(path):
            place = make_host_dir(Path(config.shm_dir), config.job, config.host)
    except (CheckpointError, OSError) as error:
        sys.stderr.write(f"keeper: {error}\n")
        return 2
    try:
        with explained(path):
            place = _hold(place, config)
            setproctitle.setproctitle(f"keepstep: keeper host {config.host} run {config.job}")
            end_with_any_thread(events.tell)
            # The lock ends with this process: until then its threads may write to the memory.
            keeper = Keeper(config, place, events)
    except KeeperRunning as error:
        sys.stderr.write(f"keeper: {error}\n")
        return 3
    except PoolError as error:
        events.tell("keeper_refused", str(error))
        sys.stderr.write(f"keeper: {error}\n")
        return 4
    reason = keeper.run()
    sys.stderr.write(f"keeper: ended: {reason}\n")  # who started it may only see its end
    return 0


if __name__ == "__main__":
    code = 1
    try:
        code = main(sys.argv[1:])
    finally:
        if sys.exc_info()[0] is not None:
            sys.excepthook(*sys.exc_info())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # not held up by a thread that hangs in a store, nor after a defect
