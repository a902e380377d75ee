"""One rollout in one place below the cap: whatever goes wrong in it becomes its own typed failure (GEN-13)."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from agrpo.errors import AgrpoError, RolloutFailure, ServerError
from agrpo.rollout.concurrency import Places
from agrpo.rollout.evaluating import Asked
from agrpo.rollout.failures import NO_ERRORS, Failures
from agrpo.rollout.staleness import STALE, Running, VersionWindow
from agrpo.types import Prompt, Rollout

_log = logging.getLogger(__name__)


class Slots:
    """Plays rollouts below the cap and knows which are in flight."""

    def __init__(
        self,
        player: Any,
        client: Any,
        places: Places,
        failures: Failures,
        aborts_on_error: bool,
        window: VersionWindow | None = None,
        dates_by_group: bool = False,
        pin: Callable[..., Any] = lambda generate, version: generate,
    ):
        """`pin` is called once per rollout, at its start, and gives what the rollout generates with; its second argument
        is the version to stay with, None the newest.

        `window`: rollouts that have left it are given up; `dates_by_group`: their group's version counts for it."""
        self._player, self._client, self._places, self._failures = player, client, places, failures
        self._aborts_on_error, self._window, self._dates_by_group = aborts_on_error, window, dates_by_group
        self._pin = pin
        self.in_flight: dict[tuple[int, int], Running] = {}  # by group id and slot

    async def play(
        self,
        prompt: Prompt,
        group_id: int,
        slot: int,
        asked: Asked | None = None,
        prompt_ids: np.ndarray | None = None,
        place: asyncio.Future[None] | None = None,
        on_start: Callable[[], int] | None = None,
        counted: Callable[[Any], Any] = lambda generate: generate,
    ) -> Rollout:
        """The rollout, usable or not. `place` was asked for before; `asked` is what an evaluation wants of it.

        `on_start` is called when the rollout begins and gives its group's version; one without it is never too old.
        `counted` makes of what the rollout generates with one that keeps count.
        """
        running = Running()
        if asked is None:
            await (place or self._places.ask())
        elif not await asked.window.gets(self._places.ask(is_first=True)):
            return _unusable(STALE, asked.window.text(running), running)
        self.in_flight[group_id, slot] = running
        generate = counted(self._generate(asked, running, on_start))
        try:
            rollout = await self._player.play(prompt, generate, group_id, slot, prompt_ids)
        except RolloutFailure as failure:
            rollout = _unusable(failure.reason, failure.text, running)
        except AgrpoError:
            raise
        except Exception as error:
            _log.debug("rollout %d.%d raised", group_id, slot, exc_info=True)
            rollout = _unusable("error", f"{type(error).__name__}: {error}", running)
        finally:
            del self.in_flight[group_id, slot]
            self._places.give_back()
        if running.is_given_up and rollout.failure != STALE:
            # Whatever the player made of the request that was taken back, the rollout is not whole.
            rollout = _unusable(STALE, running.window.text(running), running)
        if rollout.failure is not None and rollout.failure not in NO_ERRORS and self._aborts_on_error:
            text = f"rollout {group_id}.{slot} failed ({rollout.failure}) and rollout.on_error=abort"
            raise ServerError(f"{text}: {rollout.failure_text}")
        self._failures.count(rollout)
        return rollout

    def _generate(self, asked: Asked | None, running: Running, on_start: Callable[[], int] | None) -> Any:
        """What a rollout that begins now generates with."""
        if asked is not None:
            running.window = asked.window
            return running.watched(self._pin(asked.of(self._client.generate), asked.window.asked_at), asked.window)
        generate = self._pin(self._client.generate, None)
        if on_start is None:
            return generate
        group_version = on_start()
        if self._window is None:
            return generate
        running.window = self._window
        running.group_version = group_version if self._dates_by_group else None
        return running.watched(generate, self._window)

    def give_up_stale(self) -> None:
        """A new version is served, or an evaluation given up: take back the requests of rollouts that are too old."""
        for running in self.in_flight.values():
            if running.window is not None and running.window.is_over(running):
                running.give_up()

    def oldest_text(self) -> str:
        """The rollout that has been in flight longest, in words."""
        if not self.in_flight:
            return "none in flight"
        (group_id, slot), oldest = min(self.in_flight.items(), key=lambda item: item[1].began)
        since_s = time.monotonic() - oldest.began
        return f"{len(self.in_flight)} in flight, the oldest is {group_id}.{slot} for {since_s:.0f} s"


def _unusable(reason: str, text: str, running: Running) -> Rollout:
    return Rollout((), [], failure=reason, failure_text=text, duration_s=time.monotonic() - running.began)
