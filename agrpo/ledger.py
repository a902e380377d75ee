"""Which groups are done, and what may be held: the resolved set, the event log that proves it, and the admission credit.

A group is resolved once: trained (its first sample), dropped, filtered or skipped (RUN-3). Resume continues the exact
set: everything not resolved, and not among the samples saved with the checkpoint, is generated again (RES-2, RES-4).
`ledger.jsonl` holds one line per event; a resume voids the lines written after its checkpoint, so that replaying the
file gives what the surviving weights were trained on.
"""

from __future__ import annotations

import bisect
import collections
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

HOPELESS_GROUPS = 1024  # in a row without a sample
EPOCH_OF_A_STREAM = 8192  # prompts that count as an epoch where the data have no length


class Intervals:
    """A set of non-negative integers as sorted disjoint half-open intervals: {0, 1, 2, 5} is [(0, 3), (5, 6)]."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()):
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(intervals):
            if self._ends and start <= self._ends[-1]:
                self._ends[-1] = max(self._ends[-1], end)
            else:
                self._starts.append(start)
                self._ends.append(end)

    def __contains__(self, value: int) -> bool:
        at = bisect.bisect_right(self._starts, value) - 1
        return at >= 0 and value < self._ends[at]

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    def add(self, value: int) -> bool:
        """Add one value; false if it was there already."""
        at = bisect.bisect_right(self._starts, value) - 1
        if at >= 0 and value < self._ends[at]:
            return False
        joins_left = at >= 0 and self._ends[at] == value
        joins_right = at + 1 < len(self._starts) and self._starts[at + 1] == value + 1
        if joins_left and joins_right:
            self._ends[at] = self._ends.pop(at + 1)
            self._starts.pop(at + 1)
        elif joins_left:
            self._ends[at] = value + 1
        elif joins_right:
            self._starts[at + 1] = value
        else:
            self._starts.insert(at + 1, value)
            self._ends.insert(at + 1, value + 1)
        return True

    def to_list(self) -> list[tuple[int, int]]:
        return list(zip(self._starts, self._ends, strict=True))


class Ledger:
    """The resolved set of a run and its event log `ledger.jsonl`. Not thread safe: the feeder holds a lock."""

    def __init__(self, path: Path):
        self._path = path
        self.resolved = Intervals()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.untrained_in_a_row = 0  # groups resolved without training since the last trained one (RUN-7)
        self.unready_in_a_row = 0  # groups that brought no sample since the last one that did
        path.parent.mkdir(parents=True, exist_ok=True)
        self._num_lines = _whole_lines(path)
        self._file = path.open("a", buffering=1)

    def start(self, run_id: str, state: dict[str, Any] | None) -> None:
        """Open a run: fresh (`state` None voids every earlier line), or from the `state` saved with a checkpoint."""
        if state is not None:
            self.resolved = Intervals(tuple(x) for x in state["resolved"])
            self.reasons = collections.Counter(state["reasons"])
            self.untrained_in_a_row = state["untrained_in_a_row"]
        self._write(event="start", run_id=run_id, keep_lines=state["num_lines"] if state else 0)

    def state(self) -> dict[str, Any]:
        """What a checkpoint saves."""
        return {
            "resolved": self.resolved.to_list(),
            "reasons": dict(self.reasons),
            "untrained_in_a_row": self.untrained_in_a_row,
            "num_lines": self._num_lines,
        }

    def ready(self, group_id: int, num_samples: int) -> None:
        self.unready_in_a_row = 0
        self._write(event="ready", group=group_id, samples=num_samples)

    def trained(self, group_id: int, num_samples: int, step: int) -> None:
        """`num_samples` of a group were trained in `step`; the first such call resolves the group."""
        self.untrained_in_a_row = 0
        if self.resolved.add(group_id):
            self.reasons["trained"] += 1
        self._write(event="trained", group=group_id, samples=num_samples, step=step)

    def dropped(self, group_id: int, reason: str, num_samples: int = 0) -> None:
        """A whole group without signal, or `num_samples` of its samples, were discarded for `reason`."""
        if self.resolved.add(group_id):
            self.reasons[reason] += 1
            self.untrained_in_a_row += 1
            self.unready_in_a_row += num_samples == 0
        self._write(event="dropped", group=group_id, reason=reason, samples=num_samples)

    def is_hopeless(self, num_rows: int | None, has_samples: bool) -> bool:
        """A whole epoch gave no group to train (RUN-7). Samples that wait for the rest of their step may still get it from
        a small data set's next epochs, but not after `HOPELESS_GROUPS` groups without any."""
        epoch = EPOCH_OF_A_STREAM if num_rows is None else max(num_rows, 1)
        if not has_samples:
            return self.untrained_in_a_row >= epoch
        return self.unready_in_a_row >= max(epoch, HOPELESS_GROUPS)

    def barren(self) -> str:
        """`: 64 groups in a row gave none (...)`, in powers of two, so that each is said once; "" below 64."""
        count, gone = self.unready_in_a_row, {r: n for r, n in dict(self.reasons).items() if r != "trained"}
        if count < 64 or not gone:
            return ""
        return f": {1 << (count.bit_length() - 1)} groups in a row gave none ({in_words(max(gone, key=gone.get))})"

    def close(self) -> None:
        self._file.close()

    def _write(self, **event: Any) -> None:
        self._file.write(json.dumps(event) + "\n")
        self._num_lines += 1


