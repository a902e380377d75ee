"""The evaluations after the last step, which the rollout process plays."""

from __future__ import annotations

import time

from agrpo.errors import StallError
from agrpo.train.feeder import Feeder


class FinalEvaluations:
    """Rank 0's wait for them, one look at a time, so that all ranks stay together and a server can get weights meanwhile."""

    def __init__(self, feeder: Feeder, version: int, names: list[str], timeout_s: float):
        self._feeder, self._version, self._timeout_s = feeder, version, timeout_s
        self._before = {name: len(feeder.evaluations.get(name, ())) for name in names}
        self._is_asked, self._heard_at = False, time.monotonic()

    def are_awaited(self, look_s: float) -> bool:
        """Whether any is still missing after `look_s` seconds.

        StallError once the rollout process, which watches its own progress, has sent nothing for `timeout_s` seconds.
        """
        feeder = self._feeder
        if not self._is_asked and feeder.await_rollout(look_s):
            self._is_asked, self._heard_at = True, time.monotonic()
            feeder.ask_evaluations(self._version)
        missing = [name for name, count in self._before.items() if len(feeder.evaluations.get(name, ())) == count]
        if missing and self._is_asked:
            time.sleep(look_s)
        if missing and time.monotonic() > max(self._heard_at, feeder.heard_at) + self._timeout_s:
            raise StallError(
                f"the rollout process sent nothing for {self._timeout_s:.0f} s during the final evaluation of "
                f"{', '.join(missing)}; the trained model is exported already"
            )
        return bool(missing)
