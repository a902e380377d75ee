"""Callbacks of the user: called with what is documented, followed, restored, and named when they go wrong."""

from __future__ import annotations

import types

import pytest

from agrpo.errors import ContractError
from agrpo.train.callbacks import EVENTS, NoCallbacks, open_callbacks, problems
from tests.train import callback_samples as samples

PLACE = "tests.train.callback_samples."


class OneRank:
    """The only rank, or the first of two of which the other one's flag is `other`."""

    is_first, world_size = True, 1

    def __init__(self, other: bool = False):
        self.other = other

    def any(self, flag: bool) -> bool:
        return flag or self.other

    def tell(self, number: int) -> int:
        return number


def make(*names: str, ranks=None, state_dicts=None):
    config = types.SimpleNamespace(
        run=types.SimpleNamespace(callbacks=[PLACE + name for name in names], max_steps=7),
        logger=types.SimpleNamespace(logging_steps=1),
        checkpoint=types.SimpleNamespace(save_steps=500),
    )
    samples.CALLS.clear()
    shared = {"model": 1, "processing_class": 2, "optimizer": 3, "lr_scheduler": 4}
    return open_callbacks(config, ranks or OneRank(), state_dicts or {}, **shared)


def test_a_callback_for_transformers_gets_each_event_and_is_followed(monkeypatch):
    monkeypatch.setattr(samples.Recorder, "save_at", 3)
    monkeypatch.setattr(samples.Recorder, "stop_at", 4)
    callbacks = make("Recorder")
    callbacks.call("on_train_begin", 2)
    for step in (3, 4):
        callbacks.call("on_sync", step, version=step + 10)
        callbacks.logged(step, {"step": step, "reward": 0.5, "epoch": step / 8, **({"eval/held/reward": 1.0} if step == 4 else {})})
        callbacks.call("on_step_end", step)
        assert callbacks.take_save() == (step == 3) and callbacks.stops == (step == 4)
    assert samples.CALLS == [
        ("begin", 2, ["lr_scheduler", "model", "optimizer", "processing_class"], 7),
        ("sync", 13),
        ("log", 3, {"reward": 0.5, "epoch": 0.375}),
        ("step", 3, True),
        ("sync", 14),
        ("log", 4, {"reward": 0.5, "epoch": 0.5, "eval/held/reward": 1.0}),
        ("evaluate", {"eval/held/reward": 1.0}),
        ("step", 4, True),
    ]


def test_a_function_is_called_at_every_event_with_its_name():
    callbacks = make("note")
    for event in EVENTS:
        callbacks.call(event, 1)
    assert samples.CALLS == [("note", event) for event in EVENTS]


def test_a_state_goes_into_the_checkpoint_and_comes_back():
    callbacks = make("Counter", "note")
    for step in range(1, 6):
        callbacks.call("on_step_end", step)
    states = callbacks.state_dicts()
    assert states == {PLACE + "Counter": {"count": 5}}
    resumed = make("Counter", state_dicts=states)
    resumed.call("on_step_end", 6)
    assert resumed.state_dicts() == {PLACE + "Counter": {"count": 6}}
    with pytest.raises(ContractError, match=r"Set, state_dict, which must give what JSON can hold, raised TypeError"):
        make("Set").state_dicts()
    broken = make("Set")
    assert broken.kept_states() == {}  # the checkpoint comes first
    with pytest.raises(ContractError, match="Set, state_dict"):
        broken.call("on_save", 1)


def test_an_error_is_named_where_all_ranks_meet():
    callbacks = make("Broken")
    callbacks.logged(3, {"step": 3, "reward": 0.5})  # rank 0 alone: the others would wait for it
    with pytest.raises(ContractError, match=r"run.callbacks: \S+Broken, on_log raised KeyError: 'rewards'"):
        callbacks.call("on_step_end", 3)
    with pytest.raises(ContractError, match="another rank"):
        make("note", ranks=OneRank(other=True)).call("on_step_end", 3)
    with pytest.raises(ContractError, match="NeedsArgument, without arguments raised TypeError"):
        make("NeedsArgument")


def test_what_would_never_be_called_is_refused():
    (line,) = problems([PLACE + "Nothing", PLACE + "note", PLACE + "Counter"])
    assert line.startswith(f"run.callbacks: {PLACE}Nothing is no function and has none of the methods on_train_begin")


def test_a_run_without_callbacks_has_nothing_to_call():
    callbacks = make()
    assert isinstance(callbacks, NoCallbacks) and not callbacks.stops and not callbacks.take_save()
