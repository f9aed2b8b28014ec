"""What a log means: each rule of the fold, and S1, S2 and S7 as properties of any log."""

from __future__ import annotations

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.kit.logs import (
    bad,
    commit,
    generation,
    good,
    record,
    records,
    retire,
    rewind,
    state,
    term,
)

from keepstep.ckpt.entry import Body, End
from keepstep.ckpt.lineage import Lineage, Status, fold, resume_points, state_words


def meaning(*bodies: Body) -> Lineage:
    return fold(records(bodies))


def live_steps(lineage: Lineage) -> list[tuple[int, int]]:
    return [(c.state.generation, c.state.step) for c in resume_points(lineage)]


def why(lineage: Lineage, generation_number: int, step: int) -> tuple[Status, str]:
    found = [c for c in lineage.commits if c.state == state(generation_number, step)]
    assert len(found) == 1
    return found[0].status, found[0].reason


def test_an_empty_log_means_nothing() -> None:
    lineage = fold([])
    assert lineage.job is None
    assert lineage.generation is None
    assert lineage.live == ()
    assert (lineage.term, lineage.next_seq, lineage.committed_to) == (0, 0, -1)


def test_commits_are_live_newest_first() -> None:
    lineage = meaning(term(1), generation(1), commit(1, 10), commit(1, 20), commit(1, 30))
    assert live_steps(lineage) == [(1, 30), (1, 20), (1, 10)]
    assert lineage.committed_to == 30
    assert lineage.ignored == ()


def test_a_generation_voids_the_commits_above_its_base_and_says_so() -> None:
    lineage = meaning(
        term(1), generation(1), commit(1, 10), commit(1, 20), term(2), generation(2, state(1, 10))
    )
    assert live_steps(lineage) == [(1, 10)]
    assert why(lineage, 1, 20) == (
        Status.VOID,
        "generation 2 began at step 10 of generation 1 (entry 5)",
    )


def test_a_base_need_not_be_committed() -> None:
    """It may be a state that only lived in memory."""
    lineage = meaning(term(1), generation(1), commit(1, 10), generation(2, state(1, 17)))
    assert live_steps(lineage) == [(1, 10)]
    assert lineage.committed_to == 17


def test_a_generation_without_a_base_voids_everything() -> None:
    lineage = meaning(term(1), generation(1), commit(1, 10), generation(2))
    assert live_steps(lineage) == []
    assert why(lineage, 1, 10)[1] == "generation 2 began anew (entry 3)"


def test_the_same_step_again_in_a_new_generation_is_the_only_live_one() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        generation(2, state(1, 10)),
        commit(2, 20),
    )
    assert live_steps(lineage) == [(2, 20), (1, 10)]


def test_a_commit_of_a_succeeded_generation_is_ignored() -> None:
    lineage = meaning(
        term(1), generation(1), commit(1, 10), generation(2, state(1, 10)), commit(1, 20)
    )
    assert live_steps(lineage) == [(1, 10)]
    assert [each.reason for each in lineage.ignored] == ["generation 2 had succeeded generation 1"]


def test_a_commit_before_any_generation_or_of_a_later_one_is_ignored() -> None:
    lineage = meaning(term(1), commit(1, 10), generation(1), commit(2, 10))
    assert live_steps(lineage) == []
    assert [each.seq for each in lineage.ignored] == [1, 3]
    assert {each.reason for each in lineage.ignored} == {
        "generation 1 has not begun",
        "generation 2 has not begun",
    }


def test_commits_of_a_generation_ascend() -> None:
    lineage = meaning(
        term(1), generation(1), commit(1, 20), commit(1, 10), commit(1, 20), commit(1, 30)
    )
    assert live_steps(lineage) == [(1, 30), (1, 20)]
    assert [each.seq for each in lineage.ignored] == [3, 4]


def test_a_commit_at_the_step_of_its_base_is_ignored() -> None:
    lineage = meaning(
        term(1), generation(1), commit(1, 10), generation(2, state(1, 10)), commit(2, 10)
    )
    assert live_steps(lineage) == [(1, 10)]


def test_a_lower_term_is_ignored_and_its_superseder_named() -> None:
    log = records([term(1), generation(1), commit(1, 10), term(2, "trainer on host-b, pid 9")])
    log.append(record(4, 1, commit(1, 20)))
    log.append(record(5, 2, commit(1, 30)))
    lineage = fold(log)
    assert live_steps(lineage) == [(1, 30), (1, 10)]
    assert lineage.ignored[0].reason == (
        "term 1 had ended: trainer on host-b, pid 9 took term 2 at entry 3"
    )


def test_a_term_that_nobody_took_is_ignored() -> None:
    log = records([term(1), generation(1)])
    log.append(record(2, 7, commit(1, 20)))
    assert live_steps(fold(log)) == []


