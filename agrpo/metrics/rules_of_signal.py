"""Rules about learning: what the rewards say, whether sampling is still random, and whether both sides agree."""

from __future__ import annotations

import math

from agrpo.metrics.findings import FINE, NOTE, WARNING, Finding, share
from agrpo.metrics.history import LIKELY, RECENT, History

SATURATED = 0.5  # share of groups without signal (DIAG-3)
EDGE = 0.1  # part of the reward range that counts as its end (DIAG-3)
MOVED = 0.05  # part of the range, or of all groups, that counts as a trend over RECENT windows
FALLEN = 0.2  # part of the range that the reward may lie below its best
FEWEST = 4  # records that say whether it does
CI95 = 1.96  # standard errors in half of an evaluation's interval
COPIES = 0.9  # of (G - 1)/G (DIAG-4)
TRUNCATED, MOSTLY_TRUNCATED = 0.1, 0.3  # shares of the rollouts
OUT_OF_RANGE = 0.1  # share of the trained tokens
LOW_MASS = 0.95
CLIPPED_HARD = 20.0  # gradient norm / max_grad_norm
ENGINE_GAP = 0.05  # nats per token


def saturation(h: History) -> Finding | None:
    """DIAG-3: groups whose rewards are all equal, by where those rewards lie."""
    zero, reward = h.now("frac_reward_zero_std"), h.now("reward")
    if zero is None:
        return None
    if reward is None:
        return Finding(
            "no-signal", WARNING, f"{share(zero)} of the groups give no gradient", "no rollout has a reward: every source gave None",
            _read(h, "Look at what the reward functions are given and return"),
        )  # fmt: skip
    figure = f"{share(zero)} of the groups have equal rewards, the mean reward is {reward:.3g}"
    bounds = h.setting("scorer.reward_range")
    if bounds is None:
        if zero < SATURATED:
            return Finding("healthy", FINE, figure, "most groups give a gradient")
        return Finding(
            "no-signal", WARNING, figure, "such groups give no gradient", "Name the range of the rewards, and this says why.",
            "'scorer.reward_range=[0,1]'",
        )  # fmt: skip
    low, high = bounds
    span = high - low
    equal, of_whom = (reward, "all groups") if h.trains_equal_groups else (h.now("reward_dropped"), "the dropped groups")
    if _is_regression(h):
        rising, falling = h.drift("frac_reward_zero_std"), h.drift("reward")
        return Finding(
            "regression", WARNING,
            f"over {RECENT} records equal-reward groups rose by {share(rising)} to {share(zero)} while the reward fell by {-falling:.3g}",
            "what the model could do it now gets wrong together", "Lower the learning rate; look whether answers are copies "
            "of each other.", _less_rate(h),
        )  # fmt: skip
    if zero < SATURATED:
        return Finding("healthy", FINE, figure, "most groups give a gradient")
    if equal is None:
        return Finding("no-signal", WARNING, figure, "the dropped groups have no reward at all: every source gave None")
    figure += f", that of {of_whom} {equal:.3g} in [{low:g}, {high:g}]"
    if equal >= high - EDGE * span:
        return Finding(
            "solved", NOTE, figure, "the prompts have become too easy", "Stop here, or go on with harder prompts."
        )
    if fallen(h):
        return None  # its means mix what was before the fall with what came after
    if equal <= low + EDGE * span:
        return _stuck(h, figure)
    return Finding(
        "mixed", NOTE, figure, "some prompts are too easy and others too hard, or groups share a partial score",
        _read(h, "Read a few rollouts"),
    )  # fmt: skip


def _is_regression(h: History) -> bool:
    """Groups without signal become more while the reward falls, each by more than noise."""
    rising, falling, bounds = h.drift("frac_reward_zero_std"), h.drift("reward"), h.setting("scorer.reward_range")
    if rising is None or falling is None or bounds is None:
        return False
    return rising >= MOVED and falling <= -MOVED * (bounds[1] - bounds[0])


def _stuck(h: History, figure: str) -> Finding:
    clipped = h.now("completions/clipped_ratio") or 0.0
    if clipped >= TRUNCATED:
        return Finding(
            "stuck-low", WARNING, f"{figure}; {share(clipped)} of the answers are cut off",
            "answers end before their result and count as wrong", *_longer(h, "Let answers be longer."),
        )  # fmt: skip
    return Finding(
        "stuck-low", WARNING, figure, "the prompts are too hard, or the reward function does not recognise right answers",
        _read(h, "Read a few answers with their rewards"),
    )  # fmt: skip


def fallen(h: History) -> Finding | None:
    """The reward lies far below what it once was, and by more than noise."""
    values = h.values("reward")
    if len(values) < FEWEST or _is_regression(h):
        return None
    least = FALLEN * _span(h)
    found = h.fall("reward", least) or h.fall_from_start("reward", least)
    if found is None:
        return None
    best, now = found
    return Finding(
        "fallen", WARNING, f"the mean reward is {now:.3g}, it was {best:.3g}", "the policy has become worse",
        "Continue from a checkpoint before the fall with a lower learning rate.", _less_rate(h),
    )  # fmt: skip


