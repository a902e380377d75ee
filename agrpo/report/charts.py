"""Which curves a report shows."""

from __future__ import annotations

from typing import Any

from agrpo.metrics.names import declared
from agrpo.metrics.summary import evaluation_points
from agrpo.report.plots import COLOURS, Curve, chart
from agrpo.report.run_files import RunFiles

# heading -> metrics of one unit; with several runs, the first of them is shown for each run
CHARTS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("Reward", ("reward", "reward_kept", "reward_dropped")),
    ("Length of answers", ("completions/mean_length", "completions/max_length")),
    ("Groups without signal, copies, cut-off answers",
     ("frac_reward_zero_std", "completions/duplicate_frac", "completions/clipped_ratio")),
    ("Staleness", ("sample/staleness_mean", "sample/staleness_max")),
    ("Importance ratio",
     ("sampling/importance_sampling_ratio/mean", "sampling/importance_sampling_ratio/max",
      "sampling/importance_sampling_ratio/min")),
    ("Log-prob gap", ("sampling/sampling_logp_difference/mean", "parity/engine_gap", "parity/staleness_gap")),
    ("Entropy", ("entropy",)),
    ("Loss", ("loss",)),
    ("Gradient norm", ("grad_norm",)),
    ("Where a step's time goes",
     ("perf/step_s", "perf/fwd_bwd_s", "perf/rollout_wait_s", "perf/weight_sync_s", "rollout/backpressure_s_per_step")),
    ("Throughput",
     ("rollout/generated_tokens_per_s", "perf/wall_clock_forwarded_tokens_per_s", "perf/wall_clock_trained_tokens_per_s")),
    ("Rollouts in flight", ("rollout/concurrency", "rollout/concurrency_cap")),
    ("Waits of a group", ("rollout/duration_s", "rollout/score_wait_s", "rollout/score_s", "sample/time_in_queue_s")),
    ("Queues", ("rollout/queue_size", "rollout/score_queue_size")),
)  # fmt: skip


ALSO_COMPARED = (
    ("Training waits", ("perf/rollout_wait_s",)),
    ("Generation is held back", ("rollout/backpressure_s_per_step",)),
    ("Copies", ("completions/duplicate_frac",)),
    ("Cut-off answers", ("completions/clipped_ratio",)),
)  # of several runs, besides the first metric of each chart


def charts(runs: list[RunFiles]) -> str:
    """All charts that have data, as figures; curves are metrics of one run, or runs of one metric."""
    found = [_chart_of_one(runs[0], *entry) if len(runs) == 1 else _chart_of_all(runs, *entry) for entry in CHARTS]
    names = list(dict.fromkeys(name for run in runs for name in _sources(run)))
    for name in names if len(names) > 1 else []:
        found.append(_chart_of_all(runs, f"Reward source {name}", (f"rewards/{name}/mean",)))
    if len(runs) > 1:
        found += [_chart_of_all(runs, *entry) for entry in ALSO_COMPARED] + _evaluations_of_all(runs)
    return "".join(found)


def colour_of(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _chart_of_one(run: RunFiles, title: str, names: tuple[str, ...]) -> str:
    curves = [Curve(name, _points(run, name), colour_of(i)) for i, name in enumerate(names)]
    if names[0] == "reward":
        evaluations = _evaluations(run)
        curves += [Curve(name, points, colour_of(4 + i), True) for i, (name, points) in enumerate(evaluations.items())]
    return chart(title, [c for c in curves if c.points], _unit(names[0]))


def _chart_of_all(runs: list[RunFiles], title: str, names: tuple[str, ...]) -> str:
    name = names[0]
    curves = [Curve(run.name, _points(run, name), colour_of(i)) for i, run in enumerate(runs)]
    return chart(f"{title}: {name}", [c for c in curves if c.points], _unit(name))


def _points(run: RunFiles, name: str) -> list[tuple[float, float]]:
    return [(r["step"], r[name]) for r in run.steps if isinstance(r.get(name), int | float)]


def _evaluations(run: RunFiles) -> dict[str, list[tuple[float, float]]]:
    """Metric -> (step whose weights were evaluated, reward)."""
    points = evaluation_points(run.records)
    return {f"eval/{name}/reward": [(p["step"], p["reward"]) for p in made] for name, made in points.items()}


def _evaluations_of_all(runs: list[RunFiles]) -> list[str]:
    """One chart per evaluation, a line and its marks per run."""
    made = [_evaluations(run) for run in runs]
    found = []
    for name in dict.fromkeys(name for one in made for name in one):
        curves = [Curve(runs[i].name, one[name], colour_of(i)) for i, one in enumerate(made) if name in one]
        found.append(chart(f"Evaluation: {name}", curves, _unit(name)))
    return found


def _sources(run: RunFiles) -> list[str]:
    ends = ("rewards/", "/mean")
    return list(
        dict.fromkeys(
            n.removeprefix(ends[0]).removesuffix(ends[1])
            for r in run.records
            for n in r
            if n.startswith(ends[0]) and n.endswith(ends[1])
        )
    )


def _unit(name: str) -> Any:
    metric = declared(name)
    return metric.unit if metric else ""
