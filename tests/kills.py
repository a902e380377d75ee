"""`python -m tests.kills [--count 20] [--seed N]`: kill -9 of a random process at a random moment, again and again, one run.

After each kill the run is resumed; the last resume ends it. Then every group must be accounted for once: trained, dropped or
waiting, under the weights that survived. Prints one JSON line per bar and what was killed when. About 20 s per kill.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from agrpo.ledger import replay
from tests.standins import tiny_dataset, tiny_qwen3
from tests.test_kill import assert_exactly_once, num_records, pid_of, processes_of, start, wait_for, write_reward

NAMES = ("supervisor", "server", "rollout", "trainer0")
GONE_S, STARTED_S = 20.0, 180.0


def kill_one(folder: Path, draw: random.Random) -> str:
    """One start, killed at a moment between its first sign of life and a few seconds of training; what was killed, and when."""
    name = draw.choice(NAMES)
    run, before = start(folder, "run.max_steps=100000", "run.resume=auto"), num_records(folder)
    try:
        is_early = draw.random() < 0.25
        if not is_early:
            wait_for(lambda: num_records(folder) > before or run.poll() is not None, STARTED_S, "a step")
        time.sleep(draw.uniform(0.0, 4.0))
        assert run.poll() is None, run.stdout.read()
        try:
            os.kill(pid_of(folder, name, run), signal.SIGKILL)
        except (FileNotFoundError, ProcessLookupError, ValueError):
            name = "supervisor"  # the one that was chosen has not begun yet
            run.kill()
        wait_for(lambda: not processes_of(folder), GONE_S, f"the end of all processes after the {name} was killed")
    finally:
        run.kill()
        run.communicate()
    return f"{name} at step {num_records(folder)}{' while starting' if is_early else ''}"


def run(count: int, seed: int, folder: Path) -> list[dict]:
    draw, began = random.Random(seed), time.monotonic()
    tiny_qwen3(folder / "model")
    tiny_dataset(folder / "data.jsonl")
    write_reward(folder)
    for number in range(count):
        print(f"{number + 1} of {count}: {kill_one(folder, draw)}", file=sys.stderr, flush=True)
    seen = replay(folder / "run" / "ledger.jsonl")
    steps = num_records(folder) + 5
    last = start(folder, f"run.max_steps={steps}", "run.resume=auto")
    output = last.communicate(timeout=300)[0]
    assert last.returncode == 0, output
    records = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["step"] for r in records] == list(range(1, steps + 1)), "steps were lost or came twice"
    assert_exactly_once(folder, max(seen, default=0) + 1)
    groups = replay(folder / "run" / "ledger.jsonl")
    return [
        {"bar": "kills_groups_lost_or_twice", "value": 0, "unit": f"of {len(groups)} groups, {count} kills", "limit": 0, "ok": True},
        {"bar": "kills_wall", "value": round(time.monotonic() - began, 1), "unit": "s", "limit": None, "ok": True},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    options = parser.parse_args()
    print(f"seed {options.seed}", file=sys.stderr)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        for bar in run(options.count, options.seed, Path(folder)):
            print(json.dumps(bar), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