def evaluation(h: History) -> Finding | None:
    """The last result of an evaluation lies below an earlier one by more than the intervals of both explain."""
    for name in h.names("eval/", "/reward"):
        results = h.pairs(f"eval/{name}/reward", f"eval/{name}/reward_ci95")
        if len(results) < 2:
            continue
        (best, best_ci), (now, now_ci) = max(results[:-1]), results[-1]
        if best - now < max(MOVED * _span(h), LIKELY / CI95 * math.hypot(best_ci, now_ci)):
            continue
        figure = f"evaluation {name} gives {now:.3g} +-{now_ci:.2g}, it gave {best:.3g} +-{best_ci:.2g}"
        if h.has_risen("reward", MOVED * _span(h)) and fallen(h) is None:
            return Finding(
                "overfitting", WARNING, figure, "the reward in training has risen meanwhile: what was learned holds for its "
                "prompts or its reward functions only", _read(h, "Give more and other prompts, or stop earlier; read what earns a reward"),
            )  # fmt: skip
        return Finding(
            "worse-evaluation", WARNING, figure, "the policy has become worse",
            "Continue from a checkpoint before that with a lower learning rate.", _less_rate(h),
        )  # fmt: skip
    return None


def copies(h: History) -> Finding | None:
    """DIAG-4: the rollouts of a group are the same tokens."""
    duplicates, size = h.now("completions/duplicate_frac"), h.setting("rollout.group_size", 8)
    if duplicates is None or size < 2:
        return None
    figure = f"{share(duplicates)} of the rollouts repeat another one of their group"
    if duplicates >= COPIES * (size - 1) / size and not _is_learned(h) and not _has_learned(h):
        return Finding(
            "copies", WARNING, figure, f"with groups of {size}, {share((size - 1) / size)} would be copies only",
            "Sampling is not random, or the policy has collapsed: look at the temperature and at the entropy.",
            "sampler.temperature=1.0" if h.setting("sampler.temperature", 1.0) < 1.0 else "",
        )  # fmt: skip
    rise, entropy = h.drift("completions/duplicate_frac"), h.change("entropy")
    if rise is None or entropy is None or rise < MOVED or entropy >= 0:
        return None
    figure = f"over {RECENT} records repeated rollouts rose by {share(rise)} to {share(duplicates)} while entropy fell by {-entropy:.3g}"
    if _is_learned(h) or _has_learned(h):
        return Finding(
            "converging", NOTE, figure, "the policy settles on one answer per prompt, and the reward rises with it"
        )
    return Finding(
        "collapse", WARNING, figure, "the policy narrows to one answer per prompt without a better reward",
        "Lower the learning rate, or give prompts on which answers differ.", _less_rate(h),
    )  # fmt: skip


def _is_learned(h: History) -> bool:
    """Whether the reward rises by more than noise, or is at the upper end of its range."""
    now, bounds = h.now("reward"), h.setting("scorer.reward_range")
    if now is None:
        return False
    if bounds is not None and now >= bounds[1] - EDGE * (bounds[1] - bounds[0]):
        return True
    rise = h.drift("reward")
    return rise is not None and rise > 0 and rise >= MOVED * _span(h)


def _has_learned(h: History) -> bool:
    """Whether the reward is higher than it once was by more than noise, has never fallen and does not fall now."""
    return h.has_risen("reward", MOVED * _span(h)) and (h.drift("reward") or 0.0) >= 0 and fallen(h) is None


def _span(h: History) -> float:
    """Width of the range of the rewards; of those that were seen where it is not known, 0 where there are none."""
    values = h.values("reward")
    low, high = h.setting("scorer.reward_range") or (min(values, default=0.0), max(values, default=0.0))
    return high - low


def truncated(h: History) -> Finding | None:
    clipped = h.now("completions/clipped_ratio")
    if clipped is None or clipped < TRUNCATED:
        return None
    return Finding(
        "truncation", WARNING if clipped >= MOSTLY_TRUNCATED else NOTE,
        f"{share(clipped)} of the answers are cut off before their end", "what is cut off seldom earns a reward, and "
        "the model never learns to end", *_longer(h, "Let answers be longer, or penalise long ones (advantage.overlong)."),
    )  # fmt: skip


def dead_reward(h: History) -> Finding | None:
    """A source that gives every rollout of a group the same has no influence."""
    names = h.names("rewards/", "/group_std")
    silent = [n for n in h.names("rewards/", "/call_s") if not h.values(f"rewards/{n}/mean")]
    if silent and len(h.values("reward")) >= RECENT:
        return Finding(
            "dead-reward", WARNING, f"the reward {', '.join(silent)} gave None for every rollout", "it has no influence on training",
            _read(h, "Check what it is given and what it returns"),
        )  # fmt: skip
    dead = [n for n in names if (values := h.values(f"rewards/{n}/group_std")[-RECENT:]) and max(values) <= _same(h, n)]
    # Without siblings to compare with, what all rollouts of a group get still counts.
    if not dead or not h.compares_siblings or len(h.values("reward")) < RECENT:
        return None
    return Finding(
        "dead-reward", WARNING, f"the reward {', '.join(dead)} gave all rollouts of a group the same in the last records",
        "it has no influence on training", _read(h, "Check what it is given and what it returns"),
    )  # fmt: skip


