"""The gate before a new group: by hand, and over random lives of groups (STA-4 to STA-12)."""

import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo.rollout.admission import Admission


def finish_group(gate, group_id, lengths):
    gate.start(group_id)
    for n in lengths:
        gate.finish_rollout(group_id, n)


def test_groups_start_one_at_a_time_until_the_first_has_finished():
    gate = Admission(3, limit_tokens=10_000)
    assert gate.may_start()
    gate.start(0)
    gate.finish_rollout(0, 100)
    gate.finish_rollout(0, 120)
    assert not gate.may_start()
    gate.finish_rollout(0, 140)
    assert gate.may_start() and gate.estimate == 120
    gate.start(1)
    assert gate.may_start() and gate.held_tokens == 360 + 3 * 120


def test_new_groups_wait_while_the_limit_is_held():
    gate = Admission(2, limit_tokens=500)
    finish_group(gate, 0, [100, 100])
    gate.send(0, 200)
    gate.start(1)
    assert gate.held_tokens == 400 and gate.may_start()
    gate.start(2)
    assert gate.held_tokens == 600 and not gate.may_start()
    gate.credit(taken_tokens=200, pulled_tokens=200, limit_tokens=500, gate_closed=False)
    assert gate.held_tokens == 400 and gate.may_start()
    gate.credit(taken_tokens=200, pulled_tokens=200, limit_tokens=400, gate_closed=False)
    assert not gate.may_start()


def test_a_closed_gate_stays_closed_and_old_counters_change_nothing():
    gate = Admission(2, limit_tokens=500)
    gate.credit(0, 0, 500, gate_closed=True)
    assert not gate.may_start()
    finish_group(gate, 0, [100, 100])
    gate.send(0, 200)
    gate.credit(200, 200, 500, gate_closed=False)
    gate.credit(100, 100, 500, gate_closed=False)
    assert gate.held_tokens == 0 and gate.may_start()


def test_a_group_larger_than_the_limit_does_not_stop_the_run():
    gate = Admission(2, limit_tokens=10)
    for group_id in range(3):
        assert gate.may_start()
        finish_group(gate, group_id, [100, 100])
        assert not gate.may_start()
        gate.send(group_id, 200)
        assert not gate.may_start()  # queued at the trainer
        # The planner saw the samples but its step is still open: nothing is queued any more, so the next group must come.
        gate.credit(200 * group_id, 200 * (group_id + 1), 10, False)
        assert gate.may_start()


def test_unusable_rollouts_do_not_lower_the_estimate_and_only_the_last_256_count():
    gate = Admission(3, limit_tokens=10_000)
    finish_group(gate, 0, [300, None, 100])
    assert gate.estimate == 200
    gate.drop(0)
    for group_id in range(1, 201):
        finish_group(gate, group_id, [10 * group_id, 7, 8])
        gate.drop(group_id)
    lengths = [n for g in range(1, 201) for n in (10 * g, 7, 8)]
    assert gate.estimate == statistics.fmean(lengths[-256:])
    assert gate.held_tokens == 0


def test_without_any_usable_rollout_groups_stay_one_at_a_time():
    gate = Admission(2, limit_tokens=10_000)
    finish_group(gate, 0, [None, None])
    assert not gate.may_start()
    gate.drop(0)
    assert gate.may_start()
    gate.start(1)
    assert not gate.may_start()


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_over_random_lives_the_limit_is_passed_by_less_than_one_group_and_all_is_given_back(data):
    size, limit = data.draw(st.integers(1, 5), "G"), data.draw(st.integers(1, 3000), "limit")
    gate = Admission(size, limit)
    open_groups: dict[int, list[int | None]] = {}
    queued: list[int] = []  # tokens of groups at the trainer
    taken = pulled = next_id = 0
    for _ in range(data.draw(st.integers(1, 60), "events")):
        match data.draw(st.sampled_from(["start", "start", "finish", "finish", "close", "take"])):
            case "start" if gate.may_start():
                before, alone = gate.held_tokens, not open_groups and not queued
                assert alone or before < limit
                gate.start(next_id)
                assert gate.held_tokens - before == pytest.approx(size * gate.estimate)
                assert alone or gate.held_tokens < limit + size * gate.estimate or gate.estimate == 0
                open_groups[next_id] = []
                next_id += 1
            case "finish":
                running = [g for g, ends in open_groups.items() if len(ends) < size]
                if running:
                    group_id = data.draw(st.sampled_from(running))
                    n = data.draw(st.one_of(st.none(), st.integers(1, 500)))
                    open_groups[group_id].append(n)
                    gate.finish_rollout(group_id, n)
            case "close":
                done = [g for g, ends in open_groups.items() if len(ends) == size]
                if done:
                    group_id = data.draw(st.sampled_from(done))
                    tokens = sum(n or 0 for n in open_groups.pop(group_id))
                    if tokens and data.draw(st.booleans()):
                        gate.send(group_id, tokens)
                        queued.append(tokens)
                    else:
                        gate.drop(group_id)
            case "take" if queued:
                taken += queued.pop(0)
                pulled = taken
                gate.credit(taken, pulled, limit, False)
        if not open_groups and not queued:
            assert gate.held_tokens == 0 and gate.may_start()
        finished = [n for ends in open_groups.values() for n in ends]
        unfinished = size * len(open_groups) - len(finished)
        assert gate.held_tokens == pytest.approx(
            sum(queued) + sum(n or 0 for n in finished) + unfinished * gate.estimate
        )
