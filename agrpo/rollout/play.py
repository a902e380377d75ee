"""One rollout in one place below the cap: whatever goes wrong in it becomes its own typed failure (GEN-13)."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from agrpo.errors import AgrpoError, RolloutFailure, ServerError
from agrpo.rollout.concurrency import Places
from agrpo.rollout.failures import Failures
from agrpo.types import Prompt, Rollout

_log = logging.getLogger(__name__)


class Slots:
    """Plays rollouts below the cap and knows which are in flight."""

    def __init__(self, player: Any, client: Any, places: Places, failures: Failures, aborts_on_error: bool):
        self._player, self._client, self._places, self._failures = player, client, places, failures
        self._aborts_on_error = aborts_on_error
        self.in_flight: dict[tuple[int, int], float] = {}  # group id and slot -> time.monotonic() at its start

    async def play(
        self,
        prompt: Prompt,
        group_id: int,
        slot: int,
        temperature: float | None = None,
        prompt_ids: np.ndarray | None = None,
        place: asyncio.Future[None] | None = None,
        on_start: Callable[[], None] | None = None,
    ) -> Rollout:
        """The rollout, usable or not. `place` was asked for before; `on_start` is called when the rollout begins."""
        await (place or self._places.ask())
        if on_start is not None:
            on_start()
        began = self.in_flight[group_id, slot] = time.monotonic()
        generate = functools.partial(self._client.generate, temperature=temperature)
        try:
            rollout = await self._player.play(prompt, generate, group_id, slot, prompt_ids)
        except RolloutFailure as failure:
            rollout = _unusable(failure.reason, failure.text, began)
        except AgrpoError:
            raise
        except Exception as error:
            _log.debug("rollout %d.%d raised", group_id, slot, exc_info=True)
            rollout = _unusable("error", f"{type(error).__name__}: {error}", began)
        finally:
            del self.in_flight[group_id, slot]
            self._places.give_back()
        if rollout.failure is not None and self._aborts_on_error:
            text = f"rollout {group_id}.{slot} failed ({rollout.failure}) and rollout.on_error=abort"
            raise ServerError(f"{text}: {rollout.failure_text}")
        self._failures.count(rollout)
        return rollout

    def oldest_text(self) -> str:
        """The rollout that has been in flight longest, in words."""
        if not self.in_flight:
            return "none in flight"
        (group_id, slot), since = min(self.in_flight.items(), key=lambda item: item[1])
        return f"{len(self.in_flight)} in flight, the oldest is {group_id}.{slot} for {time.monotonic() - since:.0f} s"


def _unusable(reason: str, text: str, began: float) -> Rollout:
    return Rollout((), [], failure=reason, failure_text=text, duration_s=time.monotonic() - began)