def test_terms_and_generations_never_go_back() -> None:
    lineage = meaning(term(5), generation(4), term(5), term(3), generation(4), generation(2))
    assert lineage.term == 5
    assert lineage.generation is not None
    assert lineage.generation.number == 4
    assert [each.seq for each in lineage.ignored] == [2, 3, 4, 5]


def test_a_base_off_the_lineage_is_refused() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        generation(2, state(1, 10)),
        generation(3, state(1, 20)),
        commit(3, 30),
    )
    assert lineage.generation is not None
    assert lineage.generation.number == 2
    assert live_steps(lineage) == [(1, 10)]
    assert lineage.ignored[0].reason == "its base, step 20 of generation 1, is not on the lineage"


def test_a_rewind_voids_later_commits_and_ends_the_generation() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        rewind(state(1, 10), "wrong data"),
        commit(1, 30),
        generation(2, state(1, 10)),
        commit(2, 20),
    )
    assert live_steps(lineage) == [(2, 20), (1, 10)]
    assert why(lineage, 1, 20) == (
        Status.VOID,
        "rewound to step 10 of generation 1: wrong data (entry 4)",
    )
    assert [each.seq for each in lineage.ignored] == [5]
    assert "only a new generation may commit" in lineage.ignored[0].reason


def test_a_rewind_to_nothing_voids_all() -> None:
    assert live_steps(meaning(term(1), generation(1), commit(1, 10), rewind(None))) == []


def test_a_rewind_past_a_generation_keeps_the_earlier_ones() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        generation(2, state(1, 20)),
        commit(2, 30),
        rewind(state(1, 10)),
    )
    assert live_steps(lineage) == [(1, 10)]


def test_a_rewind_to_what_is_not_on_the_lineage_changes_nothing() -> None:
    lineage = meaning(term(1), generation(1), commit(1, 10), rewind(state(2, 5)), commit(1, 20))
    assert live_steps(lineage) == [(1, 20), (1, 10)]
    assert [each.seq for each in lineage.ignored] == [3]


def test_bad_holds_for_all_that_descends_across_generations() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        generation(2, state(1, 20)),
        commit(2, 30),
        bad(1, 15),
        commit(2, 40),
    )
    assert live_steps(lineage) == [(1, 10)]
    assert why(lineage, 2, 40) == (
        Status.BAD,
        "it descends from step 15 of generation 1, which is bad: loss exploded (entry 6)",
    )
    assert why(lineage, 1, 20)[0] is Status.BAD


def test_bad_does_not_reach_a_branch_that_left_before() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        generation(2, state(1, 10)),
        commit(2, 20),
        bad(1, 20),
    )
    assert live_steps(lineage) == [(2, 20), (1, 10)]


def test_bad_stands_whatever_is_said_before_or_after() -> None:
    lineage = meaning(
        term(1), generation(1), commit(1, 10), good(1, 10), bad(1, 10), good(1, 10), good(1, 20)
    )
    assert live_steps(lineage) == []
    assert lineage.good == {}
    assert [each.seq for each in lineage.ignored] == [5, 6]


def test_nothing_begins_at_a_bad_state() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        bad(1, 15),
        generation(2, state(1, 20)),
        generation(3, state(1, 10)),
    )
    assert [each.number for each in lineage.generations] == [1, 3]
    assert "is bad: loss exploded" in lineage.ignored[0].reason


def test_retired_states_are_not_live_and_keep_the_reason_they_died_of() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        commit(1, 30),
        generation(2, state(1, 20)),
        retire(state(1, 10), state(1, 30)),
    )
    assert live_steps(lineage) == [(1, 20)]
    assert why(lineage, 1, 10) == (Status.RETIRED, "retention (entry 6)")
    assert why(lineage, 1, 30) == (
        Status.RETIRED,
        "generation 2 began at step 20 of generation 1 (entry 5)",
    )


def test_what_is_retired_before_its_commit_is_never_live() -> None:
    lineage = meaning(term(1), generation(1), retire(state(1, 10)), commit(1, 10))
    assert why(lineage, 1, 10) == (Status.RETIRED, "retention (entry 2)")


def test_another_jobs_entry_is_ignored() -> None:
    log = records([term(1), generation(1)])
    log.append(record(2, 1, commit(1, 20), job="run-b"))
    assert fold(log).ignored[0].reason == "it belongs to job 'run-b', this log to 'run-a'"


def test_the_end_is_forgotten_when_a_generation_begins() -> None:
    end = End(state=state(1, 10), reason="all steps done")
    begun = [term(1), generation(1), commit(1, 10), end]
    assert meaning(*begun).end == end
    assert meaning(*begun, generation(2, state(1, 10))).end is None


def test_states_are_named_for_people() -> None:
    assert state_words(state(3, 120)) == "step 120 of generation 3"
    assert state_words(None) == "nothing"


