"""How a GPU script runs its parts: one JSON line each as soon as it is known, a failure hides nothing, time is bounded."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any

Part = Callable[[], Iterable[dict[str, Any]]]


def run_parts(parts: dict[str, Part], budget_s: float) -> int:
    """Run the parts in order while time is left; 1 if one raised or has a line with "ok": false, else 0.

    A part is not interrupted: it is asked for its next line only while the budget lasts.
    """
    started, is_ok = time.monotonic(), True
    for name, part in parts.items():
        try:
            for row in part():
                spent = time.monotonic() - started
                print(json.dumps({"part": name, **row, "at_s": round(spent, 1)}), flush=True)
                is_ok &= row.get("ok") is not False
                if spent > budget_s:
                    break
        except Exception as error:
            is_ok = False
            traceback.print_exc()
            line = (str(error).strip().splitlines() or [""])[0]
            print(json.dumps({"part": name, "ok": False, "error": f"{type(error).__name__}: {line}"}), flush=True)
        if time.monotonic() - started > budget_s:
            left = list(parts)[list(parts).index(name) + 1 :]
            print(json.dumps({"part": "budget", "budget_s": budget_s, "not_run": left}), flush=True)
            break
    return 0 if is_ok else 1
