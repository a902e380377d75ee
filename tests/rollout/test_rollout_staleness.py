"""Rollouts that no step can use any more: which they are, that their requests reach the server's end, what is counted."""

import asyncio

import numpy as np
import pytest

from agrpo.errors import RolloutFailure, ServerError
from agrpo.metrics.window import Window
from agrpo.rollout.concurrency import Cap, Places
from agrpo.rollout.failures import Failures
from agrpo.rollout.loop import Policy
from agrpo.rollout.play import Slots
from agrpo.rollout.staleness import VersionWindow
from agrpo.sampler.vllm import Vllm
from agrpo.types import Prompt, Rollout
from tests.stub_server import control, report, stub_server

PROMPT = Prompt(0, 0, [], {})


@pytest.fixture(scope="module")
def server():
    with stub_server(tokens=3, heads=2, versions=0) as url:
        yield url


@pytest.fixture
def url(server):
    control(server, faults=[], delay_s=0.0)
    yield server
    control(server, faults=[], delay_s=0.0)


class Player:
    """Two turns, with whatever is to happen between them."""

    def __init__(self, between=None, swallows=False):
        self.between, self.swallows = between, swallows

    async def play(self, prompt, generate, group_id, slot, prompt_ids=None):
        turns = []
        try:
            for turn in range(2):
                turns.append(await generate(np.arange(2, 7, dtype=np.int32), (group_id, slot, turn)))
                if self.between is not None and turn == 0:
                    await self.between()
        except RolloutFailure:
            if not self.swallows:
                raise
        return Rollout(tuple(turns), [])


def play(url, player, then, max_staleness=1, by_group=False, group_version=1, on_error=False, trained=True):
    """The rollout that starts at version 1 while `then(slots, policy, url)` goes on; the version it is told is heard."""

    async def run():
        policy, places = Policy(1), Places(Cap(8, 8))
        client = await Vllm(max_retries=0, num_sampler_logprobs=2).connect(
            (url,), None, 42, lambda: policy.version, 10.0, 8, True, Window(), retry_wait_s=0.01
        )
        async with client:
            window = VersionWindow(lambda: policy.version, max_staleness)
            slots = Slots(player, client, places, Failures(0.5, 256), on_error, window, by_group)
            start = (lambda: group_version) if trained else None
            rollout = asyncio.create_task(slots.play(PROMPT, 0, 0, None, None, None, start))
            async with asyncio.timeout(20):
                await then(slots, policy)
                result = await rollout
            assert not slots.in_flight and places.cap.num_in_flight == 0
            return result

    return asyncio.run(run())


def serve(slots, policy, version):
    policy.version = version
    slots.give_up_stale()


async def until_asked(url, number=1):
    while (await asyncio.to_thread(report, url))["num_in_flight"] < number:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize(("version", "is_stale"), [(2, False), (3, True)])
def test_a_request_is_taken_back_when_its_first_token_is_too_old_for_every_step(url, version, is_stale):
    control(url, faults=["hang"] if is_stale else [], delay_s=0.0 if is_stale else 0.5)

    async def then(slots, policy):
        await until_asked(url)
        serve(slots, policy, version)
        if is_stale:  # the connection was closed, and the server knows
            while (await asyncio.to_thread(report, url))["num_in_flight"]:
                await asyncio.sleep(0.01)

    rollout = play(url, Player(), then, on_error=True)
    assert rollout.failure == ("stale" if is_stale else None)
    if is_stale:
        assert "oldest token is of version 1, the servers have 3, and rollout.max_staleness=1" in rollout.failure_text
    else:
        assert len(rollout.turns) == 2


def test_between_two_requests_the_next_one_is_refused(url):
    moved = asyncio.Event()

    async def then(slots, policy):
        while not any(running.version for running in slots.in_flight.values()):
            await asyncio.sleep(0.01)
        serve(slots, policy, 3)
        moved.set()

    before = report(url)["num_requests"]
    assert play(url, Player(between=moved.wait), then).failure == "stale"
    assert report(url)["num_requests"] == before + 1


def test_a_player_that_swallows_the_failure_does_not_make_the_rollout_usable(url):
    control(url, faults=["hang"])

    async def then(slots, policy):
        await until_asked(url)
        serve(slots, policy, 5)

    assert play(url, Player(swallows=True), then).failure == "stale"


def test_a_rollout_is_dated_by_its_first_request_or_by_its_group(url):
    async def then(slots, policy):
        serve(slots, policy, 5)  # before the rollout has asked for anything

    assert play(url, Player(), then).failure is None
    assert play(url, Player(), then, by_group=True, group_version=1).failure == "stale"
    assert play(url, Player(), then, by_group=True, group_version=4).failure is None


def test_an_evaluation_is_never_too_old(url):
    moved = asyncio.Event()

    async def then(slots, policy):
        serve(slots, policy, 50)
        moved.set()

    assert play(url, Player(between=moved.wait), then, trained=False).failure is None


def test_stale_rollouts_are_no_sign_of_a_sick_run():
    failures = Failures(0.5, 4)
    for _ in range(10):
        failures.count(Rollout((), [], failure="stale"))
    for _ in range(2):
        failures.count(Rollout((), [], failure="connection"))
    with pytest.raises(ServerError, match="4 of the last 4 rollouts failed"):
        for _ in range(2):
            failures.count(Rollout((), [], failure="connection"))