STATES = st.builds(state, st.integers(1, 4), st.integers(0, 8))
BODIES = st.one_of(
    st.builds(term, st.integers(1, 4)),
    st.builds(generation, st.integers(1, 4), st.none() | STATES),
    st.builds(commit, st.integers(1, 4), st.integers(0, 8)),
    st.builds(bad, st.integers(1, 4), st.integers(0, 8)),
    st.builds(good, st.integers(1, 4), st.integers(0, 8)),
    st.builds(rewind, st.none() | STATES),
    st.builds(lambda states: retire(*states), st.lists(STATES, max_size=2)),
)


@given(st.lists(BODIES, max_size=40))
@settings(max_examples=400, derandomize=True, deadline=None)
def test_any_log_keeps_the_promises(bodies: list[Body]) -> None:
    """S1: one live commit per step. S2: nothing goes back. S7: bad, retired: never live again."""
    log = records([term(1), generation(1), *bodies])
    dead: set[object] = set()
    highest = (0, 0)
    for length in range(len(log) + 1):
        lineage = fold(log[:length])
        steps = [c.state.step for c in lineage.live]
        assert len(steps) == len(set(steps))
        assert steps == sorted(steps, reverse=True)
        newest = lineage.generation.number if lineage.generation is not None else 0
        assert lineage.term >= highest[0]
        assert newest >= highest[1]
        highest = (lineage.term, newest)
        live = {c.state for c in lineage.live}
        assert not live & dead
        dead |= {c.state for c in lineage.commits} - live
        assert not live & set(lineage.bad)
        assert not live & set(lineage.retired)
        accounted = len(lineage.ignored) + len(lineage.commits) + len(lineage.generations)
        assert accounted <= length


@given(st.lists(BODIES, max_size=30), st.lists(BODIES, max_size=10))
@settings(max_examples=200, derandomize=True, deadline=None)
def test_entries_of_a_lower_term_change_nothing(bodies: list[Body], late: list[Body]) -> None:
    log = records([term(5), generation(1), *bodies])
    current = fold(log).term
    stale = [record(len(log) + n, current - 1, body) for n, body in enumerate(late)]
    with_stale = fold([*log, *(r for r in stale if not isinstance(r.body, type(term(1))))])
    before = fold(log)
    same = dataclasses.replace(with_stale, next_seq=before.next_seq, ignored=before.ignored)
    assert same == before


def test_what_a_run_may_go_on_from_need_not_be_committed() -> None:
    lineage = meaning(
        term(1),
        generation(1),
        commit(1, 10),
        commit(1, 20),
        generation(2, state(1, 15)),
        commit(2, 20),
        rewind(state(2, 22)),
    )
    for admitted in (state(1, 0), state(1, 10), state(1, 15), state(2, 16), state(2, 22)):
        assert lineage.admits(admitted) == ""
    assert lineage.admits(state(1, 20)) == "generation 2 began at step 15 of generation 1 (entry 4)"
    assert "of generation 1 it has what is above step -1 and up to step 15" in lineage.admits(
        state(1, 16)
    )
    assert "above step 15 and up to step 22" in lineage.admits(state(2, 23))
    assert "above step 15" in lineage.admits(state(2, 15))
    assert lineage.admits(state(3, 30)) == "generation 3 has not begun"


def test_nothing_goes_on_from_a_generation_that_was_left() -> None:
    lineage = meaning(term(1), generation(1), generation(2), commit(2, 10))
    assert lineage.admits(state(1, 5)).endswith("of generation 1 it has nothing any more")
    assert lineage.admits(state(2, 5)) == ""


def test_nothing_goes_on_from_what_is_bad_or_descends_from_it() -> None:
    lineage = meaning(
        term(1), generation(1), bad(1, 12), bad(1, 14), generation(2, state(1, 11)), commit(2, 20)
    )
    assert lineage.admits(state(1, 11)) == ""
    assert lineage.admits(state(2, 30)) == ""
    later = meaning(term(1), generation(1), generation(2, state(1, 13)), bad(1, 12), bad(1, 13))
    assert later.admits(state(1, 11)) == ""
    assert later.admits(state(1, 12)) == "loss exploded (entry 3)"
    assert later.admits(state(1, 13)).startswith("it descends from step 12 of generation 1")
    assert later.admits(state(2, 30)).startswith("it descends from step 12 of generation 1")


def test_nothing_goes_on_from_what_was_retired() -> None:
    lineage = meaning(
        term(1), generation(1), commit(1, 10), commit(1, 20), retire(state(1, 10), state(1, 15))
    )
    assert lineage.admits(state(1, 10)) == "retention (entry 4)"
    assert lineage.admits(state(1, 15)) == "retention (entry 4)"
    assert lineage.admits(state(1, 20)) == ""
