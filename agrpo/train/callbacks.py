"""The user's trainer callbacks (`run.callbacks`): what is called when, and what a callback may ask for.

A class is called as transformers calls a TrainerCallback, `method(args, state, control, **kwargs)`, and needs only the
methods it wants; a function is called at every event, with the event's name first. `args` is the run's configuration,
`state` a TrainerState, `control` a TrainerControl, of which `should_training_stop` and `should_save` are followed.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

from agrpo.config import locate
from agrpo.errors import ConfigError, ContractError

EVENTS = (
    "on_train_begin", "on_step_begin", "on_sync", "on_log", "on_evaluate", "on_step_end", "on_save", "on_train_end",
)  # fmt: skip
FIRST_RANK_ONLY = ("on_log", "on_evaluate")  # what they are given exists nowhere else
HISTORY = 100  # records in `state.log_history`, the newest


class NoCallbacks:
    """A run without any."""

    stops = False

    def call(self, event: str, step: int, **given: Any) -> None:
        pass

    def logged(self, step: int, record: dict[str, Any]) -> None:
        pass

    def take_save(self) -> bool:
        return False

    def kept_states(self) -> dict[str, Any]:
        return {}


class Callbacks:
    """All of them, in the order of the list, on every rank; what those of rank 0 ask for holds for all ranks."""

    def __init__(self, config: Any, ranks: Any, state_dicts: dict[str, Any], **shared: Any):
        """`shared` goes to every call: model, processing_class, optimizer, lr_scheduler. `state_dicts`: of a checkpoint."""
        from transformers import TrainerControl, TrainerState

        self._ranks, self._config, self._shared = ranks, config, shared
        self._fault: ContractError | None = None  # of an event of rank 0, until all ranks meet at the next one
        self._named = [(path, _made(path)) for path in config.run.callbacks]
        self._control_class, self._control = TrainerControl, TrainerControl()
        self._state = TrainerState(
            max_steps=config.run.max_steps or -1,
            logging_steps=config.logger.logging_steps,
            save_steps=config.checkpoint.save_steps,
            is_local_process_zero=ranks.is_first,
            is_world_process_zero=ranks.is_first,
        )
        for path, callback in self._named:
            if path in state_dicts and hasattr(callback, "load_state_dict"):
                _calling(path, "load_state_dict", callback.load_state_dict, state_dicts[path])

    @property
    def stops(self) -> bool:
        """Whether a callback asks for the end of the run."""
        return self._control.should_training_stop

    def call(self, event: str, step: int, **given: Any) -> None:
        """Call every callback that has `event`, `step` steps being done; on all ranks alike, but for `FIRST_RANK_ONLY`.

        Where a callback raised on one rank, all ranks raise ContractError at the next event that all of them have.
        """
        self._state.global_step = step
        try:
            self._call(event, given)
        except ContractError as error:
            self._fault = self._fault or error
        if event not in FIRST_RANK_ONLY and self._ranks.any(self._fault is not None):
            raise self._fault or ContractError("run.callbacks: one raised on another rank, whose log names it")

    def _call(self, event: str, given: dict[str, Any]) -> None:
        for path, callback in self._named:
            method = getattr(callback, event, None)
            if method is not None:
                returned = _calling(
                    path, event, method, self._config, self._state, self._control, **self._shared, **given
                )
                if isinstance(returned, self._control_class):
                    self._control = returned

    def logged(self, step: int, record: dict[str, Any]) -> None:
        """Rank 0 has written `record`."""
        logs = {name: value for name, value in record.items() if name != "step"}
        self._state.log_history = [*self._state.log_history, {**logs, "step": step}][-HISTORY:]
        self._state.epoch = record.get("epoch", self._state.epoch)
        self.call("on_log", step, logs=logs)
        metrics = {name: value for name, value in logs.items() if name.startswith("eval/")}
        if metrics:
            self.call("on_evaluate", step, metrics=metrics)

    def take_save(self) -> bool:
        """Whether a callback of rank 0 asks for a checkpoint now; collective."""
        wanted, self._control.should_save = self._control.should_save, False
        return bool(self._ranks.tell(wanted))

    def state_dicts(self) -> dict[str, Any]:
        """What a checkpoint keeps: the `state_dict()` of each callback that has one, by its path."""
        found = {}
        for path, callback in self._named:
            if hasattr(callback, "state_dict"):
                found[path] = _calling(path, "state_dict", callback.state_dict)
                _calling(path, "state_dict, which must give what JSON can hold,", json.dumps, found[path])
        return found

    def kept_states(self) -> dict[str, Any]:
        """`state_dicts`, or {} where one fails: the checkpoint is written first, and the next event raises on all ranks."""
        try:
            return self.state_dicts()
        except ContractError as error:
            self._fault = self._fault or error
            return {}


def open_callbacks(config: Any, ranks: Any, state_dicts: dict[str, Any], **shared: Any) -> Callbacks | NoCallbacks:
    return Callbacks(config, ranks, state_dicts, **shared) if config.run.callbacks else NoCallbacks()


class _Function:
    """A plain function, called at every event with the event's name."""

    def __init__(self, function: Callable[..., Any]):
        self._function = function

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in EVENTS:
            raise AttributeError(name)
        return lambda *arguments, **given: self._function(name, *arguments, **given)


def _made(path: str) -> Any:
    """The callback at an import path: an instance of a class, the object itself, or a function."""
    found = locate(path)
    if inspect.isclass(found):
        return _calling(path, "without arguments", found)
    return _Function(found) if inspect.isroutine(found) else found


def _calling(path: str, what: str, method: Callable[..., Any], *arguments: Any, **given: Any) -> Any:
    """What the user's code raises is an error of its own kind, with the callback's name."""
    try:
        return method(*arguments, **given)
    except Exception as error:
        raise ContractError(f"run.callbacks: {path}, {what} raised {type(error).__name__}: {error}") from error


def problems(paths: list[str]) -> list[str]:
    """Callbacks that would never be called, one line each; import paths that fail are named elsewhere."""
    lines = []
    for path in paths:
        try:
            found = locate(path)
        except ConfigError:
            continue
        if not inspect.isroutine(found) and not any(hasattr(found, event) for event in EVENTS):
            lines.append(f"run.callbacks: {path} is no function and has none of the methods {', '.join(EVENTS)}")
    return lines
