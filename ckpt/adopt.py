"""Adoption: what a keeper that was started anew does with the images that it finds.

Nothing is taken on trust: each sealed image is read and compared with the checksums in its header,
and the header with what can be built from it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import xxhash

from keepstep.ckpt.checksum import CHUNK_BYTES, chunk_digests, digest128
from keepstep.ckpt.errors import CheckpointError, Corrupt, FormatError
from keepstep.ckpt.image import ImageHeader
from keepstep.ckpt.image_parse import header_size, parse
from keepstep.ckpt.keeper_memory import KeeperMemory
from keepstep.ckpt.keys import image_key
from keepstep.ckpt.manifest import ImageRecord
from keepstep.ckpt.pool import Slot
from keepstep.ckpt.pool_table import SlotFacts, SlotStatus
from keepstep.ckpt.safetensors_file import LENGTH_BYTES
from keepstep.ckpt.shelf import Shelved
from keepstep.ckpt.tiers import Tier
from keepstep.ckpt.values import why_not_json


def adopt(memory: KeeperMemory) -> list[Shelved]:
    """Verify all sealed images of an earlier keeper, and put them on the shelf.

    A wrong one is told, with tensor, rank, tier and offset, and its slot freed (left alone, if its
    rank is alive and may be about to write it anew). Unfinished ones of processes that are gone
    are freed. Returns the own images, by rank and step. Blocking: all of them are read.
    """
    memory.bury()
    adopted = []
    for row in memory.rows():
        if row.status is not SlotStatus.SEALED:
            continue
        slot = memory.pool.slots[row.index]
        facts = slot.read()
        if facts.status is not SlotStatus.SEALED:
            continue
        try:
            shelved = verified(memory, slot, facts)
        except CheckpointError as error:
            if slot.read().turn == facts.turn:  # else its rank writes it anew: nothing is wrong
                _refuse(memory, slot, facts, error)
            continue
        if memory.shelve(shelved, facts.turn, is_new=False):
            adopted.append(shelved)
    memory.apply_pins()
    if adopted:
        states = sorted({(image.state.generation, image.state.step) for image in adopted})
        memory.tell(
            "adopted",
            f"{len(adopted)} sealed images of an earlier keeper were verified and taken up",
            images=len(adopted),
            states=states,
        )
    adopted.sort(key=lambda image: (image.rank, image.state))
    return [image for image in adopted if image.is_own]


def verified(memory: KeeperMemory, slot: Slot, facts: SlotFacts) -> Shelved:
    """What is in a SEALED slot. Raises FormatError (Corrupt, with tensor and offset)."""
    file = image_key(facts.state, facts.rank)
    view = slot.image[: facts.size_bytes]
    header_bytes = header_size(view[:LENGTH_BYTES], file, facts.size_bytes)
    header = parse(view[:header_bytes], file, facts.size_bytes)
    expected = (memory.config.job, facts.state, facts.rank)
    if (header.job, header.state, header.rank) != expected:
        found = f"{(header.job, header.state, header.rank)}"
        raise FormatError(file, "header", f"{expected}, as the table says", found)
    structure = memory.structures.find(header.plan_digest)
    if structure is None:
        raise FormatError(file, "plan", "a structure that this host knows", header.plan_digest)
    check_data(view, header, file)
    values = slot.values
    if xxhash.xxh3_64_intdigest(values) != slot.values_sum:
        found = f"{xxhash.xxh3_64_intdigest(values):016x}"
        raise Corrupt(file, "values", f"checksum {slot.values_sum:016x}", found)
    return Shelved(
        state=facts.state,
        rank=facts.rank,
        is_own=facts.is_own,
        header=header,
        record=ImageRecord(facts.rank, facts.size_bytes, header_bytes, digest128(header.encoded)),
        due=facts.due,
        slot=slot.index,
        view=view,
        values=decode_values(values, file),
        structure=structure,
    )


def check_data(view: memoryview, header: ImageHeader, file: str) -> None:
    """Raise Corrupt, naming tensor and offset, unless all data matches the sealed header."""
    digests = chunk_digests(view[header.header_bytes :])
    for index, (expected, found) in enumerate(zip(header.digests, digests, strict=True)):
        if expected != found:
            names = header.names_at(index * CHUNK_BYTES, CHUNK_BYTES)
            raise Corrupt(
                file,
                f"chunk {index} ({', '.join(names[:5])})",
                f"checksum {expected}",
                found,
                tensor=names[0] if names else None,
                offset=header.header_bytes + index * CHUNK_BYTES,
            )


def decode_values(data: bytes, file: str) -> dict[str, Any]:
    """A state's JSON values. Raises FormatError, naming `file`."""
    try:
        values = msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError) as error:
        raise FormatError(file, "values", "a JSON object", str(error)[:100]) from error
    reason = why_not_json(values)
    if reason is not None:
        raise FormatError(file, "values", "plain JSON", reason)
    return values


def _refuse(memory: KeeperMemory, slot: Slot, facts: SlotFacts, error: CheckpointError) -> None:
    tier = Tier.MEMORY if facts.is_own else Tier.PEER
    memory.tell(
        "image_corrupt",
        f"an image that an earlier keeper sealed is not used: {error}",
        tier=tier.value,
        rank=facts.rank,
        generation=facts.state.generation,
        step=facts.state.step,
        tensor=error.tensor if isinstance(error, Corrupt) else None,
        offset=error.offset if isinstance(error, Corrupt) else None,
        slot=slot.index,
    )
    if facts.is_own:
        memory.lost(facts.rank, facts.state, facts.due)
    owner = slot.owner
    if owner is None or owner.writer not in memory.living:
        memory.free(slot)
