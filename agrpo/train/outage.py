"""Servers that lost the run's weights: how they are noticed, and how all ranks wait for one that is away.

What a server's weights are is read from their label. It is FRESH when a server has just started, and a version after a
complete sync. A sync that begins at a fresh server names it CLAIMED first, so FRESH seen later means one thing only: it
was started again. Answers with either label are refused where they arrive (`sampler/answer.py`), so nothing that a
server says between its start and the end of the next sync is trained, however the two ends are timed. A server that
knows no labels cannot be told from one that was started again; the supervisor does not restart such a server.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from agrpo.errors import ServerError
from agrpo.sync.control import MissingEndpoint, ServerControl
from agrpo.train.ranks import Ranks

FRESH, CLAIMED = "default", "claimed"
AWAY, HELD = "away", "held"  # no answer; an answer and another label than FRESH
LOOK_LIMIT_S = 5.0  # for one question
LOOK_EVERY_S = 0.5
SURE_AFTER = 3  # looks at which every server must be well before a failure counts as not caused by an outage
WAIT, GO_ON, GIVE_UP = 0, 1, 2
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Outage:
    """One per rank; every method but `is_over` is called on all ranks together, and rank 0 decides."""

    server: ServerControl
    ranks: Ranks
    beat: Callable[[str], None]
    is_asked_to_stop: Callable[[], bool]
    num_restarts: int = 0  # of servers that got the weights anew
    _has_begun: bool = False
    _unlabelled: set[str] = field(default_factory=set)  # servers that do not let themselves be claimed

    def is_over(self) -> bool:
        """Rank 0, between syncs: whether a server was started again and waits for weights."""
        return FRESH in self._looks()

    def claim(self) -> bool:
        """Before a sync: whether a server has started since the last one, so that nothing known of it holds any more."""
        is_fresh = bool(self.ranks.tell(self._claim() if self.ranks.is_first else 0))
        if is_fresh and self._has_begun:
            self.num_restarts += 1
            _log.warning("a server was started again and gets the weights anew")
        self._has_begun = True
        return is_fresh

    def await_up(self) -> None:
        """Before the first question: until every server answers; one may have died since the run found it healthy."""
        deadline = time.monotonic() + self.server.timeout_s
        if self._wait(lambda: self._decide(AWAY not in self._looks(), deadline)) == GIVE_UP:
            raise ServerError(self._too_late(f"{', '.join(self.server.urls)}: no answer"))

    def wait_out(self, failure: ServerError) -> None:
        """After a failed sync: return once a server that was started again can take another; else raise the failure.

        The wait ends after `server.timeout` seconds. A server that answers and was not started again is no outage.
        """
        deadline, num_well = time.monotonic() + self.server.timeout_s, 0

        def decide() -> int:
            nonlocal num_well
            looks = self._looks()
            num_well = 0 if AWAY in looks or FRESH in looks else num_well + 1
            if num_well >= SURE_AFTER:
                return GIVE_UP
            return self._decide(FRESH in looks and AWAY not in looks, deadline)

        if self._wait(decide) == GO_ON:
            _log.warning("%s; the server is back, the sync is repeated", failure)
        elif time.monotonic() > deadline:
            raise ServerError(self._too_late(str(failure))) from failure
        else:
            raise failure

    def _decide(self, is_over: bool, deadline: float) -> int:
        if self.is_asked_to_stop() or time.monotonic() > deadline:
            return GIVE_UP
        return GO_ON if is_over else WAIT

    def _wait(self, decide: Callable[[], int]) -> int:
        """All ranks look up together until rank 0 has decided."""
        while (verdict := self.ranks.tell(decide() if self.ranks.is_first else WAIT)) == WAIT:
            self.beat("waiting for the server")
            time.sleep(LOOK_EVERY_S)
        return verdict

    def _too_late(self, text: str) -> str:
        return f"{text}; no server came back within {self.server.timeout_s:g} s; raise server.timeout"

    def _claim(self) -> bool:
        fresh = [url for url, look in zip(self.server.urls, self._looks(), strict=True) if look == FRESH]
        for url in fresh:
            try:
                self.server.request(url, "POST", "/update_weight_version", {"new_version": CLAIMED}, LOOK_LIMIT_S)
            except ServerError as error:
                _log.warning("%s", error)
                if self._look(url) == FRESH:
                    self._unlabelled.add(url)
        return bool(fresh)

    def _looks(self) -> list[str]:
        return [self._look(url) for url in self.server.urls]

    def _look(self, url: str) -> str:
        try:
            label = self.server.request(url, "GET", "/weight_info", timeout_s=LOOK_LIMIT_S).get("weight_version")
            return FRESH if label == FRESH and url not in self._unlabelled else HELD
        except MissingEndpoint:
            return HELD
        except ServerError:
            pass
        try:  # busy with something else than questions, or gone
            self.server.request(url, "GET", "/health", timeout_s=LOOK_LIMIT_S)
            return HELD
        except ServerError:
            return AWAY
