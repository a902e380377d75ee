"""Shift and scale of rewards by one reference per rollout, and of advantages by trained tokens (AREAL-WF-50 to 56)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from agrpo.errors import ContractError


def normalise(
    rewards: np.ndarray,
    *,
    mean_level: str | None,
    std_level: str | None,
    leave_one_out: bool = False,
    unbiased: bool = False,
    eps: float = 1e-8,
    references: np.ndarray | None = None,
    row_counts: np.ndarray | None = None,
    group_sizes: np.ndarray | None = None,
    in_batch: np.ndarray | None = None,
) -> np.ndarray:
    """(reward - baseline) / divisor of each row, with the statistics of its rollout's group or of the whole batch.

    rewards [rows]; references [rollouts] default to each rollout's first row, NaN = unscored; row_counts [rollouts] default
    to 1; group_sizes [groups] in rollouts, default one group; in_batch [rollouts] marks those that level `batch` is over,
    default all. Rows of unscored rollouts get 0 (AREAL-WF-50 to 52).
    rewards 1 2 3, row_counts 2 1, references 1 3, eps 0, population std gives -1 0 1.
    """
    rewards = np.asarray(rewards, np.float64)
    counts = np.ones(len(rewards), np.int64) if row_counts is None else np.asarray(row_counts, np.int64)
    first_row = np.cumsum(counts) - counts
    refs = rewards[first_row] if references is None else np.asarray(references, np.float64)
    groups = np.array([len(refs)]) if group_sizes is None else np.asarray(group_sizes, np.int64)
    assert counts.sum() == len(rewards) and len(refs) == len(counts) == groups.sum()
    batch = np.arange(len(refs)) if in_batch is None else np.flatnonzero(in_batch)
    parts = {"group": np.split(np.arange(len(refs)), np.cumsum(groups)[:-1]), "batch": [batch]}
    baseline, divisor = np.zeros(len(refs)), np.ones(len(refs))
    if mean_level == "batch":  # also what a rollout outside of the batch deviates from
        baseline[:] = _baseline(refs[batch], False)[:1] if len(batch) else 0.0
    for members in parts.get(mean_level, []):
        baseline[members] = _baseline(refs[members], leave_one_out)
    for members in parts.get(std_level, []):
        # Around the chosen baseline, also a leave-one-out or batch one; without a baseline around the plain mean.
        center = baseline[members] if mean_level is not None else _baseline(refs[members], False)
        divisor[members] = _divisor(refs[members] - center, unbiased, eps)
    rollout_of_row = np.repeat(np.arange(len(refs)), counts)
    values = (rewards - baseline[rollout_of_row]) / divisor[rollout_of_row]
    return np.where(np.isnan(refs[rollout_of_row]), 0.0, values)


def _baseline(references: np.ndarray, leave_one_out: bool) -> np.ndarray:
    """[n] mean of the scored references; all of them equal gives exactly that value, so that 0.1, 0.1, 0.1 minus it is 0."""
    scored = references[~np.isnan(references)]
    if not len(scored):
        return np.zeros(len(references))
    if np.ptp(scored) == 0 or len(scored) == 1:
        return np.full(len(references), scored[0])
    if leave_one_out:
        return (scored.sum() - references) / (len(scored) - 1)
    return np.full(len(references), scored.mean())


def _divisor(deviations: np.ndarray, unbiased: bool, eps: float) -> float:
    scored = deviations[~np.isnan(deviations)]
    degrees = len(scored) - 1 if unbiased else len(scored)
    if degrees < 1:
        return 1.0
    std = math.sqrt(float((scored**2).sum()) / degrees)
    return 1.0 if std <= eps else std + eps


def over_tokens(
    advantages: np.ndarray,
    tokens: np.ndarray,
    parts: Iterable[np.ndarray],
    *,
    leave_one_out: bool = False,
    unbiased: bool = False,
    eps: float = 1e-8,
) -> np.ndarray:
    """Advantages [samples] normalised over the trained tokens [samples] of each part, a list of sample indices.

    A sample counts as often as it has trained tokens; leave-one-out leaves out one token. NaN marks a sample that is left
    as it is. Advantages 1 and 4 with 2 and 1 tokens, eps 0, population std: -0.70711 and 1.41421.
    """
    values = np.array(advantages, np.float64)
    for part in parts:
        part = part[~np.isnan(values[part])]
        a, weights = values[part], tokens[part].astype(np.float64)
        count, total = weights.sum(), float((weights * a).sum())
        if not len(part) or count == 0:
            continue
        base = (total - a) / (count - 1) if leave_one_out and count > 1 else np.full(len(part), total / count)
        degrees = count - 1 if unbiased else count
        std = math.sqrt(float((weights * (a - base) ** 2).sum()) / degrees) if degrees >= 1 else 0.0
        values[part] = (a - base) / (std + eps if std > eps else 1.0)
    return values


def checked(advantages: Any, rewards: np.ndarray, source: str) -> np.ndarray:
    """The result of an advantage function as float64, or ContractError (ADV-11); unscorable rollouts get 0 (ADV-10)."""
    try:
        values = np.asarray(advantages, np.float64)
    except (TypeError, ValueError) as error:
        raise ContractError(f"advantage function {source} must return one number per rollout: {error}") from error
    if values.shape != rewards.shape:
        raise ContractError(
            f"advantage function {source} must return {len(rewards)} values, one per usable rollout, got shape {values.shape}"
        )
    scored = ~np.isnan(rewards)
    if not np.isfinite(values[scored]).all():
        raise ContractError(
            f"advantage function {source} returned a non-finite value for a scored rollout: {values.tolist()}"
        )
    return np.where(scored, values, 0.0)
