from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st

from keepstep.ckpt.ack_ledger import AckLedger

moves = st.lists(
    st.one_of(
        st.tuples(st.just("seal"), st.sampled_from([0, 1])),
        st.tuples(st.just("send"), st.sampled_from(["p", "q"])),
        st.tuples(st.just("lose"), st.sampled_from(["p", "q"])),
        st.tuples(st.just("restart"), st.sampled_from(["p", "q"])),
    ),
    max_size=60,
)


def test_alone_a_host_counts_on_its_own_memory() -> None:
    ledger = AckLedger([0, 1], [])
    assert ledger.level(0) == -1
    ledger.sealed(0, 5)
    assert (ledger.level(0), ledger.level(1)) == (5, -1)


def test_images_go_out_oldest_state_first_and_in_order() -> None:
    ledger = AckLedger([0, 1], ["p"])
    for rank, step in ((1, 1), (0, 1), (0, 2), (0, 3), (1, 2)):
        ledger.sealed(rank, step)
    sent = []
    while (following := ledger.following("p")) is not None:
        sent.append(following)
        ledger.acked("p", *following)
    assert sent == [(0, 1), (1, 1), (0, 2), (1, 2), (0, 3)]


def test_a_level_is_that_of_the_slowest_peer() -> None:
    ledger = AckLedger([0], ["p", "q"])
    ledger.sealed(0, 1)
    ledger.sealed(0, 2)
    assert ledger.level(0) == -1
    ledger.acked("p", 0, 1)
    ledger.acked("p", 0, 2)
    assert ledger.level(0) == -1
    ledger.acked("q", 0, 1)
    assert ledger.level(0) == 1
    ledger.acked("q", 0, 2)
    assert ledger.level(0) == 2


def test_a_lost_peer_does_not_count_until_it_has_the_newest_of_each_rank() -> None:
    ledger = AckLedger([0, 1], ["p"])
    for step in (1, 2):
        ledger.sealed(0, step)
        ledger.sealed(1, step)
    assert ledger.lost("p")
    assert not ledger.lost("p")
    assert (ledger.level(0), ledger.level(1)) == (2, 2)
    ledger.sealed(0, 3)
    assert ledger.level(0) == 3
    assert ledger.following("p") == (1, 2)
    assert not ledger.acked("p", 1, 2)
    assert ledger.following("p") == (0, 3)
    ledger.sealed(1, 3)
    assert ledger.level(1) == 3
    assert ledger.is_lost("p")
    assert ledger.acked("p", 0, 3)
    assert not ledger.is_lost("p")
    assert ledger.following("p") == (1, 3)
    assert ledger.level(1) == 3, "it never goes back"
    ledger.sealed(1, 4)
    assert ledger.level(1) == 3, "the peer counts again"


def test_a_lost_peer_that_had_all_of_a_rank_need_not_take_it_again() -> None:
    ledger = AckLedger([0, 1], ["p"])
    ledger.sealed(0, 1)
    ledger.acked("p", 0, 1)
    ledger.sealed(1, 1)
    ledger.lost("p")
    assert ledger.acked("p", 1, 1)


def test_a_peer_that_restarted_is_owed_the_newest_again() -> None:
    ledger = AckLedger([0, 1], ["p"])
    for step in (1, 2):
        ledger.sealed(0, step)
        ledger.acked("p", 0, step)
    ledger.restarted("p")
    assert ledger.following("p") == (0, 2)
    assert ledger.level(0) == 2
    ledger.sealed(0, 3)
    assert ledger.level(0) == 2


def test_what_was_overwritten_meanwhile_is_passed_over() -> None:
    ledger = AckLedger([0], ["p"])
    ledger.sealed(0, 1)
    ledger.sealed(0, 2)
    ledger.dropped("p", 0, 1)
    assert ledger.following("p") == (0, 2)
    assert ledger.level(0) == -1
    ledger.acked("p", 0, 2)
    assert ledger.level(0) == 2


def test_a_step_that_does_not_ascend_is_ignored() -> None:
    ledger = AckLedger([0], ["p"])
    ledger.sealed(0, 3)
    ledger.sealed(0, 3)
    ledger.sealed(0, 2)
    assert ledger.owed("p") == 1
    assert ledger.newest(0) == 3


@given(moves)
def test_while_no_peer_is_lost_all_peers_have_each_level_and_all_below(
    given_moves: list[tuple[str, object]],
) -> None:
    ledger = AckLedger([0, 1], ["p", "q"])
    newest = {0: 0, 1: 0}
    had: dict[tuple[str, int], set[int]] = defaultdict(set)
    levels = {0: -1, 1: -1}
    is_always_well = True
    for kind, who in given_moves:
        if kind == "seal" and isinstance(who, int):
            newest[who] += 1
            ledger.sealed(who, newest[who])
        elif kind == "send" and isinstance(who, str):
            following = ledger.following(who)
            if following is not None:
                ledger.acked(who, *following)
                had[who, following[0]].add(following[1])
        elif kind == "lose" and isinstance(who, str):
            ledger.lost(who)
            is_always_well = False
        elif isinstance(who, str):
            ledger.restarted(who)
            is_always_well = False
        for rank in (0, 1):
            level = ledger.level(rank)
            assert levels[rank] <= level <= newest[rank]
            if is_always_well:
                for peer in ("p", "q"):
                    assert had[peer, rank] >= set(range(1, level + 1))
            elif level > levels[rank]:
                for peer in ("p", "q"):
                    assert (
                        ledger.is_lost(peer)
                        or level in had[peer, rank]
                        or level < max(had[peer, rank], default=0)
                    )
            levels[rank] = level
    for peer in ("p", "q"):  # in the end all get the newest, and all count
        while (following := ledger.following(peer)) is not None:
            ledger.acked(peer, *following)
    for rank in (0, 1):
        assert ledger.level(rank) == (newest[rank] or -1)
