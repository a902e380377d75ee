"""Groups that no reward function scores, one after the other: a broken function must not use up the prompts of a run."""

from __future__ import annotations

import time

from agrpo.errors import ContractError

IN_A_ROW, LASTING_S = 32, 120.0  # both are needed: a service that is away for a minute costs groups, not the run


class Unscored:
    """Told of every group whose scoring ended; ContractError once too many in a row failed for too long (REW-14)."""

    def __init__(self, in_a_row: int = IN_A_ROW, lasting_s: float = LASTING_S):
        self._in_a_row, self._lasting_s = in_a_row, lasting_s
        self._num, self._since = 0, 0.0

    def scored(self) -> None:
        self._num = 0

    def failed(self, error: BaseException | None) -> None:
        """Raises once this one is one too many."""
        now = time.monotonic()
        if self._num == 0:
            self._since = now
        self._num += 1
        if self._num >= self._in_a_row and now - self._since >= self._lasting_s:
            raise ContractError(
                f"{self._num} groups in a row were not scored, for {now - self._since:.0f} s; the last: {error}. Their prompts "
                "are dropped and not trained: repair the function, then continue with run.resume=auto"
            ) from error
