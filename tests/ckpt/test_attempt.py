"""Only damage sends a run to an older commit; a store that cannot be read never does."""

from __future__ import annotations

import pytest
from tests.kit.faulty_store import Action, Fault, FaultyStore

from keepstep.ckpt.attempt import PAUSES_S, Attempt, attempt
from keepstep.ckpt.errors import (
    Corrupt,
    FormatError,
    NewerVersion,
    NotRestorable,
    StructureMismatch,
)
from keepstep.storage.errors import (
    Denied,
    NotFound,
    OutcomeUnknown,
    Permanent,
    StoreError,
    TooLarge,
    Transient,
    Truncated,
)
from keepstep.storage.memory import MemoryStore


def read_behind(fault: Fault) -> tuple[Attempt[bytes], list[float]]:
    store, slept = FaultyStore(MemoryStore(), fault), list[float]()
    store.put("image", b"whole")
    return attempt(lambda: store.get("image", 5), slept.append), slept


@pytest.mark.parametrize("kind", [NotFound, Truncated, TooLarge])
def test_what_is_gone_or_cut_is_damage(kind: type[StoreError]) -> None:
    tried, slept = read_behind(Fault(Action.FAIL, operations=frozenset({"get"}), error=kind))
    assert kind.__name__ in tried.damage
    assert (tried.found, tried.trouble, slept) == (None, "", [])


@pytest.mark.parametrize("kind", [Denied, Permanent, OutcomeUnknown])
def test_a_store_that_refuses_is_trouble_and_no_damage(kind: type[StoreError]) -> None:
    tried, _ = read_behind(Fault(Action.FAIL, operations=frozenset({"get"}), error=kind))
    assert kind.__name__ in tried.trouble
    assert (tried.found, tried.damage) == (None, "")


def test_what_may_pass_is_tried_again_with_pauses() -> None:
    fault = Fault(Action.FAIL, times=2, operations=frozenset({"get"}), error=Transient)
    tried, slept = read_behind(fault)
    assert tried == Attempt(found=b"whole")
    assert slept == list(PAUSES_S[:2])


def test_what_does_not_pass_is_trouble_in_the_end() -> None:
    fault = Fault(Action.FAIL, times=100, operations=frozenset({"get"}), error=Transient)
    tried, slept = read_behind(fault)
    assert "Transient" in tried.trouble
    assert (tried.found, tried.damage) == (None, "")
    assert slept == list(PAUSES_S)


def failing(error: Exception) -> Attempt[None]:
    def read() -> None:
        raise error

    return attempt(read)


def test_wrong_bytes_are_damage_and_a_newer_format_is_not() -> None:
    assert failing(FormatError("f", "x", "a", "b")).damage
    assert failing(Corrupt("f", "x", "a", "b")).damage
    assert failing(NewerVersion("f", "format", 1, 2)).trouble
    assert failing(NotRestorable("the log does not have it")).trouble


def test_another_run_s_checkpoint_is_raised() -> None:
    with pytest.raises(StructureMismatch):
        failing(StructureMismatch("other", missing=["w"]))
