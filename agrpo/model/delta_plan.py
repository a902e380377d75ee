"""What Gated DeltaNet layers need to know of a row: each token's predecessors, and the order of its chunks.

Segments are cut into chunks of at most `size` tokens. A chunk continues the one before it in its segment, the first one
the last of its parent segment, so the chunks are a tree of their own. All chunks of one depth form a wave and run
together: a row takes as many steps as its longest path has chunks, however many branches it has (PACK-11).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch

from agrpo.model.plan import TreePlan, on_device

_SIZES = (64, 32, 16)
_SLACK = 0.25  # padding that a larger chunk may cost, as a share of the row's tokens


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks in the order of their waves; token N stands for padding."""

    tokens: torch.Tensor  # [C * size] int64, the row's token at each place
    places: torch.Tensor  # [N] int64, the place of each token
    size: int
    waves: tuple[int, ...]  # chunks per wave
    origins: tuple[torch.Tensor | None, ...]  # per wave: the chunk of the wave before; None = all in order


@dataclass(frozen=True, slots=True)
class Level:
    """The segments of one depth of the tree, for a kernel that takes several sequences behind each other."""

    tokens: torch.Tensor | None  # [n] int64, None = the whole row in order
    bounds: torch.Tensor  # [S + 1] int64, where each segment begins among these tokens
    origins: torch.Tensor | None  # [S] int64, the parent among the segments of the level before; None at the roots


@dataclass(frozen=True)
class DeltaPlan:
    """Made once per row by `TreePlan.derived`; each part on first use."""

    tree: TreePlan
    num_tokens: int

    @staticmethod
    def of(tree: TreePlan) -> DeltaPlan:
        return DeltaPlan(tree, len(tree.depths))

    @functools.cached_property
    def chunks(self) -> Chunks:
        return _chunks(self.tree, self.num_tokens)

    @functools.cached_property
    def levels(self) -> tuple[Level, ...]:
        return _levels(self.tree, self.num_tokens)

    @functools.cached_property
    def previous(self) -> torch.Tensor:
        """[N + 1] int64, the token before each on its path; N = none."""
        tree, none = self.tree, self.num_tokens
        previous = np.append(np.arange(-1, none - 1), none)
        previous[tree.starts] = np.where(tree.parents >= 0, tree.ends[tree.parents] - 1, none)
        return on_device(previous, tree.depths.device)

    def predecessors(self, count: int) -> list[torch.Tensor]:
        """[N] token indices 0, 1, .. `count` - 1 steps back on the path; N = before its start."""
        steps = [torch.arange(self.num_tokens, device=self.previous.device)]
        for _ in range(count - 1):
            steps.append(self.previous[steps[-1]])
        return steps


def _chunk_size(lengths: np.ndarray) -> int:
    for size in _SIZES:
        if (-lengths % size).sum() <= _SLACK * lengths.sum():
            return size
    return _SIZES[-1]


def _chunks(plan: TreePlan, num_tokens: int) -> Chunks:
    size = _chunk_size(plan.ends - plan.starts)
    waves: list[list[tuple[int, int, int]]] = []  # per wave (first token, end, origin in the wave before)
    last: list[tuple[int, int]] = []  # per segment: wave and place of its last chunk
    for start, end, parent in zip(plan.starts, plan.ends, plan.parents, strict=True):
        wave, origin = (last[parent][0] + 1, last[parent][1]) if parent >= 0 else (0, -1)
        for first in range(int(start), int(end), size):
            if wave == len(waves):
                waves.append([])
            waves[wave].append((first, min(first + size, int(end)), origin))
            wave, origin = wave + 1, len(waves[wave]) - 1
        last.append((wave - 1, origin))
    tokens = np.full((sum(map(len, waves)), size), num_tokens, np.int64)
    for row, (first, end, _) in zip(tokens, [c for wave in waves for c in wave], strict=True):
        row[: end - first] = np.arange(first, end)
    tokens = tokens.reshape(-1)
    places = np.empty(num_tokens, np.int64)
    held = np.flatnonzero(tokens < num_tokens)
    places[tokens[held]] = held
    device, origins = plan.depths.device, [None]
    for before, wave in zip(waves, waves[1:], strict=False):
        origin = np.array([c[2] for c in wave], np.int64)
        in_order = len(origin) == len(before) and (origin == np.arange(len(origin))).all()
        origins.append(None if in_order else on_device(origin, device))
    return Chunks(
        on_device(tokens, device), on_device(places, device), size, tuple(map(len, waves)),
        tuple(origins),
    )  # fmt: skip


def _levels(plan: TreePlan, num_tokens: int) -> tuple[Level, ...]:
    depth = np.zeros(len(plan.parents), np.int64)
    for s, parent in enumerate(plan.parents):
        depth[s] = depth[parent] + 1 if parent >= 0 else 0
    place = np.zeros_like(depth)
    device, levels = plan.depths.device, []
    for level in range(depth.max(initial=-1) + 1):
        segments = np.flatnonzero(depth == level)
        place[segments] = np.arange(len(segments))
        lengths = plan.ends[segments] - plan.starts[segments]
        bounds = np.concatenate([[0], lengths.cumsum()])
        tokens = np.arange(bounds[-1]) + np.repeat(plan.starts[segments] - bounds[:-1], lengths)
        levels.append(
            Level(
                None if len(tokens) == num_tokens else on_device(tokens, device),
                on_device(bounds, device),
                on_device(place[plan.parents[segments]], device) if level else None,
            )
        )
    return tuple(levels)
