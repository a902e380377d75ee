"""The trainer's own log-probs of each sample it trained, beside the trajectory dump, for `agrpo view`.

    RUN/trained/rank-0.jsonl   {"step": 3, "task_id": 42, "rollout_id": 1, "row": 2718281828, "trainer_logprobs": [..]}

Each rank writes its own samples. `row` tells rows of one rollout apart: the CRC-32 of the trained token ids as int32.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch


class Trace:
    """Appends one line per sample and step."""

    def __init__(self, run_dir: Path, rank: int):
        path = run_dir / "trained" / f"rank-{rank}.jsonl"
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("a", buffering=1, encoding="utf-8")
        self._rows: list[tuple[Any, torch.Tensor]] = []

    def add(self, row: Any, terms: Any) -> None:
        """One row as it was forwarded; `terms` are its loss terms, which stay on the device."""
        self._rows.append((row, terms.trainer_logprobs.detach()))

    def write(self, step: int) -> None:
        """The lines of the rows of `step`; waits for the device."""
        rows, self._rows = self._rows, []
        for row, logprobs in rows:
            self._write_row(step, row, logprobs.float().cpu().numpy())

    def _write_row(self, step: int, row: Any, logprobs: np.ndarray) -> None:
        order = np.lexsort((row.predicting_index, row.sample_index))
        ends = np.cumsum(np.bincount(row.sample_index, minlength=len(row.group_ids)))
        for sample, places in enumerate(np.split(order, ends[:-1])):
            line = {
                "step": step,
                "task_id": int(row.group_ids[sample]),
                "rollout_id": int(row.rollout_indices[sample]),
                "row": row_digest(row.target_ids[places]),
                "trainer_logprobs": [round(float(v), 6) for v in logprobs[places]],
            }
            self._file.write(json.dumps(line) + "\n")


def row_digest(trained_ids: np.ndarray) -> int:
    """What tells rows of one rollout apart: the CRC-32 of the trained ids as int32."""
    return zlib.crc32(trained_ids.astype(np.int32).tobytes())


class NoTrace:
    """Where no dump is asked for."""

    def add(self, row: Any, terms: Any) -> None:
        pass

    def write(self, step: int) -> None:
        pass
