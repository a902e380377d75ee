"""Who is silent, and whether the run as a whole still gets anywhere; by this machine's monotonic clock only.

    one process    its last sign of life is older than its limit: it hangs, is stopped, or never started
    all of them    everybody beats, nobody works: no answer, scored group, step or sync for `rollout.progress_timeout`

The second is what each process for itself cannot see: the trainer waits for samples while the rollout process waits for
the trainer. The rollout process has a watch of its own with the same limit, and a moment to speak first: it knows more.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from agrpo.launch import diagnosis
from agrpo.launch.processes import Child

STARTUP_S = 300.0  # a process may import for so long before its first sign of life (ARCH-6)
LOADING_S = 1800.0  # a dataset may be fetched and read, a model read, for so long; nothing can be told meanwhile
OPENING = {"starting": STARTUP_S, "loading data and tokenizer": LOADING_S, "loading the model": LOADING_S}
CONNECTING = "connecting to the trainer"  # may last as long as loading a model; `wire.connect` keeps the time
PERMITTED = "waiting for the server"  # `server.timeout` keeps the time
FIRST_WORD_S = 2.0  # and a tenth of the limit: for the rollout process to say itself what it waits for
DONE = {"answers": "answer of a server", "scored": "scored group", "steps": "training step", "syncs": "weight sync"}


class Watchdog:
    """`look` at every turn of the supervisor's loop; raises StallError."""

    def __init__(self, run: Any, rollout: Any):
        """`run` and `rollout` are those sections."""
        self._rank_limit = (run.collective_timeout, "run.collective_timeout")
        self._rollout_limit = (rollout.worker_timeout, "rollout.worker_timeout")
        self._limit_s = rollout.progress_timeout or float("inf")
        self._counts: dict[str, int] = {}
        self._counted_at: dict[str, float] = {}
        self._progress_at = time.monotonic()

    def look(self, trainers: Sequence[Child], rollout: Child | None, children: list[Child]) -> None:
        beats = [child.beat() for child in trainers]
        for child, beat in zip(trainers, beats, strict=True):
            self._look_at(child, beat, *self._rank_limit, children)
        if rollout is None:
            return
        beats.append(rollout.beat())
        if (beats[-1] or {}).get("phase") != CONNECTING:
            self._look_at(rollout, beats[-1], *self._rollout_limit, children)
        self._look_at_all([beat or {} for beat in beats], children)

    def _look_at(self, child: Child, beat: dict[str, Any] | None, limit: float, key: str, children: list[Child]) -> None:
        if child.code is not None:
            return
        silent_s = time.monotonic() - (beat["at"] if beat else child.started_at)
        allowed = max(limit, OPENING.get(beat["phase"] if beat else "starting", 0.0))
        if silent_s > allowed:
            raise diagnosis.silent(child, silent_s, allowed, key, children)

    def _look_at_all(self, beats: list[dict[str, Any]], children: list[Child]) -> None:
        now = time.monotonic()
        for name in DONE:
            count = sum(beat.get("done", {}).get(name, 0) for beat in beats)
            if count != self._counts.get(name):
                self._counts[name], self._counted_at[name], self._progress_at = count, now, now
        if not all(_only_waits(beat) for beat in beats):
            self._progress_at = now  # a working process has a limit of its own
        silent_s = now - self._progress_at
        if silent_s > self._limit_s + max(FIRST_WORD_S, self._limit_s / 10):
            raise diagnosis.stuck(silent_s, self._limit_s, self._since(now), children)

    def _since(self, now: float) -> str:
        """How long ago each kind of progress was, in words."""
        return ", ".join(
            f"the last {what} {now - self._counted_at[name]:.0f} s ago" if self._counts[name] else f"no {what} yet"
            for name, what in DONE.items()
        )


def _only_waits(beat: dict[str, Any]) -> bool:
    """A trainer that loads, trains, syncs or saves works; the rollout process waits for somebody once it has begun."""
    phase = beat.get("phase", "")
    if phase == PERMITTED or phase in OPENING:
        return False
    return beat.get("process") == "rollout" or phase.startswith("waiting")
