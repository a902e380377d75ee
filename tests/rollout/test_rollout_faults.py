"""The whole loop over a server of which every fifth answer is spoilt: it goes on, and the counters add up exactly."""

import asyncio
import collections
import itertools
import random
import threading

from agrpo import wire
from agrpo.sections import Agent
from tests.fault_proxy import ANSWERED, FINAL, fault_proxy
from tests.rollout.loop_faults import Faulty, rubbish
from tests.rollout.loop_harness import RAW, TOKENS, G, produce, until
from tests.stub_server import stub_server

NUM_GROUPS = 40
FAILED = {"400": "rejected", "404": "rejected", "too_long": "prompt_too_long", "abort": "aborted", "empty": "empty"}


def plan(seed=3):
    rng = random.Random(seed)
    kinds = itertools.cycle(rng.sample(sorted(ANSWERED | FINAL), len(ANSWERED | FINAL)))
    while True:
        yield next(kinds) if rng.random() < 0.2 else None


async def until_idle(trainer, loop):
    # Only groups that were sent hold tokens, so failures make room for others until the limit is full.
    await until(lambda: loop.admission.num_open_groups == 0 and not loop.admission.may_start(), 60)
    await asyncio.sleep(3.0)  # the last metrics go out once a second, on a loaded machine a little later


def test_every_fifth_answer_is_spoilt_and_the_counters_add_up(tmp_path):
    limit = NUM_GROUPS * G * RAW

    with stub_server(tokens=TOKENS, heads=2, bodies=11) as url, fault_proxy(url, plan()) as proxy:
        trainer = produce(
            proxy.url,
            tmp_path,
            until_idle,
            takes=False,
            start=wire.Start(0, 1, [], [], 0, 0, limit),
            max_retries=4,
            retry_wait_s=0.002,
        )
        counts = proxy.counts
    spoilt = sum(n for kind, n in counts.items() if kind)
    assert 0.1 < spoilt / counts.total() < 0.3
    assert {k for k in counts if k} == ANSWERED | FINAL
    window, groups = trainer.window, trainer.num_done
    failed = collections.Counter(
        {
            reason: int(window.total(f"rollout/failed_{reason}_count"))
            for reason in {*FAILED.values(), "logprobs", "unavailable", "connection", "malformed"}
        }
    )
    # A request is passed on, refused for good, or tried again; after the fifth failure of one request it is given up.
    expected = collections.Counter(FAILED.get(kind, "logprobs") for kind in FINAL for _ in range(counts[kind]))
    given_up = sum(failed[reason] for reason in ("unavailable", "connection", "malformed"))
    assert {r: n for r, n in failed.items() if r in expected} == dict(expected)
    retried = sum(counts[kind] for kind in ANSWERED)
    assert window.total("rollout/vllm_retry_count") == retried - given_up
    assert window.total("rollout/failed_count") == failed.total() == sum(expected.values()) + given_up
    # Every slot of every group ended once, and every answer that was passed on is a sample or in a group that was dropped.
    assert counts.total() == groups * G + retried - given_up
    assert counts[""] == groups * G - failed.total()
    assert window.total("group/usable_slot_count") == counts[""]
    samples = sum(len(group.samples) for group in trainer.ready)
    dropped = {group for group, reason in trainer.resolved}
    assert samples + sum(n for group, n in proxy.groups.items() if group in dropped) == counts[""]
    assert {reason for _, reason in trainer.resolved} <= {"unusable"} and len(trainer.ready) >= NUM_GROUPS


def test_rollouts_that_raise_hang_or_get_rubbish_are_counted_exactly_and_leave_nothing(tmp_path):
    limit, threads = 60 * G * RAW, set(threading.enumerate())

    with stub_server(tokens=TOKENS, heads=2, bodies=11) as url, fault_proxy(url, rubbish()) as proxy:
        trainer = produce(
            proxy.url,
            tmp_path,
            until_idle,
            takes=False,
            start=wire.Start(0, 1, [], [], 0, 0, limit),
            loop_class=Faulty,
            agent=Agent(time_limit=5.0),
            max_failure_frac=1.0,  # the first few to end may well be failures
        )
        counts = proxy.counts
    loop, window, num_slots = trainer.custom, trainer.window, trainer.num_done * G
    injected = {"error": loop.num_raised, "timeout": loop.num_hung, "malformed": counts["malformed"]}
    assert min(injected.values()) > 3 and sum(injected.values()) > 0.12 * num_slots
    assert {r: window.total(f"rollout/failed_{r}_count") for r in injected} == injected
    assert window.total("rollout/failed_count") == sum(injected.values())
    assert counts[""] == window.total("group/usable_slot_count") == num_slots - sum(injected.values())
    assert len(trainer.ready) >= 60 and {reason for _, reason in trainer.resolved} <= {"unusable"}
    assert not [t for t in threading.enumerate() if t not in threads and not t.daemon]
