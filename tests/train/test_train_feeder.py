"""The feeder over a real wire: staleness at the version of the step, credit, the ledger, and what a checkpoint keeps."""

import asyncio
import dataclasses
import secrets
import threading
from types import SimpleNamespace as Bag

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo import wire
from agrpo.advantage import Grouped
from agrpo.ledger import AdmissionCredit, Ledger, replay
from agrpo.packer.cost import Cost
from agrpo.packer.sequence import Sequence
from agrpo.sections import Rollout
from agrpo.train.feeder import Feeder
from agrpo.train.measure import step_window
from agrpo.types import ReadyGroup, Sample

KEY = secrets.token_hex(16)


def make_sample(group_id: int, slot: int, version: int, length: int = 5) -> Sample:
    mask = np.arange(length) > 1
    n = int(mask.sum())
    return Sample(
        token_ids=np.full(length, group_id % 97, np.int32),
        loss_mask=mask,
        sampler_logprobs=np.zeros(length, np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        advantage=1.0,
        head_ids=np.zeros((n, 0), np.int32),
        head_logprobs=np.zeros((n, 0), np.float32),
        candidates=None,
        group_id=group_id,
        rollout_index=slot,
    )


def make_group(group_id: int, version: int, num_samples: int = 3, length: int = 5) -> ReadyGroup:
    samples = tuple(make_sample(group_id, slot, version, length) for slot in range(num_samples))
    rewards = np.arange(num_samples, dtype=np.float64)
    slots = np.arange(num_samples, dtype=np.int32)
    return ReadyGroup(group_id, group_id, 0, samples, rewards, {"correct": rewards}, slots, version, 0.0)


def make_feeder(path, budget=15, ready=(), every=1, step=0, version=1, state=None, own=None, **rollout):
    planner = Sequence().planner(1, budget, Cost(1.0), 1)
    planner.next_index = step + 1
    ledger = Ledger(path / "ledger.jsonl")
    ledger.start("run", state)
    section = Rollout(**{"max_staleness": 1, **rollout})
    feeder = Feeder(
        planner=planner,
        ledger=ledger,
        credit=AdmissionCredit(section.max_staleness, 1, budget),
        settings=section,
        version_at=lambda s: version + (s - 1) // every - step // every,
        version=version,
        step=step,
        **(own or {}),
    )
    feeder.open("127.0.0.1", 0, KEY, list(ready))
    return feeder


class RolloutEnd:
    """The other end of the wire, driven from the test's thread."""

    def __init__(self, feeder):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.link = self.run(wire.connect("127.0.0.1", feeder.port, KEY))
        self.credit, self.versions, self.evaluations = None, [], []
        asyncio.run_coroutine_threadsafe(self.listen(), self.loop)

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(10)

    async def listen(self):
        async for message in self.link.incoming():
            if isinstance(message, wire.Credit):
                self.credit = message
            elif isinstance(message, wire.VersionUpdate):
                self.versions.append(message.version)
            elif isinstance(message, wire.RunEval | wire.StopEval):
                self.evaluations.append(message)
            elif isinstance(message, wire.AskState):
                await self.link.send_resolved(77, "filtered")
                await self.link.send_loop_state(b"mine")
                await self.link.send_resolved(78, "filtered")
            elif isinstance(message, wire.Finish):
                await self.link.close()

    def send(self, *groups):
        for group in groups:
            self.run(self.link.send_ready(group))


def next_step(feeder):
    step = feeder.next_step(10.0)
    assert step is not None
    return step


def wait_until(condition):
    for _ in range(500):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("did not happen within 5 s")


def test_stale_samples_are_dropped_at_the_version_their_step_is_trained_at(tmp_path):
    feeder = make_feeder(tmp_path)
    end = RolloutEnd(feeder)
    assert end.link.start == wire.Start(0, 1, [], [], 0, 0, 15)
    # A step takes 15 tokens: three samples. Steps 1, 2 and 3 are trained at versions 1, 2 and 3.
    end.send(make_group(0, 1), make_group(1, 1), make_group(2, 1), make_group(3, 2), make_group(4, 3))
    first = next_step(feeder)
    assert {int(g) for g in first.microbatches[0].rows[0].group_ids} == {0}
    feeder.trained(first)
    feeder.synced(2)
    second = next_step(feeder)
    assert {int(g) for g in second.microbatches[0].rows[0].group_ids} == {1}
    feeder.trained(second)
    feeder.synced(3)
    third = next_step(feeder)  # group 2 would be two versions old
    assert {int(g) for g in third.microbatches[0].rows[0].group_ids} == {3}
    feeder.trained(third)
    record = feeder.take_window().record(3)
    assert record["sample/dropped_stale_count"] == 3
    assert record["sample/staleness_max"] == 1
    groups = replay(tmp_path / "ledger.jsonl")
    assert groups[2] == {"ready": 3, "trained": 0, "dropped": 3, "steps": [], "reasons": ["stale"] * 3}
    assert groups[3] == {"ready": 3, "trained": 3, "dropped": 0, "steps": [3], "reasons": []}
    wait_until(lambda: end.versions == [2, 3])
    feeder.close()


def test_credit_counts_raw_tokens_and_returns_those_of_dropped_samples(tmp_path):
    feeder = make_feeder(tmp_path)
    end = RolloutEnd(feeder)
    end.send(make_group(0, 1), make_group(1, 0 - 5), make_group(2, 1, length=16))  # stale, then oversize
    wait_until(lambda: end.credit is not None and end.credit.pulled_tokens == 15 + 15 + 48)
    assert end.credit.taken_tokens == 15 + 48  # only group 0 is still held
    end.send(make_group(3, 1))
    step = next_step(feeder)
    wait_until(lambda: end.credit.taken_tokens == 15 + 48 + 15)
    feeder.trained(step)
    assert end.credit.limit_tokens == 15  # one step of 15 tokens, staleness 1
    assert feeder.num_resolved == 3
    feeder.close()


def test_staleness_zero_closes_the_gate_until_the_sync(tmp_path):
    feeder = make_feeder(tmp_path, max_staleness=0)
    end = RolloutEnd(feeder)
    end.send(make_group(0, 1), make_group(1, 1))
    step = next_step(feeder)
    wait_until(lambda: end.credit is not None and end.credit.gate_closed)
    feeder.trained(step)
    feeder.synced(2)
    wait_until(lambda: not end.credit.gate_closed)
    feeder.close()


def test_staleness_zero_leaves_the_gate_open_after_a_step_without_a_sync(tmp_path):
    feeder = make_feeder(tmp_path, max_staleness=0, every=2)
    end = RolloutEnd(feeder)
    end.send(make_group(0, 1), make_group(1, 1))
    feeder.trained(next_step(feeder))
    wait_until(lambda: end.credit is not None and end.credit.taken_tokens == 15)
    assert not end.credit.gate_closed  # no sync comes before step 2: nothing else would let its samples start
    end.send(make_group(2, 1))
    step = next_step(feeder)
    wait_until(lambda: end.credit.gate_closed)
    feeder.trained(step)
    feeder.synced(2)
    wait_until(lambda: not end.credit.gate_closed)
    feeder.close()


def test_the_queue_is_what_waits_behind_a_step_and_counts_until_it_is_taken(tmp_path, monkeypatch):
    """Four groups of three samples, steps of three, the next of them planned ahead: 9, 6 and 3 samples wait."""
    now = [100.0]
    monkeypatch.setattr("agrpo.train.measure.time", Bag(time=lambda: now[0]))
    feeder = make_feeder(tmp_path, max_staleness=9, ready=[dataclasses.replace(make_group(g, 1), ready_at=90.0) for g in range(4)])
    wait_until(lambda: feeder._planned.full())
    waiting, waited = [], []
    for _ in range(3):
        now[0] += 5.0
        feeder.trained(next_step(feeder))
        record = feeder.take_window().record(1)
        waiting.append(record["rollout/queue_size"])
        waited.append(record["sample/time_in_queue_s"])
    assert waiting == [9, 6, 3] and waited == [15.0, 20.0, 25.0]
    feeder.close()


def test_rollouts_that_nothing_scored_enter_no_mean_of_rewards():
    """Two of three scored, 1 and 3: mean 2, deviation 1; of a group without any score nothing is known."""
    rewards = {0: np.array([1.0, np.nan, 3.0]), 1: np.full(3, np.nan)}
    groups = {g: dataclasses.replace(make_group(g, 1), rewards=r, source_rewards={"correct": r}) for g, r in rewards.items()}
    samples = [sample for group in groups.values() for sample in group.samples]
    window = step_window(samples, groups, [0] * 6, {})
    assert (window.get("reward_kept"), window.get("reward_group_std")) == (2.0, 1.0)
    assert window.get("rewards/correct/group_std") == 1.0
    unscored = step_window(list(groups[1].samples), {1: groups[1]}, [0] * 3, {})
    assert unscored.get("reward_kept") is None and unscored.get("reward_group_std") is None


def test_a_checkpoint_keeps_exactly_what_is_not_trained(tmp_path):
    feeder = make_feeder(tmp_path, budget=20, max_staleness=9)  # four samples a step: groups are divided between steps
    end = RolloutEnd(feeder)
    end.send(*(make_group(g, 1) for g in range(4)))
    end.run(end.link.send_resolved(4, "zero_std"))
    step = next_step(feeder)  # groups 0 and one sample of group 1
    wait_until(lambda: end.credit is not None and end.credit.pulled_tokens == 60)
    before, _, _ = feeder.state()
    feeder.trained(step)
    state, frames, _ = feeder.state()
    assert before["resolved"] == [(4, 5)] and state["resolved"] == [(0, 2), (4, 5)]
    groups = wire.frames(frames)
    assert [(g.group_id, len(g.samples)) for g in groups] == [(1, 2), (2, 3), (3, 3)]
    feeder.close()

    resumed = make_feeder(tmp_path, budget=20, ready=groups, step=1, version=5, state=state, max_staleness=9)
    end = RolloutEnd(resumed)
    start = end.link.start
    assert (start.step, start.version, start.ready) == (1, 5, [1, 2, 3])
    assert start.resolved == [(0, 2), (4, 5)]
    assert start.taken_tokens == start.pulled_tokens - (0 if start.pulled_tokens == -40 else 40)
    step = next_step(resumed)
    assert step.index == 2
    resumed.trained(step)
    groups = replay(tmp_path / "ledger.jsonl")
    assert groups[1]["trained"] == 3 and groups[1]["steps"] == [1, 2]
    resumed.close()


def test_nothing_that_arrives_after_the_end_changes_the_ledger_or_the_checkpoint(tmp_path):
    feeder = make_feeder(tmp_path)
    end = RolloutEnd(feeder)
    end.send(make_group(0, 1))
    wait_until(lambda: end.credit is not None and end.credit.pulled_tokens == 15)
    feeder.end()
    state, frames, _ = feeder.state()
    end.send(make_group(1, 1), make_group(2, -9))
    end.run(end.link.send_resolved(3, "zero_std"))
    end.run(end.link.send_eval("heldout", {"reward": 0.5}))
    wait_until(lambda: feeder.evaluations)
    assert feeder.state() == (state, frames, None)
    assert [g.group_id for g in wire.frames(frames)] == list(replay(tmp_path / "ledger.jsonl")) == [0]
    feeder.close()


def test_the_rollout_process_going_is_an_error_at_the_next_look(tmp_path):
    feeder = make_feeder(tmp_path)
    end = RolloutEnd(feeder)
    end.run(end.link.close())
    with pytest.raises(wire.WireError):
        for _ in range(50):
            feeder.next_step(0.1)
    feeder.close()


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(0, 4), min_size=5, max_size=40), st.integers(0, 3), st.integers(1, 2))
def test_no_trained_token_is_older_than_the_limit(tmp_path_factory, ages, max_staleness, every):
    # STA-17 with STA-13: whatever the ages at arrival, and although steps are planned ahead.
    feeder = make_feeder(tmp_path_factory.mktemp("run"), max_staleness=max_staleness, every=every)
    version, trained = 1, 0
    for group_id, age in enumerate(ages):
        feeder._accept(make_group(group_id, version - age))
        step = feeder.next_step(0.02)
        if step is None:
            continue
        for microbatch in step.microbatches:
            for row in microbatch.rows:
                assert version - row.versions.min() <= max_staleness
        feeder.trained(step)
        trained += 1
        if step.index % every == 0:
            version += 1
            feeder.synced(version)
    kept = sum(age <= max_staleness for age in ages)
    assert trained <= kept
    feeder.close()


