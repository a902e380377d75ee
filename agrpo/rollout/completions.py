"""`completions.jsonl`: what was asked, answered and rewarded, one line per rollout of every scored group (LOG-7)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from agrpo.types import Group


class CompletionLog:
    """Appends to one file; lines are whole whenever somebody reads it."""

    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1, encoding="utf-8")

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
            self._file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")

    def close(self) -> None:
        self._file.close()
