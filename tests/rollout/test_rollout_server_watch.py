"""The watch over the server's load: what moves the cap, what is recorded, and what is ignored (CONC-9 to 11, CONC-15)."""

import asyncio
import logging

from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo.errors import ServerError
from agrpo.metrics.window import Window
from agrpo.rollout.concurrency import Cap, Places
from agrpo.rollout.server_watch import PollTimes, ServerWatch
from agrpo.sampler.load import ServerLoad


class Scripted:
    """Answers each poll with the next entry; an exception is raised, the last entry is repeated."""

    def __init__(self, polls):
        self.polls, self.num_polls = polls, 0

    async def poll_load(self):
        entry = self.polls[min(self.num_polls, len(self.polls) - 1)]
        self.num_polls += 1
        if isinstance(entry, Exception):
            raise entry
        return entry


def load(usage=0.7, preemptions=0.0, waiting=0.0, paused=False):
    return ServerLoad(usage, 5.0, waiting, {"http://one": preemptions}, 1000, paused)


def watch(polls, cap, synced_before=False):
    """The record after every entry of `polls` was seen."""

    async def run():
        client, window = Scripted(polls), Window(strict=True)
        if synced_before:
            cap.synced()
        job = asyncio.create_task(ServerWatch(client, cap, Places(cap), 0.001, window).run())
        while client.num_polls <= len(polls):
            await asyncio.sleep(0.001)
        job.cancel()
        return window.record(1)

    return asyncio.run(run())


def test_preemptions_are_increases_and_a_fallen_counter_starts_from_zero():
    last = load(preemptions=3)
    record = watch([load(preemptions=100), load(preemptions=104), load(preemptions=2), last], Cap(64, 32))
    assert record["rollout/vllm_preemption_count"] == 4 + 2 + 1
    assert record["rollout/vllm_kv_cache_usage_frac"] == 0.7 and record["rollout/vllm_running_requests"] == 5


def test_a_high_load_lowers_the_cap_and_a_paused_server_does_not():
    cap = Cap(64, 40, num_in_flight=40)
    watch([load(usage=0.9, paused=True), load(usage=0.9), load(usage=0.7)], cap)
    assert cap.value == 40  # the first poll after the pause says nothing either
    watch([load(usage=0.9), load(usage=0.9), load(usage=0.7)], cap)
    assert cap.value == 28
    cap = Cap(64, 40, num_in_flight=40)
    record = watch([load(usage=0.9), load(usage=0.7)], cap, synced_before=True)
    assert cap.value == 40 and record["rollout/vllm_kv_cache_usage_frac"] == 0.7


def test_a_server_without_metrics_keeps_the_cap_and_records_nothing():
    cap = Cap(64, 64)
    assert watch([None, None], cap) == {"step": 1} and cap.value == 64


def test_failed_polls_change_nothing_and_warn_once(caplog):
    cap = Cap(64, 32)
    with caplog.at_level(logging.WARNING):
        watch([ServerError("no answer")] * 20, cap)
    assert cap.value == 32
    assert len(caplog.records) == 1 and "12 polls" in caplog.text


def test_a_server_that_is_down_or_new_among_several_counts_no_preemptions_twice():
    polls = [{"a": 5.0, "b": 7.0}, {"a": 6.0}, {"a": 6.0, "b": 9.0}, {"a": 6.0, "b": 1.0, "c": 100.0}]
    entries = [ServerLoad(0.7, 5.0, 0.0, counts, 1000) for counts in polls]
    record = watch([*entries, entries[-1]], Cap(64, 32))
    assert record["rollout/vllm_preemption_count"] == 1 + 2 + 1


def counted_looks(interval, period, pause, num_syncs, jitter=lambda i: 1.0):
    """Simulated times: syncs end every `period` and hold the servers for `pause` before; per gap, the looks that count."""
    times, cap = PollTimes(interval, interval), Cap(64, 64)
    now, gaps, syncs = 0.0, [], []
    for i in range(num_syncs):
        end = now + period * jitter(i)
        counted, last = 0, now
        while times.due < end:
            moment = times.due
            assert moment - last <= interval + 1e-9  # never rarer than asked for
            is_paused = moment >= end - pause
            times.looked(moment, is_paused)
            counted += cap.poll(0.7, 0, is_paused)
            last = moment
        now = end
        cap.synced()
        times.synced(now)
        gaps.append(counted)
        syncs.append(now)
    return gaps


@settings(max_examples=60, deadline=None)
@given(st.floats(0.3, 60.0), st.floats(0.0, 0.9), st.floats(0.5, 10.0))
def test_however_fast_the_syncs_follow_each_other_some_looks_count(period, share, interval):
    gaps = counted_looks(interval, period, share * period, 40)
    # Once the time between two syncs and the share of it that the servers run are known, every gap has one.
    assert all(counted >= 1 for counted in gaps[12:])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.5, 1.0), min_size=40, max_size=40), st.floats(0.5, 4.0))
def test_syncs_of_uneven_distance_leave_looks_that_count(factors, period):
    gaps = counted_looks(5.0, period, 0.1 * period, 40, lambda i: factors[i])
    assert sum(counted >= 1 for counted in gaps[2:]) >= 0.9 * len(gaps[2:])


@settings(max_examples=60, deadline=None)
@given(st.floats(0.2, 30.0), st.lists(st.floats(0.05, 20.0), min_size=1, max_size=30))
def test_between_a_sync_and_the_look_that_counts_lies_another_look(interval, distances):
    times, now = PollTimes(interval, interval), 0.0
    for distance in distances:
        now += distance
        times.synced(now)
        first = times.due
        assert now < first <= now + interval
        times.looked(first, False)
        assert first < times.due <= first + interval


def test_a_sync_sets_the_time_of_the_next_look_while_the_watch_sleeps():
    async def run():
        client = Scripted([load()])
        watch = ServerWatch(client, Cap(64, 64), Places(Cap(64, 64)), 3600.0, Window(strict=True))
        job = asyncio.create_task(watch.run())
        watch.synced()
        await asyncio.sleep(0.05)
        watch.synced()
        async with asyncio.timeout(10):
            while client.num_polls < 2:
                await asyncio.sleep(0.01)
        job.cancel()

    asyncio.run(run())
