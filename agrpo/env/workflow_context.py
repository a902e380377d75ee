"""What an episode may ask about itself: `workflow_context.get()` (AREAL-WF-20 to 23).

Every episode runs in a task of its own with a context of its own, which tasks that it starts inherit.
"""

from __future__ import annotations

import contextvars
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkflowContext:
    """Outside of an episode everything has its default."""

    is_eval: bool = False  # played for an evaluation, never trained
    task_id: int | None = None  # the group's id
    sample_idx: int | None = None  # the slot in the group, whatever the order in which slots finish


_OUTSIDE = WorkflowContext()
_current: contextvars.ContextVar[WorkflowContext] = contextvars.ContextVar("workflow", default=_OUTSIDE)


def get() -> WorkflowContext:
    """The context of the running episode."""
    return _current.get()


def set(context: WorkflowContext) -> contextvars.Token[WorkflowContext]:
    """Make `context` the current one; the token takes it back with `reset`."""
    return _current.set(context)


def reset(token: contextvars.Token[WorkflowContext]) -> None:
    _current.reset(token)


def stat_scope() -> str:
    """`eval-rollout` in an evaluation, else `rollout`."""
    return "eval-rollout" if get().is_eval else "rollout"
