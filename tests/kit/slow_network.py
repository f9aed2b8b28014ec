"""A network between hosts that is slow to answer, and cuts connections now and then.

A process of its own passes on everything between 127.0.0.2 (where hosts are told that their peers
are) and 127.0.0.1 (where they are). Answers of a few bytes, such as acknowledgements, are held for
a random time; some connections are cut instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE, SHOWN = "127.0.0.1", "127.0.0.2"
SMALL_BYTES = 4096
_READ_BYTES = 1 << 18
_ROOT = Path(__file__).resolve().parents[2]


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at, at either address."""
    found: list[int] = []
    while len(found) < count:
        with socket.socket() as one, socket.socket() as other:
            one.bind((HERE, 0))
            port = one.getsockname()[1]
            with contextlib.suppress(OSError):
                other.bind((SHOWN, port))
                found.append(port)
    return found


@contextlib.contextmanager
def slow_network(
    ports: Sequence[int], seed: int, delay_max_s: float, cut: float
) -> Iterator[subprocess.Popen[bytes]]:
    """Pass on what comes to `SHOWN`:port to `HERE`:port, in a process that is killed at the end.

    Args:
        ports: to pass on.
        seed: of all that is random.
        delay_max_s: half of the small answers wait for up to this.
        cut: the share of small answers instead of which the connection ends.
    """
    words = [str(seed), str(delay_max_s), str(cut), *map(str, ports)]
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.kit.slow_network", *words],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


class _Network:
    def __init__(self, seed: int, delay_max_s: float, cut: float) -> None:
        self._random = random.Random(seed)
        self._delay_max_s = delay_max_s
        self._cut = cut

    async def serve(self, ports: Sequence[int]) -> None:
        servers = [
            await asyncio.start_server(self._passer(port), SHOWN, port, limit=_READ_BYTES)
            for port in ports
        ]
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.gather(*(server.serve_forever() for server in servers))

    def _passer(self, port: int):  # type: ignore[no-untyped-def]  # noqa: ANN202
        async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                there = await asyncio.open_connection(HERE, port, limit=_READ_BYTES)
                await asyncio.gather(
                    self._pump(reader, there[1], is_answer=False),
                    self._pump(there[0], writer, is_answer=True),
                )
            writer.close()

        return passed

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, is_answer: bool
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                if is_answer and len(data) < SMALL_BYTES:
                    if self._random.random() < self._cut:
                        break
                    if self._random.random() < 0.5:
                        await asyncio.sleep(self._random.uniform(0.0, self._delay_max_s))
                writer.write(data)
                await writer.drain()
        writer.close()


def main(arguments: list[str]) -> None:
    """Pass on until killed."""
    seed, delay_max_s, cut, *ports = arguments
    network = _Network(int(seed), float(delay_max_s), float(cut))
    asyncio.run(network.serve([int(port) for port in ports]))


if __name__ == "__main__":
    main(sys.argv[1:])
