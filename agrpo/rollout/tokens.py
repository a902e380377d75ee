"""What becomes of every token that the servers generate for training.

    generated = in flight + discarded, by reason + sent to the trainer

Counted where an answer arrives, so that the answers of rollouts that fail later are in it. Answers of evaluations are
not, and neither is what a server generated for a request that was taken back before its answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from agrpo.types import ReadyGroup, Turn

UNUSED, LATE = "unused", "late"  # in no trained position of a usable rollout; of a group that has gone


class TokenAccount:
    """The generated tokens of the groups in flight, and the metric events of those that leave."""

    def __init__(self, window: Any):
        self._window = window
        self._held: dict[int, dict[int, int]] = {}  # group id -> slot -> tokens
        self._num_held = self._num_generated = 0

    def counted(
        self, generate: Callable[..., Awaitable[Turn]], group_id: int, slot: int
    ) -> Callable[..., Awaitable[Turn]]:
        """`generate` of one rollout, whose answers are counted."""

        async def ask(*arguments: Any, **options: Any) -> Turn:
            turn = await generate(*arguments, **options)
            self.generated(group_id, slot, len(turn.output_ids))
            return turn

        return ask

    def open(self, group_id: int) -> None:
        """A group whose rollouts begin."""
        self._held[group_id] = {}

    def generated(self, group_id: int, slot: int, count: int) -> None:
        self._num_generated += count
        slots = self._held.get(group_id)
        if slots is None:
            self._discard(LATE, count)
            return
        slots[slot] = slots.get(slot, 0) + count
        self._num_held += count

    def failed(self, group_id: int, slot: int, reason: str) -> None:
        """A rollout is unusable; its group goes on."""
        count = self._held[group_id].pop(slot, 0)
        self._num_held -= count
        self._discard(reason, count)

    def dropped(self, group_id: int, reason: str) -> None:
        """The group ends here."""
        self._discard(reason, self._leave(group_id))

    def sent(self, ready: ReadyGroup) -> None:
        """The group goes to the trainer. Tokens that it trains on without a server's answer, which a user's own code can
        bring, count as generated now."""
        count, trained = self._leave(ready.group_id), ready.num_trained_tokens
        if trained > count:
            self._num_generated += trained - count
        self._discard(UNUSED, max(count - trained, 0))
        self._window.add("tokens/sent", trained)

    def record(self) -> None:
        """What was generated since the last call, and is in flight now; with every message, so that each is balanced."""
        self._window.add("tokens/generated", self._num_generated)
        self._num_generated = 0
        self._window.add("tokens/in_flight", self._num_held)

    def _leave(self, group_id: int) -> int:
        count = sum(self._held.pop(group_id).values())
        self._num_held -= count
        return count

    def _discard(self, reason: str, count: int) -> None:
        if count:
            self._window.add(f"tokens/discarded/{reason}", count)
