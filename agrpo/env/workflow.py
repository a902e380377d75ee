"""What a user subclasses to define an episode at the level of token tensors (AREAL-WF-1)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class RolloutWorkflow(ABC):
    """One call of `arun_episode` is one episode and one rollout of a group."""

    @abstractmethod
    async def arun_episode(self, engine: Any, data: dict[str, Any]) -> dict[str, Any] | None:
        """A tensor dictionary, a dictionary of interactions, or None to reject the episode."""