def _same(h: History, source: str) -> float:
    """The standard deviation of equal rewards, which is rounding: seven times 0.1 give 1e-17."""
    return 1e-9 * max(map(abs, h.values(f"rewards/{source}/mean")[-RECENT:]), default=0.0)


def mismatch(h: History) -> Finding | None:
    """DIAG-6: server and trainer give different log-probs to the same weights."""
    limit = h.setting("run.parity_warn", math.inf)  # null: nobody wants to be warned
    gap, where = h.now("parity/engine_gap"), "of tokens that the current weights generated"
    if gap is None and h.setting("rollout.max_staleness", 4) == 0:
        gap, where = h.now("sampling/sampling_logp_difference/mean"), "at staleness 0"
    if gap is None or gap < min(limit, ENGINE_GAP):
        return None
    server = h.setting("server", {})  # one that runs elsewhere has no key dtype
    is_settable = "dtype" in server and (server["dtype"] or h.setting("model.dtype")) != "float32"
    return Finding(
        "mismatch", WARNING if gap >= limit else NOTE,
        f"log-probs of server and trainer differ by {gap:.3g} nats per token {where}", "the two compute the model "
        "differently: precision, kernels or weights that did not arrive", "Compare them on the same tokens: agrpo serve-check "
        "OVERRIDES --probe, beside agrpo serve OVERRIDES.", "server.dtype=float32" if gap >= limit and is_settable else "",
    )  # fmt: skip


def out_of_range(h: History) -> Finding | None:
    masked, age = h.now("sampling/masked_mean"), h.now("sample/staleness_mean")
    if masked is None or masked < OUT_OF_RANGE:
        return None
    words = f" at a mean staleness of {age:.1f}" if age is not None else ""
    bounds = "[loss.lower, loss.upper]" if h.setting("loss.upper") is not None else "[loss.clip_min, loss.clip_max]"
    return Finding(
        "out-of-range", WARNING, f"{share(masked)} of the trained tokens have a ratio outside {bounds}{words}",
        "they give no policy gradient: the policy moves far in each step, or samples are old",
        "Lower the learning rate, or accept only younger samples.", _less_rate(h),
    )  # fmt: skip


def low_mass(h: History) -> Finding | None:
    mass = h.now("sampling/sampler_mass")
    if mass is None or mass >= LOW_MASS:
        return None
    kept, most = h.setting("sampler.num_sampler_logprobs", 8), h.setting("server.max_logprobs", math.inf)
    more = f" server.max_logprobs={2 * kept + 1}" if 2 * kept >= most else ""
    return Finding(
        "low-head-mass", NOTE, f"the {kept} log-probs kept per token hold {share(mass)} of the probability",
        "the loss models the rest", "Keep more of them.", f"sampler.num_sampler_logprobs={2 * kept}{more}",
    )  # fmt: skip


def clipped_gradient(h: History) -> Finding | None:
    norm, limit = h.now("grad_norm"), h.setting("optimizer.max_grad_norm", 1.0)
    if norm is None or not limit or norm < CLIPPED_HARD * limit:
        return None
    return Finding(
        "clipped-gradient", NOTE, f"the gradient norm is {norm:.3g}, it is cut to {limit:g}",
        "the size of a step no longer depends on its gradient", "Lower the learning rate, or look for outliers in the rewards.",
        _less_rate(h),
    )  # fmt: skip


def _read(h: History, what: str) -> str:
    """`what`, and how: rollouts can be looked at where the run recorded them."""
    return f"{what}: agrpo view RUN" + ("." if h.records_rollouts else ", of a run with logger.log_completions=true.")


def _less_rate(h: History) -> str:
    rate = h.setting("optimizer.learning_rate")
    return f"optimizer.learning_rate={rate / 3:.2g}" if rate else ""


def _longer(h: History, change: str) -> tuple[str, str]:
    """What to do about answers that are cut off, and the override: of the limit that they reached."""
    length, longest = h.setting("sampler.max_completion_length"), h.values("completions/max_length")[-RECENT:]
    if length and longest and max(longest) < length:
        return (
            f"None reached sampler.max_completion_length={length}, the longest had {max(longest):.0f} tokens: what ends them is the "
            "server's context (server.max_model_len), or a limit of the environment.", "",
        )  # fmt: skip
    if not length:
        return change, ""
    # What holds a whole sample has to grow with it, or it is cut or dropped there.
    longer = max(h.values("sample/forwarded_tokens_max")[-RECENT:], default=0) + length
    limits = {key: h.setting(key) for key in ("packer.token_budget", "server.max_model_len")}
    more = [f"{key}={limit + length}" for key, limit in limits.items() if limit and longer > limit]
    return change, " ".join([f"sampler.max_completion_length={2 * length}", *more])


RULES = (
    saturation, fallen, evaluation, copies, truncated, dead_reward, mismatch, out_of_range, low_mass, clipped_gradient
)  # fmt: skip
