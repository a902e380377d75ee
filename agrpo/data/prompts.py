"""Group id -> prompt, as a pure function of the data, the seed and the id, so that a resumed run asks the same (DATA-5, 6)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from agrpo.data.rows import Rows, Stream, prompt_fault
from agrpo.errors import ContractError
from agrpo.types import Prompt

REMEMBERED_STREAM_ROWS = 16_384


class Prompts:
    """Prompts of a map-style data set: epoch = group_id // rows, position = group_id % rows."""

    def __init__(self, rows: Rows, shuffle: bool, seed: int):
        self._rows, self._shuffle, self._seed = rows, shuffle, seed
        self._order: tuple[int, np.ndarray] | None = None  # the last epoch asked for and its permutation

    def __len__(self) -> int:
        """Rows per epoch."""
        return len(self._rows)

    def prompt_of(self, group_id: int) -> Prompt:
        epoch, position = divmod(group_id, len(self._rows))
        index = int(self._permutation(epoch)[position]) if self._shuffle else position
        return _prompt(self._rows[index], index, epoch)

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, permutation(len(self._rows), self._seed, epoch))
        return self._order[1]


class StreamPrompts:
    """Prompts of streaming data: each new group id gets the next row, and the stream starts again when it ends."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._rows: Iterator[dict[str, Any]] = iter(stream)
        self._epoch, self._row_index = 0, 0
        self._given: dict[int, Prompt] = {}  # recent groups, so that asking again gives the same prompt

    def prompt_of(self, group_id: int) -> Prompt:
        if group_id not in self._given:
            self._given[group_id] = self._next()
            if len(self._given) > REMEMBERED_STREAM_ROWS:
                del self._given[next(iter(self._given))]
        return self._given[group_id]

    def _next(self) -> Prompt:
        row = next(self._rows, None)
        if row is None:
            if self._row_index == 0:
                raise ContractError("data.path: the stream holds no rows")
            self._rows, self._epoch, self._row_index = iter(self._stream), self._epoch + 1, 0
            return self._next()
        index = self._row_index
        self._row_index += 1
        fault = prompt_fault(row["prompt"]) if row.get("prompt") else None
        if fault:
            raise ContractError(f"data.path: row {index} of the stream: prompt {fault}")
        return _prompt(row, index, self._epoch)


class EndlessPrompts:
    """No data: the environment owns the tasks, prompts never run out and epochs are undefined (ENV-14)."""

    def prompt_of(self, group_id: int) -> Prompt:
        return Prompt(row_index=group_id, epoch=0, messages=[], columns={})


def prompts_of(rows: Rows | Stream | None, shuffle: bool, seed: int) -> Prompts | StreamPrompts | EndlessPrompts:
    """The order of what a data option opened; None is no data."""
    if rows is None:
        return EndlessPrompts()
    return Prompts(rows, shuffle, seed) if hasattr(rows, "__len__") else StreamPrompts(rows)


def order_of(rows: Rows | Stream | None, data: Any, run_seed: int) -> str | None:
    """What decides which row a group id means, in words; None where that is not the order of a data set."""
    if not hasattr(rows, "__len__"):
        return None
    return f"data.shuffle=true with seed {seed_of(data, run_seed)}" if data.shuffle else "data.shuffle=false"


def seed_of(data: Any, run_seed: int) -> int:
    """The seed of the order."""
    return run_seed if data.seed is None else data.seed


def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[num_rows] int64 order of an epoch. Sorting raw Philox words, because numpy keeps only the raw words stable over releases."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(num_rows)
    return np.argsort(words, kind="stable")


def _prompt(row: dict[str, Any], index: int, epoch: int) -> Prompt:
    columns = {name: value for name, value in row.items() if name != "prompt"}
    return Prompt(row_index=index, epoch=epoch, messages=row.get("prompt") or [], columns=columns)
