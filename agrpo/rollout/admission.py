"""When a new group may start: staleness credit in raw forwarded tokens, as absolute counters (STA-4 to STA-12).

    held = sent - taken              scored samples the trainer has not used yet
         + finished                  rollouts that wait for their group, for scoring or for sending
         + estimate * unfinished     slots of started groups, at the mean of the last 256 finished rollouts

Counters only grow and each side publishes its own, so that no message can be lost between them and drops need no
message at all: what is never sent is never counted.
"""

from __future__ import annotations

import collections
from dataclasses import dataclass, field


@dataclass(slots=True)
class _Started:
    num_unfinished: int  # slots in flight or not yet started
    tokens: int = 0  # raw forwarded tokens of its finished rollouts


@dataclass(slots=True)
class Admission:
    """The gate before a new group; no clock, no I/O."""

    group_size: int
    limit_tokens: int  # what may be held
    taken_tokens: int = 0  # left the trainer's queue
    pulled_tokens: int = 0  # seen by the trainer's planner; what it holds in an open step is not queued any more
    gate_closed: bool = False  # the trainer asks for no new group until its sync is complete (STA-14)
    sent_tokens: int = 0
    _groups: dict[int, _Started] = field(default_factory=dict)
    _recent: collections.deque[int] = field(default_factory=lambda: collections.deque(maxlen=256))
    _recent_tokens: int = 0
    _has_finished_group: bool = False

    @property
    def estimate(self) -> float:
        """Expected raw forwarded tokens of a rollout that is not finished (STA-9); 0 before the first one is."""
        return self._recent_tokens / len(self._recent) if self._recent else 0.0

    @property
    def held_tokens(self) -> float:
        unfinished = sum(g.num_unfinished for g in self._groups.values())
        finished = sum(g.tokens for g in self._groups.values())
        return self.sent_tokens - self.taken_tokens + finished + unfinished * self.estimate

    @property
    def num_open_groups(self) -> int:
        """Groups in flight, waiting for scoring or being scored."""
        return len(self._groups)

    def may_start(self) -> bool:
        """Whether a new group may start now."""
        if self.gate_closed:
            return False
        if not self._groups and self.sent_tokens <= self.pulled_tokens:
            return True  # nothing queued or in flight: a group larger than the limit must not stop the run (STA-11)
        if not self._has_finished_group:
            return not self._groups  # no estimate yet: one at a time (STA-9)
        return self.held_tokens < self.limit_tokens

    def start(self, group_id: int) -> None:
        self._groups[group_id] = _Started(self.group_size)

    def finish_rollout(self, group_id: int, tokens: int | None) -> None:
        """A slot of a started group ended: `tokens` raw forwarded tokens, None for an unusable rollout."""
        group = self._groups[group_id]
        group.num_unfinished -= 1
        if tokens is not None:
            group.tokens += tokens
            if len(self._recent) == self._recent.maxlen:
                self._recent_tokens -= self._recent[0]
            self._recent.append(tokens)
            self._recent_tokens += tokens
        self._has_finished_group |= group.num_unfinished == 0 and bool(self._recent)

    def drop(self, group_id: int) -> None:
        """The group ends here; its tokens are given back at once (STA-12)."""
        del self._groups[group_id]

    def send(self, group_id: int, tokens: int) -> None:
        """The group goes to the trainer with `tokens` raw forwarded tokens, which its counters give back."""
        del self._groups[group_id]
        self.sent_tokens += tokens

    def credit(self, taken_tokens: int, pulled_tokens: int, limit_tokens: int, gate_closed: bool) -> None:
        """The trainer's counters. An older message than the last one changes nothing but the limit and the gate."""
        self.taken_tokens = max(self.taken_tokens, taken_tokens)
        self.pulled_tokens = max(self.pulled_tokens, pulled_tokens)
        self.limit_tokens, self.gate_closed = limit_tokens, gate_closed
