"""The cap by the requirement's own numbers, and the places below it (CONC)."""

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo.rollout.concurrency import Cap, Places


def fill(cap, n):
    for _ in range(n):
        cap.started()


def turn_over(cap, n):
    for _ in range(n):
        cap.completed()
        cap.started()


def first(tokens=1_000_000, length=4096, maximum=512, only_when_reached=True):
    return Cap.first(tokens, length, maximum, only_when_reached)


def test_the_first_cap():
    assert first().value == 244
    assert first(tokens=100).value == 1
    assert first(tokens=10**9).value == 512
    assert first(tokens=None).value == 512


def test_the_cap_rises_once_per_turnover_and_falls_above_the_high_mark():
    cap = first()
    fill(cap, 244)
    assert cap.poll(0.59, 0, False) and cap.value == 244  # nothing completed yet
    turn_over(cap, 243)
    cap.poll(0.59, 0, False)
    assert cap.value == 244
    turn_over(cap, 1)
    cap.poll(0.59, 1, False)
    assert cap.value == 244  # a request waits
    cap.poll(0.59, 0, False)
    assert cap.value == 305
    cap.poll(0.59, 0, False)
    assert cap.value == 305
    for usage in (0.6, 0.7, 0.8):
        cap.poll(usage, 0, False)
        assert cap.value == 305
    cap.poll(0.81, 0, False)
    assert cap.value == 213


def test_a_small_cap_rises_by_one_and_never_falls_below_one():
    cap = first(tokens=4096)
    fill(cap, 1)
    turn_over(cap, 1)
    cap.poll(0.1, 0, False)
    assert cap.value == 2
    cap = first(tokens=4096)
    cap.poll(0.99, 0, False)
    assert cap.value == 1


def test_the_cap_is_not_lowered_again_before_the_rollouts_have_come_down_to_it():
    cap = first()
    fill(cap, 244)
    for _ in range(3):
        cap.poll(0.9, 5, False)
    assert cap.value == 170 and cap.num_in_flight == 244 and not cap.has_room
    for _ in range(244 - 170):
        cap.completed()
    assert not cap.has_room
    cap.poll(0.9, 5, False)
    assert cap.value == 119


def test_an_unused_cap_is_not_raised_unless_told_so():
    for only_when_reached, value in ((True, 244), (False, 305)):
        cap = first(only_when_reached=only_when_reached)
        fill(cap, 100)
        turn_over(cap, 300)
        cap.poll(0.1, 0, False)
        assert cap.value == value


def test_the_maximum_bounds_the_cap():
    cap = first(maximum=250)
    fill(cap, 244)
    turn_over(cap, 244)
    cap.poll(0.1, 0, False)
    assert cap.value == 250


def test_polls_in_a_sync_and_the_first_one_after_it_say_nothing():
    cap = first()
    fill(cap, 244)
    turn_over(cap, 244)
    assert not cap.poll(0.0, 0, paused=True)
    assert not cap.poll(0.9, 0, paused=True)
    cap.synced()
    assert not cap.poll(0.0, 0, False) and cap.value == 244
    assert cap.poll(0.0, 0, False) and cap.value == 305


def test_places_are_handed_out_in_order_and_a_lower_cap_only_stops_new_ones():
    async def run():
        places = Places(Cap(3, 2))
        first_two = [places.ask(), places.ask()]
        waiting = [places.ask() for _ in range(3)]
        assert all(f.done() for f in first_two) and not any(f.done() for f in waiting) and not places.has_room
        places.cap.value = 1
        places.give_back()
        assert places.cap.num_in_flight == 1 and not waiting[0].done()
        places.give_back()
        assert waiting[0].done() and not waiting[1].done()
        places.cap.value = 3
        places.hold()
        places.hand_out()
        assert not waiting[1].done()
        places.let_go()
        assert waiting[1].done() and waiting[2].done() and not places.has_room
        for _ in range(3):
            places.give_back()
        assert places.has_room and places.cap.num_in_flight == 0

    asyncio.run(run())


EVENTS = st.one_of(
    st.sampled_from(["start", "complete", "sync"]),
    st.tuples(st.floats(0, 1), st.integers(0, 2), st.booleans()),
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 40), st.integers(1, 40), st.booleans(), st.lists(EVENTS, max_size=400))
def test_whatever_happens_the_cap_keeps_its_rules(maximum, value, only_when_reached, events):
    """The rules, counted again from outside: CONC-1, CONC-4 to CONC-8, CONC-11."""
    cap = Cap(maximum, min(value, maximum), only_when_reached)
    completed, peak, to_skip, drained = 0, 0, False, True
    for event in events:
        before, running = cap.value, cap.num_in_flight
        if event == "start":
            if cap.has_room:
                cap.started()
            assert cap.num_in_flight <= max(running, cap.value)
        elif event == "complete":
            if running:
                cap.completed()
                completed += 1
        elif event == "sync":
            cap.synced()
            to_skip = True
        else:
            usage, waiting, paused = event
            counts = not paused and not to_skip
            to_skip = paused
            assert cap.poll(usage, waiting, paused) == counts
            if cap.value > before:
                assert counts and usage < 0.6 and waiting == 0 and completed >= before
                assert cap.value == min(max(before + 1, before * 5 // 4), maximum)
                assert peak >= before or not only_when_reached
            if cap.value < before:
                assert counts and usage > 0.8 and drained and cap.value == max(1, before * 7 // 10)
            assert cap.num_in_flight == running  # nothing is interrupted
            if cap.value != before:
                completed, peak, drained = 0, 0, cap.value > before
        assert 1 <= cap.value <= maximum
        peak = max(peak, cap.num_in_flight)
        drained |= cap.num_in_flight <= cap.value
