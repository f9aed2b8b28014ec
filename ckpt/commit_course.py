"""One generation's commits, from one keeper's side: what it asks of the store, and what it appends.

No threads here, and no pauses: `committer` calls again when a store fails.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

from keepstep.ckpt.commit import commit
from keepstep.ckpt.dtypes import DTYPES
from keepstep.ckpt.entry import Record
from keepstep.ckpt.gc import Report, collect
from keepstep.ckpt.lineage import Committed, Lineage
from keepstep.ckpt.log import Log
from keepstep.ckpt.manifest import Description, DoneRecord, State
from keepstep.ckpt.retention import Policy
from keepstep.ckpt.store_tier import done_ranks, read_done
from keepstep.ckpt.structure import Structure
from keepstep.ckpt.tenure import Tenure
from keepstep.storage.store import Store


def data_bytes(structure: Structure) -> int:
    """The bytes of all tensors: what the images of a whole state have together, without headers."""
    return sum(
        prod(spec.shape) * DTYPES[spec.dtype].itemsize for spec in structure.tensors.values()
    )


class Course:
    """The log of a store, for one tenure. Not thread-safe; every method blocks for the store.

    Raises, here and in every method, StoreError and the CheckpointErrors of `Log`: Superseded if
    the tenure's term has ended.
    """

    def __init__(
        self, store: Store, tenure: Tenure, job: str, sleep: Callable[[float], object]
    ) -> None:
        self.tenure = tenure
        self._log = Log(store, job=job, sleep=sleep)
        if tenure.is_committer:
            self._log.continue_term(tenure.term)
        self._total_bytes = data_bytes(tenure.structure)
        self._has_strangers = len(tenure.addresses) > 1

    @property
    def store(self) -> Store:
        """Where the log is."""
        return self._log.store

    def read(self) -> Lineage:
        """What the log says now."""
        return self._log.read()

    def newest(self) -> Committed | None:
        """The newest live commit of this generation, as far as the log has been read."""
        number = self.tenure.generation
        live = self._log.known().live
        return next((one for one in live if one.state.generation == number), None)

    def committed_to(self) -> int:
        """No state of this generation at or below this step will ever be committed (again)."""
        lineage = self._log.known()
        newest = lineage.generation
        is_newest = newest is not None and newest.number == self.tenure.generation
        return lineage.committed_to if is_newest else -1

    def gather(self, state: State, records: Mapping[int, DoneRecord]) -> dict[int, DoneRecord]:
        """The done records of `state`: those known, and what other hosts have put since.

        Raises FormatError for a done record that is none.
        """
        found = dict(records)
        if self._has_strangers and not self.is_complete(found):
            for rank in done_ranks(self.store, state):
                if rank not in found:
                    found[rank] = read_done(self.store, state, rank)
        return found

    def is_complete(self, records: Mapping[int, DoneRecord]) -> bool:
        """Whether these images together have all bytes of all tensors."""
        present = sum(record.size_bytes - record.header_bytes for record in records.values())
        return present >= self._total_bytes

    def commit(self, description: Description, records: Mapping[int, DoneRecord]) -> Record:
        """Make a checkpoint of the state. Durable on return. Raises as `commit.commit`."""
        done = records.values()
        encoded = [each.encoded for each in done if each.encoded is not None]
        return commit(self._log, description.manifest([each.image for each in done], encoded))

    def collect(self) -> Report:
        """Let retention take what the policy of the store tier lets go, and what nobody needs."""
        tier = self.tenure.tiers.store
        policy = Policy(keep_last=tier.keep, keep_every=tier.keep_every)
        return collect(self._log, policy, is_thorough=False)
