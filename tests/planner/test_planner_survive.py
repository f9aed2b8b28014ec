"""Failures: Young's and Daly's formulae, the simulation, spares, copies."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from keepstep.planner.copies import (
    CopyRisk,
    group_copies,
    loss_chance,
    loss_per_day,
    ring_copies,
    simulated_losses,
)
from keepstep.planner.errors import PlannerError
from keepstep.planner.simulate import REPAIRED, Outcome, Trace, best_intervals, replay, simulate
from keepstep.planner.survive import (
    LLAMA3_PER_HOST_DAY,
    Kinds,
    Risk,
    Tier,
    capacity,
    daly_effective,
    expect,
    plan_tiers,
    restart_loss,
    spares_worth,
    young_interval,
    young_loss,
)
from keepstep.planner.tiers import DEFAULT_TIERS, parse_tier

HOUR = 3600.0
HOSTS_ONLY = Kinds(process=0.0, host=1.0, several=0.0)


def one_tier_risk(mtbf_s: float, restart_s: float) -> Risk:
    """All failures alike, met by one tier; lost hosts come back at once."""
    return Risk(
        hosts=1000,
        failures_per_host_day=86400.0 / mtbf_s / 1000,
        kinds=Kinds(process=1.0, host=0.0, several=0.0),
        detect_s=0.0,
        restart_s=restart_s,
    )


@pytest.mark.parametrize(
    ("mtbf_h", "capture_s", "interval_s", "loss_pct", "r60_pct", "r900_pct"),
    [
        (7.9, 120.0, 44 * 60, 9.2, 0.2, 3.2),
        (7.9, 0.2, 107, 0.4, 0.2, 3.2),
        (1.8, 120.0, 21 * 60, 19.2, 0.9, 13.9),
        (1.8, 0.2, 51, 0.8, 0.9, 13.9),
    ],
)
def test_young_s_formula_gives_the_known_table(
    mtbf_h: float,
    capture_s: float,
    interval_s: float,
    loss_pct: float,
    r60_pct: float,
    r900_pct: float,
) -> None:
    """Losses within 0.2 points; intervals as they are rounded there."""
    mtbf = mtbf_h * HOUR
    assert young_interval(capture_s, mtbf) == pytest.approx(interval_s, rel=0.015)
    assert 100 * young_loss(capture_s, mtbf) == pytest.approx(loss_pct, abs=0.2)
    assert 100 * restart_loss(60, mtbf) == pytest.approx(r60_pct, abs=0.2)
    assert 100 * restart_loss(900, mtbf) == pytest.approx(r900_pct, abs=0.2)


def test_llama_3_s_rate_gives_an_effective_time_between_90_and_97_per_cent() -> None:
    """419 interruptions in 54 days of 2,048 hosts; d = 10 s and R = 300 s are assumptions."""
    risk = Risk(2048, LLAMA3_PER_HOST_DAY, HOSTS_ONLY, detect_s=10.0, restart_s=0.0)
    tiers = [Tier("store", 10.0, 290.0, "several")]
    assert risk.mtbf_s * 419 == pytest.approx(54 * 86400)
    assert 0.90 <= expect(risk, tiers).effective <= 0.97
    outcome = simulate(risk, tiers, 54, runs=100, seed=7)
    assert 0.90 <= outcome.spread()[0] <= outcome.spread()[1] <= 0.97
    assert outcome.failures.mean() == pytest.approx(419, rel=0.03)


@pytest.mark.parametrize(
    ("mtbf_h", "capture_s", "restart_s"),
    [(7.9, 120, 60), (7.9, 0.2, 60), (1.8, 120, 900), (1.8, 0.2, 60), (3.09, 10, 300)],
)
def test_the_formula_s_interval_is_within_0_2_points_of_the_simulated_best(
    mtbf_h: float, capture_s: float, restart_s: float
) -> None:
    risk = one_tier_risk(mtbf_h * HOUR, restart_s)
    best = best_intervals(risk, [Tier("t", capture_s, 0.0, "several")], 90, runs=64, seed=3)[0]
    assert best.effective_simulated - best.effective_formula <= 0.002


@pytest.mark.parametrize(
    ("mtbf_h", "capture_s", "restart_s"), [(7.9, 120, 60), (1.8, 120, 900), (3.09, 10, 300)]
)
def test_the_simulation_agrees_with_daly_s_exact_formula(
    mtbf_h: float, capture_s: float, restart_s: float
) -> None:
    risk = one_tier_risk(mtbf_h * HOUR, restart_s)
    tier = Tier("t", capture_s, 0.0, "several")
    interval = plan_tiers(risk, [tier])[0].interval_s
    exact = daly_effective(capture_s, risk.mtbf_s, restart_s, interval)
    assert simulate(risk, [tier], 90, runs=300, seed=5).mean == pytest.approx(exact, abs=0.003)


def replayed(gaps: list[float], kinds: list[int], interval_s: float) -> Outcome:
    """One run of a day, with these events; a recovery takes 50 s, a lost host is not missed."""
    trace = Trace(
        np.array([[*gaps, np.inf]]),
        np.array([[*kinds, REPAIRED]]),
        np.zeros((1, len(gaps) + 1), dtype=np.int64),
    )
    tier = Tier("t", 0.0, 50.0, "several", interval_s)
    risk = Risk(100, kinds=HOSTS_ONLY, detect_s=0.0, restart_s=0.0)
    return replay(risk, plan_tiers(risk, [tier]), 1.0, trace)


def test_a_failure_takes_the_work_since_the_last_capture() -> None:
    found = replayed([1234.0], [1], 100.0)
    assert found.lost_s[0] == pytest.approx(34.0)
    assert found.recovering_s[0] == pytest.approx(50.0)
    assert found.effective[0] * 86400 == pytest.approx(86400 - 34 - 50)


@pytest.mark.parametrize("count", range(1, 60))
def test_a_failure_during_a_recovery_takes_no_more_work(count: int) -> None:
    found = replayed([count * 0.7 + 0.1, 10.0, 10.0], [1, 1, 1], 0.7)
    assert found.lost_s[0] == pytest.approx(0.1, abs=1e-6)
    assert found.recovering_s[0] == pytest.approx(70.0)


def test_a_host_that_comes_back_does_not_shorten_a_recovery() -> None:
    found = replayed([1000.0, 20.0], [1, REPAIRED], 100.0)
    assert found.recovering_s[0] == pytest.approx(50.0)
    assert found.failures[0] == 1


def test_the_same_seed_gives_the_same_runs_and_another_gives_others() -> None:
    risk = Risk(512)
    first, again, other = (
        simulate(risk, DEFAULT_TIERS, 30, runs=8, seed=seed).effective for seed in (1, 1, 2)
    )
    assert (first == again).all()
    assert (first != other).any()


def test_months_of_thousands_of_gpus_take_seconds() -> None:
    before = time.process_time()
    outcome = simulate(Risk(2048), DEFAULT_TIERS, 90, runs=200)
    assert time.process_time() - before < 5.0
    assert len(outcome.effective) == 200


def test_closed_form_and_simulation_agree_on_several_tiers() -> None:
    risk = Risk(2048)
    expected = expect(risk, DEFAULT_TIERS).effective
    assert simulate(risk, DEFAULT_TIERS, 90, runs=64).mean == pytest.approx(expected, abs=0.002)


def test_a_failure_is_met_by_the_quickest_tier_that_survives_it() -> None:
    plans = {plan.tier.name: plan for plan in plan_tiers(Risk(2048), DEFAULT_TIERS)}
    total = 1.0 / Risk(2048).mtbf_s
    assert plans["memory"].failures_per_s == pytest.approx(0.75 * total)
    assert plans["peer"].failures_per_s == pytest.approx(0.24 * total)
    assert plans["disk"].failures_per_s == 0.0
    assert plans["store"].failures_per_s == pytest.approx(0.01 * total)
    assert plans["disk"].interval_s > plans["peer"].interval_s


def test_tiers_that_do_not_cover_all_failures_are_refused() -> None:
    with pytest.raises(PlannerError, match=r"no tier survives 1\.0 %"):
        plan_tiers(Risk(64), DEFAULT_TIERS[:2])


def test_a_fixed_interval_is_kept_and_none_is_shorter_than_a_step() -> None:
    fixed = Tier("store", 1.0, 60.0, "several", interval_s=1234.0)
    quick = Tier("memory", 0.0, 1.0, "process")
    plans = plan_tiers(Risk(64), [fixed, quick], least_s=5.0)
    assert [plan.interval_s for plan in plans] == [5.0, 1234.0]


def test_spares_are_worth_most_to_a_job_that_cannot_shrink() -> None:
    elastic, rigid = Risk(2048), Risk(2048, elastic=False)
    assert spares_worth(rigid) > spares_worth(elastic)
    assert capacity(rigid, 0) < capacity(rigid, 2) <= capacity(elastic, 2) <= 1.0


def test_simulated_spares_restore_a_rigid_job() -> None:
    risk = Risk(2048, elastic=False, repair_s=8 * HOUR)
    bare = simulate(risk, DEFAULT_TIERS, 60, runs=32).mean
    spared = simulate(replace(risk, spares=8), DEFAULT_TIERS, 60, runs=32).mean
    assert bare == pytest.approx(expect(risk, DEFAULT_TIERS).effective, abs=0.05)
    assert spared > bare + 0.1


def test_groups_lose_all_copies_half_as_often_as_a_ring() -> None:
    risk = CopyRisk(host_losses_per_day=1e-3, again_s=60)
    ring, groups = (loss_chance(place(512, 2), risk, 54) for place in (ring_copies, group_copies))
    assert ring == pytest.approx(2 * groups, rel=1e-3)
    assert loss_chance(ring_copies(512, 3), risk, 54) < ring / 1e3


@pytest.mark.parametrize("copies", [2, 3])
def test_random_losses_agree_with_the_rate(copies: int) -> None:
    holders = ring_copies(300, copies)
    risk = CopyRisk(host_losses_per_day=0.4, again_s=2 * HOUR)
    days = 400.0
    found = sum(simulated_losses(holders, risk, days, seed) for seed in range(5))
    assert found == pytest.approx(5 * days * loss_per_day(holders, risk), rel=0.12)


def test_copies_in_one_rack_die_with_it_and_copies_across_racks_do_not() -> None:
    racks = tuple(host // 4 for host in range(16))
    risk = CopyRisk(0.0, 60, racks, domain_losses_per_day=0.01)
    assert loss_per_day(ring_copies(16, 2), risk) == pytest.approx(4 * 0.01)
    assert loss_per_day(ring_copies(16, 2, stride=4), risk) == 0.0


@pytest.mark.parametrize(
    "text", ["store", "store=1,2", "store=a,2,host", "=1,2,host", "s=1,2,all", "s=-1,2,host"]
)
def test_a_wrong_tier_is_refused(text: str) -> None:
    with pytest.raises(PlannerError, match="tier"):
        parse_tier(text)


def test_shares_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(PlannerError, match="add up to 1"):
        Kinds(process=0.5, host=0.1, several=0.1)