def test_a_step_has_the_advantages_of_its_own_statistics(tmp_path):
    feeder = make_feeder(tmp_path, own={"advantage": Grouped(mean_level="batch", std_level=None)})
    end = RolloutEnd(feeder)
    for group_id, rewards in ((0, [1.0, 1.0]), (1, [4.0, 2.0])):
        samples = tuple(
            dataclasses.replace(make_sample(group_id, slot, 1), reward=reward, advantage=0.0)
            for slot, reward in enumerate(rewards)
        )
        made = make_group(group_id, 1, num_samples=2)
        end.send(dataclasses.replace(made, samples=samples, references=np.array(rewards)))
    row = next_step(feeder).microbatches[0].rows[0]
    # Three samples of five tokens fill the row: 1, 1 and 4 around their mean of 2.
    assert row.advantages[::3].tolist() == [-1, -1, 2] and feeder.state()[2] is None
    feeder.close()


def test_a_checkpoint_is_taken_when_the_users_loop_gives_its_state(tmp_path):
    feeder = make_feeder(tmp_path, own={"asks_loop": True, "loop_state": b"before"})
    end = RolloutEnd(feeder)
    assert end.link.start.loop_state == b"before"
    wait_until(lambda: feeder._listener.connected.is_set())
    ledger, _, loop_state = feeder.state()
    # What was resolved before the state was given is in the checkpoint, what came after it is not.
    assert loop_state == b"mine" and ledger["resolved"] == [(77, 78)]
    feeder.close()
