"""The attention plan of one row: what each attention back end needs to know of its prefix tree, made once per row.

A row is laid out depth first, so the descendants of a segment are one contiguous range behind it. Attention over a
tree is therefore a sum of contiguous rectangles without any gathered copy of a prefix (PACK-9):

    segments  P (0, 2)   A (2, 5)   B (5, 8)         rectangles  P x P, A x A, B x B causal; [A B] x P full

Each query's rectangles are joined exactly by their log-sum-exp. A sliding window counts along the path (PACK-10).
Back ends whose kernels take one sequence of keys per segment get the positions of each path instead (`paths`).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
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
    rows: torch.Tensor | None = None  # [n] row positions of the bucket without padding
    slots: torch.Tensor | None = None  # [n] their places among the B * L


@dataclass(frozen=True, slots=True)
class Blocks:
    own: tuple[Block, ...]  # together they cover every query once
    cross: tuple[Block, ...]  # queries against the keys of an ancestor


@dataclass(frozen=True, slots=True)
class Paths:
    """Each segment's queries and the keys of its whole path, as kernels for sequences of different lengths take them."""

    index: torch.Tensor  # [K] int64, row positions of the keys of all paths, path after path
    query_starts: torch.Tensor  # [S + 1] int32
    key_starts: torch.Tensor  # [S + 1] int32
    longest_query: int
    longest_key: int
    bounds: tuple[tuple[int, int, int, int], ...]  # of each segment: first and end query, first and end key

    @property
    def num_keys(self) -> int:
        """K, keys of all paths; the number of tokens where nothing is shared."""
        return self.bounds[-1][3]


class TreePlan:
    """Segments of one row, and what back ends make of them on first use.

    No dataclass: FSDP2 would look into every field at each layer, and under mixed precision copy the plan without what it
    keeps.
    """

    def __init__(self, starts, ends, parents, depths: torch.Tensor, depth_starts, subtree_ends):
        self.starts: np.ndarray = starts  # [S] int64
        self.ends: np.ndarray = ends  # [S] int64
        self.parents: np.ndarray = parents  # [S] int64, -1 = root
        self.depths = depths  # [N] int64 on the device, position of each token on its path
        self.depth_starts: np.ndarray = depth_starts  # [S] int64, depth of each segment's first token
        self.subtree_ends: np.ndarray = subtree_ends  # [S] int64, end of the last descendant
        self._kept: dict[Hashable, Any] = {}
        paths = depth_starts + ends - starts
        self.longest_path = int(paths.max(initial=0))
        # Keys gathered along all paths per token of the row, 1 where nothing is shared.
        self.copies = float(paths.sum() / max(1, ends[-1])) if len(ends) else 1.0

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
        return self.kept(kind, lambda: kind.of(self))

    def kept(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """What a back end makes of this plan, made once."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def effective_window(self, window: int | None) -> int | None:
        """The sliding window of `window` keys, the query's own included; None where no path is longer."""
        return window if window is not None and window < self.longest_path else None

    @property
    def host_depths(self) -> np.ndarray:
        """[N] int64, `depths` without asking the device."""
        offsets = np.repeat(self.depth_starts - self.starts, self.ends - self.starts)
        return offsets + np.arange(len(offsets))

    @property
    def last_queries(self) -> np.ndarray:
        """[N] int32, end of the queries that can see each token: that of its segment's subtree."""
        return np.repeat(self.subtree_ends, self.ends - self.starts).astype(np.int32)

    @property
    def paths(self) -> Paths:
        """The path of each segment."""
        return self.kept("paths", self._paths)

    def _paths(self) -> Paths:
        paths: list[np.ndarray] = []
        for start, end, parent in zip(self.starts, self.ends, self.parents, strict=True):
            own = np.arange(start, end)
            paths.append(own if parent < 0 else np.concatenate([paths[parent], own]))
        lengths = np.array([len(path) for path in paths], np.int64)
        keys = np.concatenate([[0], np.cumsum(lengths)])
        device, bounds = self.depths.device, zip(self.starts, self.ends, keys[:-1], keys[1:], strict=True)
        return Paths(
            index=on_device(np.concatenate(paths), device),
            query_starts=on_device(np.append(self.starts, self.ends[-1]).astype(np.int32), device),
            key_starts=on_device(keys.astype(np.int32), device),
            longest_query=int((self.ends - self.starts).max()),
            longest_key=int(lengths.max()),
            bounds=tuple(tuple(int(x) for x in bound) for bound in bounds),
        )

    def blocks(self, window: int | None) -> Blocks:
        """The rectangles under a sliding window of `window` keys, the query's own included; None = no window."""
        window = self.effective_window(window)
        return self.kept(("blocks", window), lambda: self._blocks(window))

    def _blocks(self, window: int | None) -> Blocks:
        cross = self._full() if window is None else self._banded(window)
        return Blocks(tuple(self._own(window)), tuple(cross))

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
        valid = index <= last
        arrays = (np.minimum(index, last), valid, index[valid], np.flatnonzero(valid))
        return Block("causal", slice(0), slice(0), *(on_device(x, self.depths.device) for x in arrays))

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


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device; to a GPU from pinned memory, so that the host does not wait for the work before it."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
