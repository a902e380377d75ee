"""What one injected fault is, how it is run within its time, and the table of all of them."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from agrpo.errors import AgrpoError, RolloutFailure
from agrpo.scorer.contract import ScoreError

HANG, NOT_RUN = "HANG", "not run: "


class NotHereError(Exception):
    """This machine cannot have the fault; the message says why."""


@dataclass(frozen=True, slots=True)
class Fault:
    """`run(folder)` injects it and says what came of it, or raises what ended it; `says`: a pattern of that error's text."""

    where: str
    what: str
    expected: str
    run: Callable[[Path], str | None]
    says: str = ""
    limit_s: float = 30.0
    is_whole: bool = False  # a whole run
    is_in_suite: bool = False  # a whole run that `pytest` injects too

    @property
    def name(self) -> str:
        return re.sub(r"\W+", "-", f"{self.where}-{self.what}")


@dataclass(frozen=True, slots=True)
class Outcome:
    fault: Fault
    happened: str
    seconds: float

    @property
    def is_ok(self) -> bool:
        return self.happened == self.fault.expected


def inject(fault: Fault, folder: Path) -> Outcome:
    """Run it in a thread, so that one that never ends is seen as such."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(_ending(fault, folder)), name=fault.name, daemon=True)
    began = time.monotonic()
    thread.start()
    thread.join(fault.limit_s)
    seconds = time.monotonic() - began
    return Outcome(fault, found[0] if found else f"{HANG} after {seconds:.0f} s", seconds)


def _ending(fault: Fault, folder: Path) -> str:
    try:
        return fault.run(folder) or "nothing"
    except RolloutFailure as failure:
        return _named(f"rollout set aside: {failure.reason}", failure.text, fault)
    except ScoreError as error:
        return _named(f"group dropped: {error.reason}", str(error), fault)
    except AgrpoError as error:
        return _named(f"exit code {error.exit_code}", str(error), fault)
    except NotHereError as error:
        return f"{NOT_RUN}{error}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"


def _named(outcome: str, text: str, fault: Fault) -> str:
    return outcome if re.search(fault.says, text, re.S) else f"{outcome}, but not by name: {text}"


def lines(outcomes: list[Outcome]) -> list[str]:
    rows = [("where", "fault", "expected", "happened", "s")]
    rows += [
        (o.fault.where, o.fault.what, o.fault.expected, "the same" if o.is_ok else o.happened, f"{o.seconds:.1f}")
        for o in sorted(outcomes, key=lambda o: o.fault.where)
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 12, 0], strict=True)).rstrip() for row in rows]
    num_hung = sum(o.happened.startswith(HANG) for o in outcomes)
    num_ok = sum(o.is_ok for o in outcomes)
    num_left_out = sum(o.happened.startswith(NOT_RUN) for o in outcomes)
    return [*table, f"{len(outcomes)} faults, {num_ok} as expected, {num_hung} hung, {num_left_out} not run"]
