"""The trajectory dump: every finished group as a JSONL file, one line per training row (AREAL-WF-24 to 36).

    {fileroot}/{experiment_name}/{trial_name}/{rollout|eval-rollout}/{version}/{task_id}.jsonl

`version` is the newest version among the group's rows. Writing happens in a thread of its own and never fails a rollout:
what cannot be written is a warning.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from agrpo.env.joined import rows
from agrpo.types import Group, Rollout, Turn

_log = logging.getLogger(__name__)
_SHOWN_EVERY = 100  # after the first, of equal warnings


class Dump:
    """Appends to files below one folder; `keep_versions` limits how many version folders stay (null = all)."""

    def __init__(self, folder: Path, tokenizer: Any, keep_versions: int | None = None):
        self._folder, self._tokenizer, self._keep = folder, tokenizer, keep_versions
        self._thread = ThreadPoolExecutor(1, "dump")
        self._num_failed = 0

    async def write(
        self, group: Group, *, dropped: str | None = None, advantages: Any = None, is_eval: bool = False
    ) -> None:
        """One group; `dropped` is why it is not trained, `advantages` [rows of its usable rollouts] where known."""
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._thread, self._write, group, dropped, advantages, is_eval)

    def close(self) -> None:
        self._thread.shutdown()

    def _write(self, group: Group, dropped: str | None, advantages: Any, is_eval: bool) -> None:
        try:
            lines = list(records(group, self._tokenizer, dropped, advantages))
            if not lines:
                return
            scope = self._folder / ("eval-rollout" if is_eval else "rollout")
            newest = max(line["tail_version"] for line in lines)
            folder = scope / str(newest if newest >= 0 else group.version)
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"{group.group_id}.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False, default=_plain) + "\n" for line in lines)
            if is_new and self._keep is not None:
                self._rotate(scope)
        except Exception as error:
            if self._num_failed % _SHOWN_EVERY == 0:
                _log.warning(
                    "group %d was not dumped to %s: %s: %s", group.group_id, self._folder, type(error).__name__, error
                )
            self._num_failed += 1

    def _rotate(self, scope: Path) -> None:
        """Only the newest versions stay."""
        folders = sorted((p for p in scope.iterdir() if p.name.isdigit()), key=lambda p: int(p.name))
        for old in folders[: -self._keep]:
            shutil.rmtree(old)


def records(
    group: Group, tokenizer: Any, dropped: str | None = None, advantages: Any = None
) -> Iterator[dict[str, Any]]:
    """One object per row of the usable rollouts, in slot order."""
    number = first = 0  # of the row among the group's rows, and of the rollout's first advantage
    for slot, rollout in enumerate(group.rollouts):
        if rollout.failure is not None:
            continue
        played = rows(rollout)
        # All rows of an ordinary rollout share one reward and one advantage.
        is_ordinary = rollout.row_offsets is None
        for at, row in enumerate(played):
            offset = 0.0 if is_ordinary else float(rollout.row_offsets[at])
            advantage = None if advantages is None else advantages[first + (0 if is_ordinary else at)]
            yield {
                "task_id": group.group_id,
                "sample_idx": number,
                "rollout_id": slot,
                **_row(row, tokenizer),
                "reward": _number(rollout.reward + offset),
                **_more(rollout, offset),
                "advantage": _number(advantage),
                "dropped": dropped,
            }
            number += 1
        first += 1 if is_ordinary else len(played)


def _more(rollout: Rollout, offset: float) -> dict[str, Any]:
    """What the reward consists of, and what the rollout's player adds to the record."""
    found: dict[str, Any] = {"rewards": {name: _number(value) for name, value in rollout.rewards.items()}}
    if offset:
        found["rollout_reward"] = _number(rollout.reward)
    if "original_reward" in rollout.extras:
        found["original_reward"] = _number(rollout.extras["original_reward"])
    return found


def _row(row: Turn, tokenizer: Any) -> dict[str, Any]:
    token_ids = np.concatenate([row.prompt_ids, row.output_ids])
    mask = np.concatenate([np.zeros(len(row.prompt_ids), np.bool_), row.output_mask])
    if len(mask) != len(token_ids):
        raise ValueError(f"{len(mask)} mask values for {len(token_ids)} tokens")
    versions, trained = row.versions[row.output_mask], np.flatnonzero(mask)
    start = int(trained[0]) if len(trained) else len(token_ids)
    pieces = _runs(mask)
    found = {
        "seqlen": len(token_ids),
        "prompt_len": start,
        "head_version": int(versions.min()) if len(versions) else -1,
        "tail_version": int(versions.max()) if len(versions) else -1,
        "version_rle": [[int(value), count] for value, count, _ in _runs(versions)],
        "prompt": tokenizer.decode(token_ids[:start]),
        "completion": tokenizer.decode(token_ids[start:]),
        "token_ids": token_ids.tolist(),
        "mask_rle": [[int(value), count] for value, count, _ in pieces],
        "sampler_logprobs": [round(float(v), 6) for v in row.sampler_logprobs[row.output_mask]],
    }
    if sum(bool(value) for value, _, _ in pieces) >= 2:
        found["segments"] = [
            {
                "role": "gen" if is_trained else "prompt" if at == 0 else "context",
                "len": count,
                "text": tokenizer.decode(token_ids[at : at + count]),
            }
            for is_trained, count, at in pieces
        ]
    return found


def _runs(values: np.ndarray) -> list[tuple[Any, int, int]]:
    """(value, length, start) of the runs of equal values: 5 5 6 gives (5, 2, 0), (6, 1, 2)."""
    if not len(values):
        return []
    starts = np.concatenate([[0], np.flatnonzero(values[1:] != values[:-1]) + 1])
    lengths = np.diff(np.concatenate([starts, [len(values)]]))
    return [(values[s], int(n), int(s)) for s, n in zip(starts, lengths, strict=True)]


def _number(value: Any) -> float | None:
    return None if value is None or not np.isfinite(value) else float(value)


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
