"""`python -m tests.bench [NAME...]`: run benchmarks, print one JSON line per bar, exit 1 if one is missed.

Each is a ratio measured in the same run, or a figure with its limit: {"bar", "value", "unit", "limit", "ok"}.
"""

import importlib
import json
import sys

NAMES = ("help", "dry_run", "planner", "attention", "step", "client", "rollout", "faults", "turns", "agent_turns", "overlap", "evaluation", "sync_gloo",
         "ranks", "feeding", "metrics")  # fmt: skip
ON_REQUEST = ("rollout_trl", "planner_trl", "head", "head_trl")  # take long, or install a package of their own


def main(names: list[str]) -> int:
    unknown = sorted(set(names) - {*NAMES, *ON_REQUEST})
    if unknown:
        print(f"unknown benchmark: {', '.join(unknown)}; known: {', '.join(NAMES + ON_REQUEST)}", file=sys.stderr)
        return 2
    is_ok = True
    for name in names or NAMES:
        for bar in importlib.import_module(f"tests.bench.{name}").run():
            print(json.dumps(bar), flush=True)
            is_ok &= bar["ok"] is not False
    return 0 if is_ok else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
