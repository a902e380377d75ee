"""The watch over the server's load: what moves the cap, what is recorded, and what is ignored (CONC-9 to 11, CONC-15)."""

import asyncio
import logging

from agrpo.errors import ServerError
from agrpo.metrics.window import Window
from agrpo.rollout.concurrency import Cap, Places
from agrpo.rollout.server_watch import ServerWatch
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
