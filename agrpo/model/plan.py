"""The attention plan of one row: which rectangles of (queries x keys) a prefix tree needs, made once per row.

A row is laid out depth first, so the descendants of a segment are one contiguous range behind it. Attention over a
tree is therefore a sum of contiguous rectangles without any gathered copy of a prefix (PACK-9):

    segments  P (0, 2)   A (2, 5)   B (5, 8)         rectangles  P x P, A x A, B x B causal; [A B] x P full

Each query's rectangles are joined exactly by their log-sum-exp. A sliding window counts along the path (PACK-10).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import torch

T = TypeVar("T")
_QUERY_CHUNK = 256  # queries per masked rectangle, bounds its mask to chunk x (window + chunk)
_BUCKET_LIMIT = 256  # longer segments run alone: batching them gains nothing and would copy them
_BUCKET_SLACK = 16  # tokens of padding a segment may get to join a batch


@dataclass(frozen=True, slots=True)
class Block:
    """One rectangle: `query` and `key` are slices of the row, or `query` is a bucket of equal-length segments."""

    kind: str  # "causal" (query range = key range), "full" or "band" (masked by depth and window)
    query: slice
    key: slice
    index: torch.Tensor | None = None  # [B, L] row positions of a bucket of segments; padding repeats the last token
    valid: torch.Tensor | None = None  # [B, L] false at padding


@dataclass(frozen=True, slots=True)
class Blocks:
    own: tuple[Block, ...]  # together they cover every query once
    cross: tuple[Block, ...]  # queries against the keys of an ancestor


@dataclass(frozen=True)
class TreePlan:
    """Segments of one row and the rectangles of each sliding window, made on first use and kept."""

    starts: np.ndarray  # [S] int64
    ends: np.ndarray  # [S] int64
    parents: np.ndarray  # [S] int64, -1 = root
    depths: torch.Tensor  # [N] int64 on the device, position of each token on its path
    depth_starts: np.ndarray  # [S] int64, depth of each segment's first token
    subtree_ends: np.ndarray  # [S] int64, end of the last descendant
    _blocks: dict[int | None, Blocks] = field(default_factory=dict)
    _derived: dict[type, Any] = field(default_factory=dict)

    @staticmethod
    def of(starts: np.ndarray, ends: np.ndarray, parents: np.ndarray, depths: torch.Tensor) -> TreePlan:
        """The plan of the row with these segments; `depths` are its position ids on the device."""
        starts, ends, parents = (np.asarray(x, np.int64) for x in (starts, ends, parents))
        depth_starts, subtree_ends = np.zeros_like(starts), ends.copy()
        for s, parent in enumerate(parents):
            if parent >= 0:
                depth_starts[s] = depth_starts[parent] + ends[parent] - starts[parent]
        for s in range(len(parents) - 1, -1, -1):
            if parents[s] >= 0:
                subtree_ends[parents[s]] = max(subtree_ends[parents[s]], subtree_ends[s])
        return TreePlan(starts, ends, parents, depths, depth_starts, subtree_ends)

    def derived(self, kind: type[T]) -> T:
        """What layers of another sort need of the row: `kind.of(self)`, made on first use and kept."""
        if kind not in self._derived:
            self._derived[kind] = kind.of(self)
        return self._derived[kind]

    def blocks(self, window: int | None) -> Blocks:
        """The rectangles under a sliding window of `window` keys, the query's own included; None = no window."""
        depth_ends = self.depth_starts + self.ends - self.starts
        if window is not None and (len(depth_ends) == 0 or window >= depth_ends.max()):
            window = None  # no path is longer than the window
        if window not in self._blocks:
            own = self._own(window)
            cross = self._full() if window is None else self._banded(window)
            self._blocks[window] = Blocks(tuple(own), tuple(cross))
        return self._blocks[window]

    def _own(self, window: int | None) -> list[Block]:
        lengths = self.ends - self.starts
        blocks, short = [], []
        for s in np.argsort(-lengths, kind="stable"):
            span = slice(int(self.starts[s]), int(self.ends[s]))
            if window is not None and lengths[s] > window:
                blocks += _bands(span, span, window)
            elif lengths[s] > _BUCKET_LIMIT:
                blocks.append(Block("causal", span, span))
            else:
                short.append(s)
        while short:
            longest = lengths[short[0]]
            bucket = [s for s in short if longest - lengths[s] <= _BUCKET_SLACK]
            short = short[len(bucket) :]
            blocks.append(self._bucket(np.asarray(bucket), int(longest)))
        return blocks

    def _bucket(self, segments: np.ndarray, longest: int) -> Block:
        if len(segments) == 1:
            span = slice(int(self.starts[segments[0]]), int(self.ends[segments[0]]))
            return Block("causal", span, span)
        index = self.starts[segments, None] + np.arange(longest)
        last = self.ends[segments, None] - 1
        valid = torch.from_numpy(index <= last).to(self.depths.device)
        rows = torch.from_numpy(np.minimum(index, last)).to(self.depths.device)
        return Block("causal", slice(0), slice(0), rows, valid)

    def _full(self) -> list[Block]:
        return [
            Block("full", slice(int(end), int(last)), slice(int(start), int(end)))
            for start, end, last in zip(self.starts, self.ends, self.subtree_ends, strict=True)
            if last > end
        ]

    def _banded(self, window: int) -> list[Block]:
        blocks = []
        for s in range(len(self.starts)):
            ancestor = self.parents[s]
            while ancestor >= 0:
                blocks += self._pair(s, ancestor, window)
                ancestor = self.parents[ancestor]
        return blocks

    def _pair(self, s: int, ancestor: int, window: int) -> list[Block]:
        """Queries of segment `s` against the keys of `ancestor` that lie inside the window of at least one of them."""
        depth, key_depth = self.depth_starts[s], self.depth_starts[ancestor]
        key_end_depth = key_depth + self.ends[ancestor] - self.starts[ancestor]
        seeing = min(self.ends[s] - self.starts[s], key_end_depth + window - 1 - depth)
        if seeing <= 0:
            return []
        first_key = self.starts[ancestor] + max(0, depth - window + 1 - key_depth)
        query = slice(int(self.starts[s]), int(self.starts[s] + seeing))
        key = slice(int(first_key), int(self.ends[ancestor]))
        if depth + seeing - window <= key_depth + first_key - self.starts[ancestor]:
            return [Block("full", query, key)]
        return [
            Block("band", slice(q, min(q + _QUERY_CHUNK, query.stop)), key)
            for q in range(query.start, query.stop, _QUERY_CHUNK)
        ]


def _bands(query: slice, key: slice, window: int) -> list[Block]:
    """A segment longer than the window against itself, in chunks of queries with just the keys they can see."""
    blocks = []
    for first in range(query.start, query.stop, _QUERY_CHUNK):
        last = min(first + _QUERY_CHUNK, query.stop)
        blocks.append(Block("band", slice(first, last), slice(max(key.start, first - window + 1), last)))
    return blocks
