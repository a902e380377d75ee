"""The resolved set against a plain Python set, the event log's replay, and the admission window."""

import json

from hypothesis import given
from hypothesis import strategies as st

from agrpo.ledger import AdmissionCredit, Intervals, Ledger, replay


@given(st.lists(st.integers(0, 40)))
def test_intervals_equal_a_set(values):
    intervals, plain = Intervals(), set()
    for value in values:
        assert intervals.add(value) == (value not in plain)
        plain.add(value)
    assert len(intervals) == len(plain)
    assert [v for v in range(42) if v in intervals] == sorted(plain)
    pairs = intervals.to_list()
    assert all(a[1] < b[0] for a, b in zip(pairs, pairs[1:], strict=False))  # disjoint and not adjacent
    assert Intervals(pairs).to_list() == pairs


def test_a_resume_voids_what_was_written_after_its_checkpoint(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.start("first", None)
    ledger.ready(0, 3)
    ledger.trained(0, 3, step=1)
    state = json.loads(json.dumps(ledger.state()))
    ledger.ready(1, 5)
    ledger.trained(1, 5, step=2)  # lost with the weights of step 2
    ledger.dropped(2, "zero_std")
    ledger.close()

    resumed = Ledger(path)
    resumed.start("second", state)
    assert 0 in resumed.resolved and 1 not in resumed.resolved and 2 not in resumed.resolved
    resumed.ready(1, 5)
    resumed.trained(1, 2, step=2)
    resumed.trained(1, 3, step=3)
    resumed.dropped(2, "zero_std")
    groups = replay(path)
    assert groups[0]["trained"] == 3 and groups[0]["steps"] == [1]
    assert groups[1] == {"ready": 5, "trained": 5, "dropped": 0, "steps": [2, 3], "reasons": []}
    assert groups[2]["reasons"] == ["zero_std"]
    assert resumed.reasons == {"trained": 2, "zero_std": 1}


def test_a_fresh_start_in_a_used_folder_voids_everything(tmp_path):
    path = tmp_path / "ledger.jsonl"
    first = Ledger(path)
    first.start("first", None)
    first.ready(7, 1)
    first.close()
    Ledger(path).start("second", None)
    assert replay(path) == {}


def test_half_a_line_that_a_full_disk_left_is_no_line(tmp_path):
    path = tmp_path / "ledger.jsonl"
    ledger = Ledger(path)
    ledger.start("first", None)
    ledger.trained(0, 3, step=1)
    state = ledger.state()
    ledger.close()
    with path.open("a") as file:
        file.write('{"event": "rea')
    resumed = Ledger(path)
    resumed.start("second", state)
    resumed.ready(1, 5)
    assert resumed.state()["num_lines"] == 4
    assert {group: (e["ready"], e["trained"]) for group, e in replay(path).items()} == {0: (0, 3), 1: (5, 0)}


def test_an_epoch_without_a_group_to_train_is_hopeless_also_beside_samples_that_wait_for_their_step(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.start("run", None)
    ledger.ready(0, 8)
    for group_id in range(1, 1024):
        ledger.dropped(group_id, "zero_std")
    assert not ledger.is_hopeless(7, has_samples=True)  # a small data set: luck may still fill the step
    assert ledger.is_hopeless(7, has_samples=False)
    ledger.dropped(1024, "zero_std")
    assert ledger.is_hopeless(7, has_samples=True)
    assert not ledger.is_hopeless(1025, has_samples=True)
    ledger.ready(1025, 8)
    assert not ledger.is_hopeless(7, has_samples=True)
    ledger.close()


def test_data_without_a_length_are_hopeless_too_after_many_groups(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.start("run", None)
    for group_id in range(8191):
        ledger.dropped(group_id, "zero_std")
    assert not ledger.is_hopeless(None, has_samples=False)
    ledger.dropped(8191, "zero_std")
    assert ledger.is_hopeless(None, has_samples=False) and ledger.is_hopeless(None, has_samples=True)
    ledger.close()


def test_groups_that_give_nothing_are_said_in_powers_of_two(tmp_path):
    ledger, told = Ledger(tmp_path / "ledger.jsonl"), []
    ledger.start("run", None)
    for group in range(300):
        ledger.dropped(group, "timeout" if group % 3 == 0 else "zero_std")
        if ledger.barren() not in told:
            told.append(ledger.barren())
    why = "zero_std: the rewards within each group are equal"
    assert told == ["", *(f": {count} groups in a row gave none ({why})" for count in (64, 128, 256))]
    ledger.ready(300, 1)
    assert ledger.barren() == ""


def test_window_is_the_mean_of_the_last_steps_times_staleness():
    credit = AdmissionCredit(max_staleness=4, window_steps=2, first_window_tokens=100_000)
    assert credit.limit_tokens() == 400_000  # STA-4
    assert credit.limit_tokens(sharing=3.5) == 1_400_000
    for used in (10, 30, 50):
        credit.step_used(used)
    assert credit.limit_tokens(sharing=3.5) == 4 * 40
    assert AdmissionCredit(0, 1, 100).limit_tokens() == 100  # max(staleness, 1)
