"""The local disk: this host's images, and what is needed to make sense of them.

    states/g000003/s000000000120/description.json    what the state is, written first
    states/g000003/s000000000120/r00005.safetensors  the image, straight from the pool

An image counts only beside its state's description. `copies` and `describe` say what is there;
`to_drop`, which is pure, what may go.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Executor

from keepstep.ckpt.checked_stream import CopyStream, MemoryStream
from keepstep.ckpt.checksum import digest128
from keepstep.ckpt.errors import FormatError
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.inventory import Copy
from keepstep.ckpt.keys import (
    STATES_PREFIX,
    DescriptionKey,
    ImageKey,
    description_key,
    image_key,
    parse_key,
)
from keepstep.ckpt.lineage import state_words
from keepstep.ckpt.manifest import (
    MANIFEST_BYTES_MAX,
    Description,
    ImageRecord,
    State,
    decode_description,
    encode_description,
)
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.tenure import Tenure
from keepstep.ckpt.tiers import Tier, TierPolicy
from keepstep.storage.errors import NotFound, Permanent
from keepstep.storage.store import Store

_HEAD_BYTES = 8


class DiskTier:
    """One host's disk. Thread-safe; every method blocks for the disk.

    Args:
        store: a `FileStore` on that disk, of this host alone.
    """

    def __init__(self, store: Store) -> None:
        self.store = store

    def put(self, shelved: Shelved, executor: Executor, is_kept: Callable[[], bool]) -> None:
        """Write an image, and its state's description if it is not there. Durable on return.

        The image is verified meanwhile, by a thread of `executor`, and is not there if it is wrong.
        Nothing is written if it is there already. `is_kept`: whether the image's memory has been
        its own until now; if not, it is verified again before it is shown.

        Raises:
            Corrupt: the image in memory is not what was sealed, or not any more.
            StoreError: the disk refused.
        """
        if self.has(shelved.state, shelved.record):
            return
        key = description_key(shelved.state)
        try:
            self.store.stat(key)
        except NotFound:
            self.store.put(key, encode_description(shelved.description()))
        key = image_key(shelved.state, shelved.rank)
        stream = MemoryStream(shelved.view, shelved.header, shelved.record, key, executor, is_kept)
        self.store.put_stream(key, stream, shelved.record.size_bytes)

    def has(self, state: State, record: ImageRecord) -> bool:
        """Whether the image is here, by its size and its header."""
        key = image_key(state, record.rank)
        try:
            if self.store.stat(key).size_bytes != record.size_bytes:
                return False
            return digest128(self.store.get_range(key, 0, record.header_bytes)) == record.digest
        except NotFound:
            return False

    def stream(self, shelved: Shelved) -> CopyStream:
        """The copy here of an image that is, or was, in memory too; verified as it is read."""
        key = image_key(shelved.state, shelved.rank)
        return CopyStream(self.store, key, shelved.header, shelved.record)

    def describe(self, state: State) -> Description:
        """The description of a state. Raises NotFound, FormatError, StoreError."""
        key = description_key(state)
        return decode_description(self.store.get(key, MANIFEST_BYTES_MAX), key)

    def copies(self) -> tuple[list[Copy], list[str]]:
        """All images beside a description, by their headers; and what is wrong with others.

        The data is not looked at: who reads it compares it.
        """
        described, images = set(), []
        for info in self.store.list(STATES_PREFIX):
            key = parse_key(info.key)
            if isinstance(key, DescriptionKey):
                described.add(key.state)
            elif isinstance(key, ImageKey):
                images.append((key, info))
        found, wrong = [], []
        for key, info in images:
            if key.state not in described:
                continue
            try:
                found.append(self._copy(key, info.key, info.size_bytes))
            except (FormatError, Permanent) as error:
                wrong.append(str(error))
        return found, wrong

    def _copy(self, key: ImageKey, name: str, size_bytes: int) -> Copy:
        head = self.store.get_range(name, 0, _HEAD_BYTES)
        data = self.store.get_range(name, 0, header_size(head, name, size_bytes))
        header = parse(data, name, size_bytes)
        if (header.state, header.rank) != (key.state, key.rank):
            expected = f"{state_words(key.state)}, rank {key.rank}"
            found = f"{state_words(header.state)}, rank {header.rank}"
            raise FormatError(name, "state", expected, found)
        record = ImageRecord(key.rank, size_bytes, len(data), digest128(data))
        return Copy(key.state, record, Tier.DISK, header.plan_digest)

    def retain(self, tenure: Tenure, owners: Collection[int], protected: Collection[State]) -> None:
        """Delete what `to_drop` names. Durable on return.

        Of each state the description goes last: an interrupted call is finished by the next. Raises
        StoreError.
        """
        keys: dict[State, list[str]] = {}
        ranks: dict[State, set[int]] = {}
        for info in self.store.list(STATES_PREFIX):
            key = parse_key(info.key)
            if isinstance(key, ImageKey | DescriptionKey):
                keys.setdefault(key.state, []).append(info.key)
                held = ranks.setdefault(key.state, set())
                if isinstance(key, ImageKey):
                    held.add(key.rank)
        for state in to_drop(ranks, tenure, owners, tenure.tiers.disk, protected):
            # "description.json" sorts before the images.
            for name in sorted(keys[state], reverse=True):
                self.store.delete(name)


def to_drop(
    present: Mapping[State, Collection[int]],
    tenure: Tenure,
    owners: Collection[int],
    policy: TierPolicy,
    protected: Collection[State],
) -> list[State]:
    """The states that may leave this host's disk, oldest first.

    None may before a state of the tenure's generation is here whole. Then those go that are off the
    lineage (of an older generation, and above the base), those that were never finished, and those
    that `policy` lets go. Where there are other hosts, two stay at least: the others may have only
    the one before the newest yet, and one state must be on all disks.

    Args:
        present: the ranks of each state whose images are here.
        tenure: the generation.
        owners: the ranks of this host that have an image in it.
        policy: of the disk.
        protected: states that never go now: they are on their way to the store.
    """
    number, base = tenure.generation, tenure.base
    ours = {state for state in present if state.generation == number}
    whole = {state for state in ours if set(owners) <= set(present[state])}
    if not whole:
        return []
    newest = max(whole)
    floor = -1 if base is None else base.step
    going = {state for state in present if state.generation < number and state.step > floor}
    going |= {state for state in ours - whole if state < newest}
    going |= {state for state in present if state.generation < number and not present[state]}
    staying = [
        state
        for state in present
        if state.generation <= number
        and state not in going
        and (state in whole or state.generation < number)
    ]
    staying.sort(key=lambda state: (state.step, state.generation))
    if policy.keep:
        keep = max(policy.keep, 2 if len(tenure.addresses) > 1 else 1)
        going |= {
            state
            for state in staying[:-keep]
            if not policy.keep_every or state.step % policy.keep_every
        }
    return sorted(going - set(protected))
