"""Rules about time: which side waits, what limits the rollouts in flight, and what is generated for nothing."""

from __future__ import annotations

from agrpo.metrics.diagnose import HIGH, LOW_KV_USAGE, REACHED
from agrpo.metrics.findings import FINE, NOTE, WARNING, Finding, share
from agrpo.metrics.history import RECENT, History
from agrpo.metrics.rules_of_signal import fallen, saturation

FEW_SIGNALS = 0.5  # share of the groups
SCORING = 0.8  # share of the places for scoring
OF_FUNCTIONS = 0.5  # share of the time to score a group that the slowest reward function takes
SLOW_SYNC = 0.15  # share of the step
WASTED = 0.3  # share of the generated tokens
STALE = 0.05  # share of the samples
FAILED = 0.05  # share of the rollouts
MUCH_PREEMPTION = 0.1  # preemptions per rollout
FULL_CACHE = 0.8  # below it on average, a KV cache is not what preempts
EMPTY_ROWS = 0.5  # fill
UNEVEN = 1.3  # heaviest row / mean


def bottleneck(h: History) -> Finding | None:
    """DIAG-1: waiting and backpressure, each high from a tenth of the step."""
    step_s = h.now("perf/step_s")
    if not step_s:
        return None
    wait_s, held_s = h.now("perf/rollout_wait_s") or 0.0, h.now("rollout/backpressure_s_per_step") or 0.0
    wait = f"training waits {wait_s:.2f} s of each {step_s:.2f} s step ({share(wait_s / step_s)}) for samples"
    held = f"generation is held back {held_s:.2f} s of each {step_s:.2f} s step ({share(held_s / step_s)})"
    is_waiting, is_held = wait_s >= HIGH * step_s, held_s >= HIGH * step_s
    if is_waiting and is_held:
        return Finding(
            "window-bound", WARNING, f"{wait}, and {held}",
            "rollouts in flight fill the staleness window before their samples reach the queue",
            "Let generation run further ahead.", _more(h, "rollout.max_staleness", 4),
        )  # fmt: skip
    if is_waiting:
        return _generation_bound(h, wait)
    if is_held:
        return Finding(
            "trainer-bound", NOTE, held, "generation is faster than training, and samples wait until they are near "
            "the staleness bound", _devices(h, "training", "Make the step cheaper: a smaller model or an adapter, shorter answers."),
        )  # fmt: skip
    shares = f"training waits {share(wait_s / step_s)} and generation is held back {share(held_s / step_s)} of the time"
    return Finding("balanced", FINE, shares, "both sides are busy")


def _generation_bound(h: History, wait: str) -> Finding:
    """Training waits: for groups with signal, for scoring, for places, for a server that is full, or for generation itself (DIAG-2)."""
    without_signal, places = h.now("frac_reward_zero_std") or 0.0, _too_few_places(h)
    if without_signal >= FEW_SIGNALS and not h.trains_equal_groups:
        why = saturation(h) or fallen(h)
        change = [f"The verdict {why.rule} says why."] if why else []
        if places:
            change.append(f"{places}: more at once may give them sooner.")
        return Finding(
            "few-signals", WARNING, f"{wait}; {share(without_signal)} of the groups have equal rewards",
            "they give no gradient, so a step needs many groups", " ".join(change),
            _more(h, "rollout.max_concurrent_rollouts", 512) if places else "", why.rule if why else "",
        )  # fmt: skip
    scoring = _scoring(h)
    if scoring:
        return Finding(
            "scoring-bound", WARNING, f"{wait}; {scoring}", "scoring keeps up with generation hardly or not at all",
            "Score more groups at once, or make the slowest reward function faster.", _more(h, "scorer.max_concurrent_groups", 8),
        )  # fmt: skip
    if places:
        return Finding(
            "too-few-places", WARNING, f"{wait}; {places}", "the server may do more at once than it is given",
            "Raise the limit as far as tools and environments allow.", _more(h, "rollout.max_concurrent_rollouts", 512),
        )  # fmt: skip
    flying, cap = h.now("rollout/concurrency"), h.now("rollout/concurrency_cap")
    if flying is not None and cap is not None and cap < h.setting("rollout.max_concurrent_rollouts", 512) and flying >= REACHED * cap:
        return _at_the_cap(h, wait, flying, cap)
    return Finding(
        "generation-bound", WARNING, wait, "generation is slower than training",
        _devices(h, "generation", "Let answers be shorter; on a CPU both sides share the cores."),
    )  # fmt: skip


