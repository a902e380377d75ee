"""`completions.jsonl`: what was asked, answered and rewarded, one line per rollout of every scored group (LOG-7)."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from agrpo.ledger import Intervals
from agrpo.metrics.sinks import keep_lines
from agrpo.types import Group
from agrpo.wire import Start

_log = logging.getLogger(__name__)


class CompletionLog:
    """Appends to one file; lines are whole whenever somebody reads it. A disk that takes no more costs lines, never the run.

    `keeps`: of which groups an earlier start's lines stay.
    """

    def __init__(self, path: Path, keeps: Callable[[int], bool] = lambda group_id: True):
        try:
            keep_lines(path, lambda line: keeps(line["group"]))
        except OSError as error:
            _log.warning("%s still holds groups that are generated again: %s", path, error)
        self._path, self._is_well = path, True
        self._file = path.open("ab", buffering=0)

    def write(self, group: Group, advantages: np.ndarray | None, dropped: str | None) -> None:
        """The usable rollouts of a group; `dropped` is why it is not trained, None if it is. `advantages` are None where
        they are known only in the step."""
        listed = [None] * len(group.usable) if advantages is None else advantages.tolist()
        usable = [(slot, r) for slot, r in enumerate(group.rollouts) if r.failure is None]
        for (slot, rollout), advantage in zip(usable, listed, strict=True):
            line = {
                "group": group.group_id,
                "slot": slot,
                "version": group.version,
                "prompt": group.prompt.messages if rollout.prompt is None else rollout.prompt,
                "completion": rollout.completion,
                "rewards": rollout.rewards,
                "advantage": advantage,
                "dropped": dropped,
            }
            text = json.dumps(line, ensure_ascii=False, default=str) + "\n"
            self._append(text.encode(errors="replace"), group.group_id)

    def _append(self, line: bytes, group_id: int) -> None:
        size = self._path.stat().st_size if self._path.exists() else 0
        try:
            rest = line
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                self._file.truncate(size)  # no half line in front of the next
            if self._is_well:
                _log.warning("%s lacks rollouts from group %d on: %s", self._path, group_id, error)
            self._is_well = False
        else:
            self._is_well = True

    def close(self) -> None:
        self._file.close()


def surviving(start: Start) -> Callable[[int], bool]:
    """Which groups of an earlier start are not generated again; all, where the checkpoint's numbers are of other data."""
    if start.step and not start.resolved and not start.ready:
        return lambda group_id: True
    return Intervals([*start.resolved, *((g, g + 1) for g in start.ready)]).__contains__
