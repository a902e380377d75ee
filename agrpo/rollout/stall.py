"""What a stalled rollout process leaves behind: where each of its coroutines waits."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path

from agrpo.lifecycle import write_atomic

NUM_FRAMES = 8  # per coroutine


def write_tasks(run_dir: Path) -> None:
    """To `state/rollout.tasks`, from inside the event loop; stacks of threads do not show them."""
    text = io.StringIO()
    for task in asyncio.all_tasks():
        task.print_stack(limit=NUM_FRAMES, file=text)
    write_atomic(run_dir / "state" / "rollout.tasks", text.getvalue())