def _at_the_cap(h: History, wait: str, flying: float, cap: float) -> Finding:
    """The cap is where the server's load put it, or still on its way up from what the cache holds at full length."""
    usage, queued = h.now("rollout/vllm_kv_cache_usage_frac"), h.now("rollout/vllm_queued_requests")
    figure = f"{wait}; {flying:.0f} rollouts are in flight, the cap that the server's load sets is {cap:.0f}{_fullness(usage)}"
    if usage is not None and usage < LOW_KV_USAGE and not round(queued or 0.0):
        return Finding(
            "cap-rising", NOTE, figure, "the cap begins with what the cache holds at full length, and rises by a quarter each time "
            "that as many rollouts have ended", "It rises by itself; look again later.",
        )  # fmt: skip
    return Finding(
        "server-full", WARNING, figure, "the server holds as many requests as it can", _devices(h, "generation", "Let answers be shorter.")
    )  # fmt: skip


def _fullness(usage: float | None) -> str:
    """What follows in a sentence where the server says how full its cache is."""
    return "" if usage is None else f", the KV cache is {share(usage)} full"


def _too_few_places(h: History) -> str:
    """Words where as many rollouts are in flight as may be, and the server has room for more; else empty."""
    flying, maximum = h.now("rollout/concurrency"), h.setting("rollout.max_concurrent_rollouts", 512)
    usage = h.now("rollout/vllm_kv_cache_usage_frac")
    if flying is None or flying < REACHED * maximum or (usage or 0.0) >= LOW_KV_USAGE:
        return ""
    return f"{flying:.0f} of at most {maximum} rollouts are in flight{_fullness(usage)}"


def _scoring(h: History) -> str:
    """Words where groups wait for scores and nearly all places for scoring are taken by reward functions; else empty."""
    score_s, waiting = h.now("rollout/score_s"), h.now("rollout/score_queue_size") or 0.0
    slots, step_s = h.now("group/target_slot_count"), h.now("perf/step_s")
    if score_s is None or not slots or not step_s or waiting < 1:
        return ""
    places = h.setting("scorer.max_concurrent_groups", 8)
    groups = slots / h.setting("rollout.group_size", 8) / h.setting("logger.logging_steps", 1)  # per step
    taken = groups * score_s / (places * step_s)
    slowest_s, slowest = max(((h.now(f"rewards/{n}/call_s") or 0.0, n) for n in h.names("rewards/", "/call_s")), default=(score_s, ""))
    # Else the groups wait for a core, not for a function: more of them at once would wait longer.
    if taken < SCORING or slowest_s < OF_FUNCTIONS * score_s:
        return ""
    named = f", {slowest_s:.2f} s of it in {slowest}" if slowest else ""
    return (
        f"{groups:.0f} groups per step are scored in {score_s:.2f} s each{named}, which takes {share(min(taken, 1.0))} of the {places} "
        f"places for scoring; {waiting:.1f} groups wait"
    )


def _devices(h: History, side: str, on_cpu: str) -> str:
    """What helps the slower side: other devices where the run has some, else less work."""
    devices = h.setting("run.devices")
    if not devices:
        return on_cpu
    if not devices.get("server"):  # of servers that run elsewhere no split is planned
        own = {"generation": "servers (server.base_url takes several, with commas)", "training": "devices (run.num_processes)"}
        return f"Give {side} more {own[side]}."
    return f"Give {side} more devices: agrpo explain and agrpo report plan the split."


def concurrency(h: History) -> Finding | None:
    """DIAG-2, where training does not wait: what limits the rollouts in flight, for the reader to know."""
    flying, cap = h.now("rollout/concurrency"), h.now("rollout/concurrency_cap")
    step_s, maximum = h.now("perf/step_s"), h.setting("rollout.max_concurrent_rollouts", 512)
    if flying is None or cap is None or not step_s or (h.now("perf/rollout_wait_s") or 0.0) >= HIGH * step_s:
        return None
    if (h.now("rollout/backpressure_s_per_step") or 0.0) >= HIGH * step_s:
        limit = "the staleness window (rollout.max_staleness)"
    elif cap < maximum and flying >= REACHED * cap:
        limit = f"the server's load, which sets the cap to {cap:.0f}"
    elif flying >= REACHED * maximum:
        limit = "rollout.max_concurrent_rollouts"
    else:
        return None
    return Finding("concurrency", FINE, f"{flying:.0f} rollouts are in flight", f"they are limited by {limit}")


