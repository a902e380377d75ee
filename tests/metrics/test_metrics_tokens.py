"""Generated tokens add up: generated = trained + discarded by reason + in flight + untrained, whatever happens when."""

from __future__ import annotations

import asyncio

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from agrpo.metrics.balance import TokenBalance
from agrpo.metrics.window import Window
from agrpo.rollout.tokens import TokenAccount
from agrpo.types import Ragged, Turn
from tests.train.test_train_feeder import RolloutEnd, make_feeder, make_group, wait_until


def total(window: Window, start: str) -> float:
    return sum(window.total(name) for name in window._values if name.startswith(start))


def test_a_group_counted_by_hand():
    window = Window(strict=True)
    account = TokenAccount(window)
    account.open(4)
    for slot, count in ((0, 7), (1, 5), (2, 11), (0, 3)):
        account.generated(4, slot, count)
    account.failed(4, 1, "timeout")
    account.sent(make_group(4, 1, num_samples=3, length=7))  # three samples of five tokens to train, of 21 held
    account.generated(4, 1, 2)  # an abandoned request comes back
    account.open(9)
    account.generated(9, 0, 13)
    account.record()
    assert window.record(1) == {
        "step": 1,
        "tokens/generated": 41,
        "tokens/sent": 15,
        "tokens/discarded/late": 2,
        "tokens/discarded/timeout": 5,
        "tokens/discarded/unused": 6,
        "tokens/in_flight": 13,
    }
    account.dropped(9, "zero_std")
    account.record()
    assert window.record(2) == {"step": 2, "tokens/generated": 0, "tokens/discarded/zero_std": 13, "tokens/in_flight": 0}


def test_tokens_that_no_server_gave_count_as_generated():
    window = Window(strict=True)
    account = TokenAccount(window)
    account.open(0)
    account.sent(make_group(0, 1, num_samples=2, length=5))
    account.record()
    assert (window.total("tokens/generated"), window.total("tokens/sent")) == (6, 6)


def test_every_answer_is_counted_when_it_arrives():
    empty = np.zeros((3, 0), np.int32)
    turn = Turn(
        np.zeros(2, np.int32), np.zeros(3, np.int32), np.zeros(3, np.float32), np.ones(3, bool), np.zeros(3, np.int32),
        empty, empty.astype(np.float32), Ragged.of([]), "stop",
    )  # fmt: skip

    async def generate(ids, key):
        return turn

    window = Window(strict=True)
    account = TokenAccount(window)
    account.open(0)
    assert asyncio.run(account.counted(generate, 0, 1)([], (0, 1, 0))) is turn
    account.record()
    assert window.total("tokens/generated") == 3


EVENT = st.tuples(st.sampled_from(["open", "generate", "fail", "drop", "send"]), st.integers(0, 4), st.integers(0, 2), st.integers(0, 9))


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENT, max_size=60))
def test_the_rollout_side_is_balanced_after_every_event(events):
    window = Window(strict=True)
    account, is_open = TokenAccount(window), set()
    for kind, group_id, slot, count in events:
        if kind == "open" and group_id not in is_open:
            account.open(group_id)
            is_open.add(group_id)
        elif kind == "generate":
            account.generated(group_id, slot, count)
        elif kind != "open" and group_id in is_open:
            if kind == "fail":
                account.failed(group_id, slot, "error")
            else:
                is_open.discard(group_id)
                account.dropped(group_id, "zero_std") if kind == "drop" else account.sent(make_group(group_id, 1, 2, 2 + count))
        account.record()
        gone = total(window, "tokens/discarded/") + window.total("tokens/sent") + window.get("tokens/in_flight")
        assert window.total("tokens/generated") == gone


GROUP = st.tuples(st.integers(0, 4), st.integers(3, 18), st.booleans())


@settings(max_examples=15, deadline=None)
@given(st.lists(GROUP, min_size=1, max_size=25), st.integers(0, 2))
def test_a_run_is_balanced_when_groups_are_stale_oversize_or_never_taken(tmp_path_factory, groups, max_staleness):
    feeder = make_feeder(tmp_path_factory.mktemp("run"), max_staleness=max_staleness)
    window, version, num_sent = Window(strict=True), 1, 0
    account = TokenAccount(window)
    for group_id, (age, length, is_dropped) in enumerate(groups):
        ready = make_group(group_id, version - age, length=length)
        account.open(group_id)
        account.generated(group_id, 0, ready.num_trained_tokens + age)
        if is_dropped:
            account.dropped(group_id, "zero_std")
        else:
            account.sent(ready)
            num_sent += 1
        account.record()
        feeder.balance.reported(window.to_wire())
        if not is_dropped:
            feeder._record(ready)
        step = feeder.next_step(0.02)
        if step is not None:
            feeder.trained(step)
            version += 1
            feeder.synced(version)
    totals = feeder.token_totals()
    record = feeder.take_window().record(1)
    assert totals["unaccounted"] == 0 and totals["in_flight"] == 0
    assert totals["trained"] == record.get("tokens/trained", 0) and totals["untrained"] == record["tokens/untrained"]
    assert totals["discarded"].get("unused", 0) == sum(age for age, _, is_dropped in groups if not is_dropped)
    feeder.close()


def test_what_is_on_its_way_at_the_end_is_in_flight_and_what_a_checkpoint_held_is_restored(tmp_path):
    feeder = make_feeder(tmp_path, ready=[make_group(0, 1, num_samples=2)])
    end = RolloutEnd(feeder)
    window = Window(strict=True)
    account = TokenAccount(window)
    account.open(1)
    account.generated(1, 0, 9)
    account.sent(make_group(1, 1))
    account.record()
    feeder.end()
    end.run(end.link.send_metrics(window.to_wire()))
    end.send(make_group(1, 1))
    wait_until(lambda: feeder.token_totals()["generated"] == 9)
    assert feeder.token_totals() == {
        "generated": 9, "restored": 6, "trained": 0, "discarded": {}, "in_flight": 9, "untrained": 6, "unaccounted": 0,
    }  # fmt: skip
    feeder.close()


def test_a_token_that_nobody_accounts_for_is_shown():
    balance = TokenBalance()
    balance.reported({"tokens/generated": [7, 1], "tokens/sent": [5, 1], "tokens/in_flight": [1, 1]})
    balance.received(5)
    balance.trained(4)
    assert balance.totals(0)["unaccounted"] == 2
