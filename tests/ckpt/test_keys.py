"""Keys: one for each state, rank and entry, sorted as the numbers are, and nobody else's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.ckpt.keys import (
    HOSTS_PREFIX,
    LOG_PREFIX,
    STATES_PREFIX,
    DescriptionKey,
    DoneKey,
    EntryKey,
    HostKey,
    ImageKey,
    Key,
    ManifestKey,
    description_key,
    done_key,
    encoded_key,
    entry_key,
    host_key,
    image_key,
    manifest_key,
    parse_key,
    parse_state_name,
    state_name,
    state_prefix,
)
from keepstep.ckpt.manifest import State

_STATES = st.builds(State, st.integers(0, 10**6 - 1), st.integers(0, 10**12 - 1))
_SEQS = st.integers(0, 10**9 - 1)


def _key(made: Key) -> str:
    match made:
        case EntryKey(seq):
            return entry_key(seq)
        case ManifestKey(state):
            return manifest_key(state)
        case ImageKey(state, rank, is_encoded):
            return (encoded_key if is_encoded else image_key)(state, rank)
        case DoneKey(state, rank):
            return done_key(state, rank)
        case DescriptionKey(state):
            return description_key(state)
        case HostKey(host):
            return host_key(host)


_MADE = st.one_of(
    st.builds(EntryKey, _SEQS),
    st.builds(ManifestKey, _STATES),
    st.builds(ImageKey, _STATES, st.integers(0, 99_999), st.booleans()),
    st.builds(DoneKey, _STATES, st.integers(0, 99_999)),
    st.builds(DescriptionKey, _STATES),
    st.builds(HostKey, st.from_regex(r"\A[A-Za-z0-9][A-Za-z0-9._=-]{0,99}\Z")),
)


@given(_MADE)
def test_a_key_names_what_it_was_made_from(made: Key) -> None:
    key = _key(made)
    assert parse_key(key) == made
    assert key.startswith((LOG_PREFIX, STATES_PREFIX, HOSTS_PREFIX))


@given(st.lists(_SEQS, max_size=20), st.lists(_STATES, max_size=20))
def test_keys_sort_as_what_they_name(seqs: list[int], states: list[State]) -> None:
    assert sorted(map(entry_key, seqs)) == list(map(entry_key, sorted(seqs)))
    assert sorted(map(manifest_key, states)) == list(map(manifest_key, sorted(states)))


@given(_MADE, st.data())
def test_a_key_with_one_character_changed_is_another_or_nobodys(
    made: Key, data: st.DataObject
) -> None:
    key = _key(made)
    place = data.draw(st.integers(0, len(key) - 1))
    other = data.draw(st.sampled_from("09azAZ/._-=٣ \n"))
    changed = key[:place] + other + key[place + 1 :]
    found = parse_key(changed)
    assert found is None or _key(found) == changed


@given(_STATES)
def test_state_names_have_one_length_and_are_parsed_again(state: State) -> None:
    name = state_name(state)
    assert len(name) == 21
    assert parse_state_name(name) == state
    assert state_prefix(state) == f"states/{name}/"


def test_keys_are_those_of_the_specification() -> None:
    assert entry_key(12_345) == "log/000012/000012345"
    assert manifest_key(State(3, 120)) == "states/g000003/s000000000120/manifest.json"
    assert image_key(State(3, 120), 5) == "states/g000003/s000000000120/r00005.safetensors"
    assert encoded_key(State(3, 120), 5) == "states/g000003/s000000000120/r00005.safetensors.zst"
    assert done_key(State(3, 120), 5) == "states/g000003/s000000000120/r00005.json"
    assert description_key(State(3, 120)) == "states/g000003/s000000000120/description.json"
    assert host_key("h0") == "hosts/h0.json"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "log/",
        "log/000000/000001000",
        "log/000001/000000999",
        "log/000000/00000001",
        "log/000000/000000001/",
        "log/000000/000000001\n",
        "log/٠٠٠٠٠٠/000000000",
        "log/000000/٠٠٠٠٠٠٠٠٠",
        "states/g٠٠٠٠٠٠/s000000000120/manifest.json",
        "states/g000003/s000000000120/",
        "states/g000003/s000000000120/r00005.safetensors.tmp",
        "states/g000003/s000000000120/r00005.json.zst",
        "states/g000003/s000000000120/r5.safetensors",
        "states/g000003/s000000000120/r5.json",
        "states/g000003/s000000000120/descriptions.json",
        "hosts/.json",
        "hosts/a/b.json",
        "hosts/h0",
        "states/g3/s120/manifest.json",
        "states/g000003/s000000000120/../../../manifest.json",
        "a/states/g000003/s000000000120/manifest.json",
    ],
)
def test_keys_of_others_are_not_ours(key: str) -> None:
    assert parse_key(key) is None


def test_numbers_too_wide_for_a_key_are_refused() -> None:
    for make in (
        lambda: entry_key(10**9),
        lambda: entry_key(-1),
        lambda: manifest_key(State(10**6, 0)),
        lambda: manifest_key(State(0, 10**12)),
        lambda: image_key(State(0, 0), 100_000),
        lambda: image_key(State(0, 0), -1),
        lambda: done_key(State(0, 0), 100_000),
    ):
        with pytest.raises(ValueError, match="does not fit"):
            make()


@pytest.mark.parametrize("host", ["", ".h0", "a/b", "a b", "../x", "h" * 101, "h0\n"])
def test_host_ids_that_no_key_can_have_are_refused(host: str) -> None:
    with pytest.raises(ValueError, match="host id"):
        host_key(host)