def slow_sync(h: History) -> Finding | None:
    step_s, sync_s, of_step_s = h.now("perf/step_s"), h.now("perf/weight_sync_s"), h.sync_s_per_step()
    if not step_s or of_step_s is None or of_step_s / step_s < SLOW_SYNC:
        return None
    parts = {
        "waiting for the server's pause": h.now("perf/weight_sync_pause_s") or 0.0,
        "waiting for other ranks": h.now("perf/weight_sync_barrier_s") or 0.0,
        "sending": h.now("perf/weight_sync_transfer_s") or 0.0,
    }
    longest = max(parts, key=lambda name: parts[name])
    every = h.setting("sync.every_steps", 1)
    spans = f"of each {step_s:.2f} s step" if every == 1 else f"after every {every} steps of {step_s:.2f} s"
    figure = f"the weight sync takes {sync_s:.2f} s {spans} ({share(of_step_s / step_s)})"
    cause = f"most of it is {longest} ({parts[longest]:.2f} s)"
    return Finding(
        "slow-sync", NOTE, figure, cause, "Sync less often (samples age by as many steps), or make steps longer.",
        _more(h, "sync.every_steps", 1),
    )  # fmt: skip


def stale(h: History) -> Finding | None:
    """Samples that were generated and then too old to train, or rollouts that would have been."""
    dropped, trained = h.total("sample/dropped_stale_count"), h.over_steps("batch/samples_per_step")
    given_up, slots = h.total("rollout/failed_stale_count"), h.total("group/target_slot_count")
    if dropped and dropped / (dropped + trained) >= STALE:
        figure = f"{dropped:.0f} samples, {share(dropped / (dropped + trained))} of all, were dropped as too old"
    elif given_up and given_up / max(slots, given_up) >= STALE:
        figure = f"{given_up:.0f} rollouts, {share(given_up / max(slots, given_up))} of all, were given up as too old"
    else:
        return None
    return Finding(
        "stale", WARNING, figure,
        "they took longer than the staleness bound allows, often because a few rollouts take much longer than others",
        "Accept older samples, or shorten the longest rollouts.", _more(h, "rollout.max_staleness", 4),
    )  # fmt: skip


# reason of a discarded token -> what to do; of a failed rollout the log says more
LOSSES = {
    "zero_std": "Give prompts of which the model gets some right and some wrong, or larger groups (rollout.group_size).",
    "stale": "Shorten the longest rollouts, or accept older samples (rollout.max_staleness).",
    "late": "Their groups had gone before they ended: shorten the longest rollouts.",
    "unused": "No trained position holds them: where an environment re-renders what was said, a turn may lose its own tokens.",
    "oversize": "Make rows longer (packer.token_budget), or answers shorter.",
    "under_scored": "Fewer than two rollouts of their groups have a reward: reward functions gave None for the others.",
    "scorer_error": "Mend the reward function that logs/rollout.log names, or raise scorer.timeout.",
    "rejected": "That is what rollout.accept_fn decides.",
    "unusable": "Too few rollouts of their groups were usable; logs/rollout.log names the errors.",
    "incomplete": "One failed rollout drops its whole group: rollout.drop_incomplete_group=false keeps the others.",
}


def waste(h: History) -> Finding | None:
    """Generated tokens that no step will train, by reason."""
    generated = h.total("tokens/generated")
    lost = {n: h.total(f"tokens/discarded/{n}") for n in h.names("tokens/discarded/", "")}
    discarded = sum(lost.values())
    if not generated or discarded / generated < WASTED:
        return None
    worst = max(lost, key=lambda name: lost[name])
    figure = f"{share(discarded / generated)} of the generated tokens were discarded, most for the reason {worst} ({share(lost[worst] / generated)})"
    return Finding(
        "waste", NOTE, figure, "they cost generation and train nothing",
        LOSSES.get(worst, "logs/rollout.log says more of that reason."),
    )  # fmt: skip


# reason of a failed rollout that is no error, so that no log names it -> what to do
FAILURES = {
    "prompt_too_long": "What they were asked left no room for an answer: raise server.max_model_len, or shorten it.",
    "returned_none": "The workflow gave None for them, which leaves them out.",
}


