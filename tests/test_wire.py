"""The wire between two real ends on loopback: round trip, order, authentication, and what happens when one end goes."""

import asyncio
import secrets
import socket
import struct
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo import wire
from agrpo.types import Ragged, ReadyGroup, Sample

KEY = secrets.token_hex(16)
START = wire.Start(3, 4, [(0, 5), (7, 9)], [5], 100, 100, 400)


def make_sample(rng, length, heads, candidates, slot):
    mask = rng.random(length) < 0.5
    n = int(mask.sum())
    return Sample(
        token_ids=rng.integers(0, 1000, length).astype(np.int32),
        loss_mask=mask,
        sampler_logprobs=rng.normal(size=length).astype(np.float32),
        versions=np.where(mask, 7, -1).astype(np.int32),
        advantage=float(rng.normal()),
        head_ids=rng.integers(0, 1000, (n, heads)).astype(np.int32),
        head_logprobs=rng.normal(size=(n, heads)).astype(np.float32),
        candidates=Ragged.of([list(range(i % 3)) for i in range(n)]) if candidates else None,
        group_id=11,
        rollout_index=slot,
    )


def make_group(seed, lengths, heads=3, candidates=False):
    rng = np.random.default_rng(seed)
    samples = tuple(make_sample(rng, length, heads, candidates, slot) for slot, length in enumerate(lengths))
    rewards = rng.normal(size=len(lengths))
    return ReadyGroup(
        11, 5, 2, samples, rewards, {"correct": rewards * 2}, np.arange(len(lengths), dtype=np.int32), 6, 12.5
    )


def assert_same(a: ReadyGroup, b: ReadyGroup):
    assert (a.group_id, a.row_index, a.epoch, a.version, a.ready_at) == (11, 5, 2, 6, 12.5)
    assert (b.group_id, b.row_index, b.epoch, b.version, b.ready_at) == (11, 5, 2, 6, 12.5)
    np.testing.assert_array_equal(a.rewards, b.rewards)
    np.testing.assert_array_equal(a.source_rewards["correct"], b.source_rewards["correct"])
    assert len(a.samples) == len(b.samples)
    for x, y in zip(a.samples, b.samples, strict=True):
        assert (x.advantage, x.group_id, x.rollout_index) == (y.advantage, y.group_id, y.rollout_index)
        for name in ("token_ids", "loss_mask", "sampler_logprobs", "versions", "head_ids", "head_logprobs"):
            np.testing.assert_array_equal(getattr(x, name), getattr(y, name))
        if x.candidates is not None:
            assert [list(c) for c in x.candidates] == [list(c) for c in y.candidates]


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**31), st.lists(st.integers(1, 17), max_size=5), st.integers(0, 3), st.booleans())
def test_round_trip(seed, lengths, heads, candidates):
    group = make_group(seed, lengths, heads, candidates)
    (again,) = wire.frames(wire.frame(group))
    assert_same(group, again)


def test_a_cut_file_of_frames_is_an_error():
    data = wire.frame(make_group(0, [5, 7]))
    with pytest.raises(wire.WireError):
        wire.frames(data[:-1])


def listen(received, **changes):
    return wire.Listener("127.0.0.1", 0, changes.get("key", KEY), lambda: START, received.append)


def test_both_directions_keep_their_order():
    received = []
    listener = listen(received)
    groups = [make_group(i, [5, 7, 3]) for i in range(20)]

    async def rollout():
        link = await wire.connect("127.0.0.1", listener.port, KEY)
        assert link.start == START
        for i, group in enumerate(groups):
            await link.send_ready(group)
            await link.send_resolved(100 + i, "zero_std")
        await link.send_metrics({"reward": [1.0, 2.0]})
        seen = []
        async for message in link.incoming():
            seen.append(message)
        await link.close()
        return seen

    result = []
    thread = threading.Thread(target=lambda: result.extend(asyncio.run(rollout())))
    thread.start()
    assert listener.connected.wait(10)
    sent = [wire.VersionUpdate(5), wire.Credit(1, 2, 3), wire.RunEval(6, ["held"]), wire.StopEval(), wire.Finish()]
    for message in sent:
        listener.send(message)
    thread.join(10)
    listener.close()  # reads what is still under way
    assert result == sent
    for i, group in enumerate(groups):
        assert_same(received[2 * i], group)
        assert received[2 * i + 1] == wire.Resolved(100 + i, "zero_std")
    assert received[-1] == wire.Metrics({"reward": [1.0, 2.0]})


def test_a_stranger_is_refused_and_the_true_rollout_process_still_gets_in():
    received = []
    listener = listen(received)

    async def stranger():
        with pytest.raises((wire.WireError, asyncio.IncompleteReadError, ConnectionError)):
            await wire.connect("127.0.0.1", listener.port, secrets.token_hex(16))

    async def friend():
        link = await wire.connect("127.0.0.1", listener.port, KEY)
        await link.send_resolved(1, "skipped")
        await link.close()

    with socket.create_connection(("127.0.0.1", listener.port)) as scanner:
        scanner.recv(32)
    asyncio.run(stranger())
    asyncio.run(friend())
    assert listener.connected.wait(10)
    for _ in range(100):
        if listener.error:
            break
        threading.Event().wait(0.05)
    assert received == [wire.Resolved(1, "skipped")]
    assert "closed the connection" in str(listener.error)  # the trainer learns at once that the rollout process is gone
    listener.close()


@pytest.mark.parametrize("ends", ["resets", "closes"])
def test_a_rollout_process_that_ends_under_messages_is_told_as_such(ends):
    """What ends by it is a consequence, whichever thread meets it first and whatever the system calls it."""
    listener = listen([])

    async def rollout():
        link = await wire.connect("127.0.0.1", listener.port, KEY)
        if ends == "resets":
            linger = struct.pack("ii", 1, 0)
            link._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        await link.close()

    asyncio.run(rollout())
    assert listener.connected.wait(10)
    for _ in range(100):
        listener.send(wire.VersionUpdate(5))
        threading.Event().wait(0.01)
    assert isinstance(listener.error, wire.WireError) and listener.error.is_consequence
    assert "the rollout process closed the connection" in str(listener.error)
    listener.close()


def test_the_trainer_going_is_an_error_in_the_rollout_process():
    listener = listen([])

    async def rollout():
        link = await wire.connect("127.0.0.1", listener.port, KEY)
        listener.connected.wait(5)
        await asyncio.to_thread(listener.close, 0.2)
        with pytest.raises(wire.WireError):
            async for _ in link.incoming():
                pass

    asyncio.run(rollout())


def test_finish_arrives_although_messages_are_still_under_way():
    received = []
    listener = listen(received)

    async def rollout():
        link = await wire.connect("127.0.0.1", listener.port, KEY)

        async def send():
            while True:
                await link.send_ready(make_group(3, [17] * 5))
                await asyncio.sleep(0)  # a send that need not wait gives nobody else a turn

        sending = asyncio.create_task(send())
        async for message in link.incoming():
            last = message
        assert not sending.done()  # nothing broke under it
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        await link.close()
        return last

    result = []
    thread = threading.Thread(target=lambda: result.append(asyncio.run(rollout())))
    thread.start()
    assert listener.connected.wait(10)
    while thread.is_alive() and not received:
        threading.Event().wait(0.01)
    listener.send(wire.Finish())
    listener.close()
    thread.join(10)
    assert result == [wire.Finish()]
