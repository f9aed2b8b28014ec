"""The structures that a host knows, as files of its host directory, and the headers of images.

What an image must look like follows from structure and rank alone, so a keeper that was started
anew needs nobody to tell it.
"""

from __future__ import annotations

import os
import threading

from keepstep.ckpt.document import decode, encode
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.hostdir import HostDir
from keepstep.ckpt.image import ImageHeader, build, items_of
from keepstep.ckpt.manifest import (
    FORMAT_VERSION,
    MANIFEST_BYTES_MAX,
    Description,
    State,
    check_described,
)
from keepstep.ckpt.plan import Plan
from keepstep.ckpt.structure import Structure

_START = State(0, 0)
_CACHED_MAX = 8


class Structures:
    """Structures by plan digest. Thread-safe."""

    def __init__(self, place: HostDir, job: str) -> None:
        self._place = place
        self._job = job
        self._lock = threading.RLock()
        self._known: dict[str, Structure] = {}
        self._plans: dict[str, Plan] = {}
        self._headers: dict[tuple[str, int], ImageHeader] = {}

    def find(self, digest: str) -> Structure | None:
        """The structure with this digest, or None if this host does not know it (any more).

        Raises FormatError for a file that is broken, HostDirRefused for what is no digest.
        """
        with self._lock:
            if digest not in self._known:
                path = self._place.structure(digest)
                try:
                    data = path.read_bytes()
                except FileNotFoundError:
                    return None
                structure = decode(data, Structure, bytes_max=MANIFEST_BYTES_MAX, file=str(path))
                check_sound(structure, self._job, str(path))
                if structure.digest != digest:
                    raise FormatError(str(path), "digest", digest, structure.digest)
                self._remember(structure)
            return self._known[digest]

    def keep(self, structure: Structure) -> None:
        """Know a structure from now on, in this process and in the next. Blocking: one write.

        Raises FormatError if it contradicts itself.
        """
        check_sound(structure, self._job, "structure")
        with self._lock:
            path = self._place.structure(structure.digest)
            if structure.digest in self._known and path.exists():
                return
            draft = path.with_name(f"{path.name}.new")
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(encode(structure))
            os.replace(draft, path)
            self._remember(structure)

    def header(self, structure: Structure, rank: int) -> ImageHeader:
        """The header of the image of `rank`, not sealed, of no particular state.

        Costs up to a second for 10^5 tensors, the first time.
        """
        with self._lock:
            key = (structure.digest, rank)
            if key not in self._headers:
                if structure.digest not in self._plans:
                    plan = Plan(structure.mesh, structure.placements, structure.tensors)
                    self._plans[structure.digest] = plan
                owned = self._plans[structure.digest].owned(rank)
                items = items_of(structure.tensors, owned)
                self._headers[key] = build(
                    self._job, _START, rank, structure.mesh, structure.digest, items
                )
            return self._headers[key]

    def _remember(self, structure: Structure) -> None:
        while len(self._known) >= _CACHED_MAX:
            oldest = next(iter(self._known))
            del self._known[oldest]
            self._plans.pop(oldest, None)
            self._headers = {key: one for key, one in self._headers.items() if key[0] != oldest}
        self._known[structure.digest] = structure


def check_sound(structure: Structure, job: str, file: str) -> None:
    """Raise FormatError unless all parts of a structure are possible and make its digest."""
    check_described(
        Description(
            format=FORMAT_VERSION,
            job=job,
            state=_START,
            mesh=structure.mesh,
            placements=structure.placements,
            tensors=structure.tensors,
            aliases=structure.aliases,
            values={},
            plan_digest=structure.digest,
        ),
        file,
    )
