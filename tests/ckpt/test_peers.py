from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keepstep.ckpt.inventory import HostAddress
from keepstep.ckpt.peers import choose

racks = st.lists(st.sampled_from(["", "a", "b", "c"]), min_size=1, max_size=9)


def hosts_in(names: list[str]) -> list[HostAddress]:
    return [HostAddress(f"h{index}", rack, "") for index, rack in enumerate(names)]


@given(racks, st.integers(0, 4))
def test_each_host_gets_as_many_other_hosts_as_there_are(names: list[str], copies: int) -> None:
    chosen = choose(hosts_in(names), copies)
    assert len(chosen) == len(names)
    for index, places in enumerate(chosen):
        assert len(set(places)) == len(places) == min(copies, len(names) - 1)
        assert index not in places


@given(racks, st.integers(1, 3))
def test_no_copy_is_in_a_rack_twice_while_there_is_another_rack(
    names: list[str], copies: int
) -> None:
    hosts = hosts_in(names)
    domains = [host.rack or host.host for host in hosts]
    for index, places in enumerate(choose(hosts, copies)):
        used = [domains[index]]
        for place in places:
            if set(domains) - set(used):
                assert domains[place] not in used
            used.append(domains[place])


@given(st.integers(2, 12), st.integers(1, 4))
def test_without_racks_all_hosts_keep_equally_many(count: int, copies: int) -> None:
    chosen = choose(hosts_in([""] * count), copies)
    assert set(Counter(place for places in chosen for place in places).values()) == {
        min(copies, count - 1)
    }


@pytest.mark.parametrize("rack_count", [2, 3, 4])
@pytest.mark.parametrize("rack_size", [1, 2, 3, 5])
@pytest.mark.parametrize("is_mixed", [False, True])
@pytest.mark.parametrize("copies", [1, 2])
def test_with_racks_of_one_size_all_hosts_keep_nearly_equally_many(
    rack_count: int, rack_size: int, is_mixed: bool, copies: int
) -> None:
    names = [f"r{rack}" for rack in range(rack_count) for _ in range(rack_size)]
    if is_mixed:
        names = [f"r{rack}" for _ in range(rack_size) for rack in range(rack_count)]
    chosen = choose(hosts_in(names), copies)
    kept = Counter(place for places in chosen for place in places)
    assert max(kept.values()) - min(kept[place] for place in range(len(names))) <= 1


def test_two_hosts_keep_each_other() -> None:
    assert choose(hosts_in(["", ""]), 1) == ((1,), (0,))
    assert choose(hosts_in(["a", "a"]), 1) == ((1,), (0,))
    assert choose(hosts_in([""]), 1) == ((),)
    assert choose(hosts_in(["", ""]), 0) == ((), ())