def _whole_lines(path: Path) -> int:
    """How many lines the file has, without half a line at its end, which a full disk leaves and which goes."""
    text = path.read_bytes() if path.exists() else b""
    if (end := text.rfind(b"\n") + 1) < len(text):
        os.truncate(path, end)
    return text.count(b"\n")


def replay(path: Path) -> dict[int, dict[str, Any]]:
    """What happened to each group under the surviving weights: samples ready, trained and dropped, steps and reasons.

    A `start` line voids the lines after the first `keep_lines` ones before it.
    """
    lines: list[list[dict[str, Any]]] = []  # per file line: the event, or nothing once voided
    for text in path.read_text().splitlines():
        event = json.loads(text)
        if event["event"] == "start":
            for voided in lines[event["keep_lines"] :]:
                voided.clear()
            lines.append([])
        else:
            lines.append([event])
    groups: dict[int, dict[str, Any]] = {}
    for event in (event for line in lines for event in line):
        group = groups.setdefault(
            event["group"], {"ready": 0, "trained": 0, "dropped": 0, "steps": [], "reasons": []}
        )
        group[event["event"]] += event["samples"]
        if event["event"] == "trained":
            group["steps"].append(event["step"])
        elif event["event"] == "dropped":
            group["reasons"].append(event["reason"])
    return groups


class AdmissionCredit:
    """The trainer's half of admission: absolute token counters and the window T (STA-4 to STA-7).

    All counters are in raw forwarded tokens, before sharing, since the rollout process cannot know the packing (STA-5).
    """

    def __init__(
        self, max_staleness: int, window_steps: int, first_window_tokens: int, step_tokens: Iterable[int] = ()
    ):
        """`step_tokens`: of the last steps before a resume."""
        self.taken_tokens = 0
        self.pulled_tokens = 0
        self._factor = max(max_staleness, 1)
        self._first_window_tokens = first_window_tokens
        self._steps: collections.deque[int] = collections.deque(step_tokens, maxlen=window_steps)

    def pulled(self, raw_tokens: int) -> None:
        self.pulled_tokens += raw_tokens

    def taken(self, raw_tokens: int) -> None:
        """Samples left the queue: handed to a step, or dropped."""
        self.taken_tokens += raw_tokens

    def step_used(self, raw_tokens: int) -> None:
        self._steps.append(raw_tokens)

    @property
    def step_tokens(self) -> list[int]:
        """Raw tokens of each step of the window."""
        return list(self._steps)

    def limit_tokens(self, sharing: float = 1.0) -> int:
        """Tokens that may be held. Before the first step every row is taken as full of unique tokens, so the raw tokens
        that fill it are `sharing` (raw / unique seen so far) times as many: without the factor a shared prefix would
        close the gate before the first step can be filled."""
        if self._steps:
            return self._factor * int(sum(self._steps) / len(self._steps))
        return int(self._factor * self._first_window_tokens * max(sharing, 1.0))


def in_words(reason: str) -> str:
    """A reason for which groups are dropped; the one that users meet first is said in words too."""
    return f"{reason}: the rewards within each group are equal" if reason == "zero_std" else reason