def failed(h: History) -> Finding | None:
    """Rollouts without a result; those that were given up as too old are a verdict of their own."""
    reasons = {n: h.total(f"rollout/failed_{n}_count") for n in h.names("rollout/failed_", "_count")}
    failures, slots = h.total("rollout/failed_count") - reasons.pop("stale", 0.0), h.total("group/target_slot_count")
    if failures <= 0 or failures / max(slots, failures) < FAILED:
        return None
    worst = max(reasons, key=lambda name: reasons[name], default="")
    most = f", most as {worst}" if worst else ""
    return Finding(
        "failed-rollouts", WARNING, f"{failures:.0f} rollouts, {share(failures / max(slots, failures))} of all, failed{most}",
        "their slots are lost, and groups become smaller", FAILURES.get(worst, "The rollout log names the first errors: logs/rollout.log."),
    )  # fmt: skip


def preempted(h: History) -> Finding | None:
    count, slots = h.total("rollout/vllm_preemption_count"), h.total("group/target_slot_count")
    if not count or count / max(slots, 1.0) < MUCH_PREEMPTION:
        return None
    figure, usage = f"the server preempted {count:.0f} requests for {slots:.0f} rollouts", h.now("rollout/vllm_kv_cache_usage_frac")
    if usage is not None and usage < FULL_CACHE and h.setting("sync.cache") == "reset":
        return Finding(
            "preemptions", NOTE, f"{figure}, its KV cache is {share(usage)} full", "each weight sync empties the cache "
            "(sync.cache=reset), and requests in flight are computed again", "Let those keep what the weights before computed, or "
            "sync less often.", "sync.cache=salt",
        )  # fmt: skip
    return Finding(
        "preemptions", NOTE, figure, "its KV cache is too small for what runs at once, and generated tokens are computed again",
        "Lower the limit of rollouts in flight.", _less(h, "rollout.max_concurrent_rollouts", 512),
    )  # fmt: skip


def oversize(h: History) -> Finding | None:
    dropped = h.total("batch/dropped_oversize_count")
    if not dropped:
        return None
    return Finding(
        "oversize", WARNING, f"{dropped:.0f} samples were longer than a row and dropped",
        "the longest answers are never trained, which favours short ones", "Make rows longer, or answers shorter.",
        _more(h, "packer.token_budget"),
    )  # fmt: skip


def empty_rows(h: History) -> Finding | None:
    """Samples so long that few fit beside each other. Rows that hold all the loss terms they may are full, if of few tokens:
    their samples share the rest."""
    fill, mean, longest = h.now("batch/row_fill_frac"), h.now("batch/row_tokens_mean"), h.values("sample/forwarded_tokens_max")[-RECENT:]
    if not fill or mean is None or not longest or fill >= EMPTY_ROWS:
        return None
    budget = round(mean / fill)
    if max(longest) <= EMPTY_ROWS * budget:
        return None
    return Finding(
        "empty-rows", NOTE, f"rows are {share(fill)} full", f"samples of up to {max(longest):.0f} tokens seldom fit beside each other in "
        f"{budget}", "Longer rows hold more of them, where the memory allows it.", _more(h, "packer.token_budget", budget),
    )  # fmt: skip


def uneven_ranks(h: History) -> Finding | None:
    imbalance, fill, mean = h.now("batch/row_imbalance"), h.now("batch/row_fill_frac"), h.now("batch/row_tokens_mean")
    if imbalance is None or imbalance < UNEVEN or h.num_ranks < 2:
        return None
    return Finding(
        "uneven-ranks", NOTE, f"the heaviest row costs {imbalance:.2f} times the mean of its microbatch",
        "the other ranks wait for it", "Longer rows are easier to balance.",
        _more(h, "packer.token_budget", round(mean / fill) if fill and mean else None),
    )  # fmt: skip


def _more(h: History, key: str, default: int | None = None) -> str:
    """`key=` twice its value, 1 instead of 0; empty where the run does not say it."""
    value = h.setting(key, default)
    return "" if value is None else f"{key}={2 * value or 1}"


def _less(h: History, key: str, default: int | None = None) -> str:
    value = h.setting(key, default)
    return f"{key}={max(value // 2, 1)}" if value else ""


RULES = (
    bottleneck, concurrency, slow_sync, stale, waste, failed, preempted, oversize, empty_rows, uneven_ranks
)  # fmt: skip
