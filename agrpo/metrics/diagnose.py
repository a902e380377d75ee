"""Verdicts about a window: which side is the bottleneck, and what limits the number of rollouts in flight."""

from __future__ import annotations

from agrpo.metrics.window import Window

HIGH = 0.1  # share of the step time from which a wait counts (DIAG-1)
REACHED = 0.95  # share of a limit from which it counts as reached
LOW_KV_USAGE = 0.6


def verdicts(window: Window, num_steps: int, max_concurrent_rollouts: int) -> dict[str, str]:
    """`diag/bottleneck` and `diag/concurrency_limit` of `num_steps` steps; call before `record` (DIAG-1, 2).

    With 1.0 s steps, 0.3 s of waiting for samples and no backpressure: generation-bound.
    """
    step_s = window.get("perf/step_s")
    if not step_s:
        return {}
    is_waiting = (window.get("perf/rollout_wait_s") or 0.0) >= HIGH * step_s
    is_held_back = window.total("rollout/backpressure_s") / max(num_steps, 1) >= HIGH * step_s
    return {
        "diag/bottleneck": _bottleneck(is_waiting, is_held_back),
        "diag/concurrency_limit": _limit(window, is_waiting, is_held_back, max_concurrent_rollouts),
    }


def _bottleneck(is_waiting: bool, is_held_back: bool) -> str:
    if is_waiting and is_held_back:
        return "window-bound"  # raise rollout.max_staleness
    if is_waiting:
        return "generation-bound"
    return "trainer-bound" if is_held_back else "balanced"


def _limit(window: Window, is_waiting: bool, is_held_back: bool, maximum: int) -> str:
    if is_held_back:
        return "staleness"
    concurrency, cap = window.get("rollout/concurrency"), window.get("rollout/concurrency_cap")
    if concurrency is None or cap is None:
        return "none"
    if cap < maximum and concurrency >= REACHED * cap:
        return "server"
    is_idle = (window.get("rollout/vllm_kv_cache_usage_frac") or 0.0) < LOW_KV_USAGE
    if concurrency >= REACHED * maximum and is_idle and is_waiting:
        return "max_concurrent_rollouts"
    return "none"
