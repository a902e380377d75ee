"""From the samples of a row to its arrays: segments depth first, and one loss term per (sample, trained token)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from agrpo.packer.trie import Node, Trie
from agrpo.types import Ragged, Row, Sample


def lay_out(trie: Trie, samples: Sequence[Sample], leaves: Sequence[Node], load: float) -> Row:
    """The row of `samples`, each ending in the segment of the same index in `leaves`.

    Samples [1 2 3 4 5] and [1 2 3 6 7], last two tokens trained: tokens [1 2 | 3 4 5 | 3 6 7], positions
    [0 1 | 2 3 4 | 2 3 4], predicting indices [2 3 5 6], targets [4 5 6 7] (PACK-2, PACK-3).
    """
    segments = trie.segments()
    starts, lengths, ends = _place_segments(segments)
    token_ids = np.concatenate([s.tokens[s.start : s.end] for s in segments]).astype(np.int32, copy=False)
    first_depths = np.fromiter((s.start for s in segments), np.int32, len(segments))
    position_ids = np.arange(len(token_ids), dtype=np.int32) - np.repeat(starts - first_depths, lengths)
    trained = [_trained(s) for s in samples]
    counts = np.fromiter((s.num_trained_tokens for s in samples), np.int64, len(samples))
    return Row(
        token_ids=token_ids,
        position_ids=position_ids,
        segment_starts=starts,
        segment_ends=ends,
        segment_parents=np.fromiter((s.parent.segment for s in segments), np.int32, len(segments)),
        predicting_index=_predicting_index(samples, leaves, trained, counts),
        target_ids=_gather([s.token_ids for s in samples], trained, counts, np.int32),
        sampler_logprobs=_gather([s.sampler_logprobs for s in samples], trained, counts, np.float32),
        advantages=np.repeat(np.asarray([s.advantage for s in samples], np.float32), counts),
        versions=_gather([s.versions for s in samples], trained, counts, np.int32),
        sample_index=np.repeat(np.arange(len(samples), dtype=np.int32), counts),
        head_ids=np.concatenate([s.head_ids for s in samples]).astype(np.int32, copy=False),
        head_logprobs=np.concatenate([s.head_logprobs for s in samples]).astype(np.float32, copy=False),
        candidates=_join_candidates(samples),
        group_ids=np.fromiter((s.group_id for s in samples), np.int64, len(samples)),
        rollout_indices=np.fromiter((s.rollout_index for s in samples), np.int32, len(samples)),
        sample_tokens=np.fromiter((len(s.token_ids) for s in samples), np.int32, len(samples)),
        load=load,
    )


def _place_segments(segments: Sequence[Node]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number the segments and give each its packed place: starts, lengths and ends, each [S] int32."""
    lengths = np.fromiter((s.end - s.start for s in segments), np.int32, len(segments))
    ends = np.cumsum(lengths, dtype=np.int32)
    starts = ends - lengths
    for index, (segment, start) in enumerate(zip(segments, starts.tolist(), strict=True)):
        segment.segment, segment.packed_start = index, start
    return starts, lengths, ends


def _trained(sample: Sample) -> slice | np.ndarray:
    """The positions of a sample's trained tokens: a slice where they are contiguous (one copy less), else indices."""
    positions = np.flatnonzero(sample.loss_mask)
    if len(positions) == 0:
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


def _gather(arrays: list[np.ndarray], trained: list[slice | np.ndarray], counts: np.ndarray, dtype: type) -> np.ndarray:
    """The trained entries of every array, one after the other, [M]."""
    out = np.empty(int(counts.sum()), dtype)
    start = 0
    for array, where, count in zip(arrays, trained, counts.tolist(), strict=True):
        out[start : start + count] = array[where]
        start += count
    return out


def _predicting_index(
    samples: Sequence[Sample], leaves: Sequence[Node], trained: list[slice | np.ndarray], counts: np.ndarray
) -> np.ndarray:
    """Packed position of the predecessor of every trained token on its sample's path, [M] int32."""
    shifts, runs = [], []  # packed index minus depth, and how many trained tokens a segment of a path predicts
    for sample, leaf in zip(samples, leaves, strict=True):
        path = []
        node = leaf
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for node in reversed(path):
            shifts.append(node.packed_start - node.start)
            runs.append(int(np.count_nonzero(sample.loss_mask[node.start + 1 : node.end + 1])))
    out = np.repeat(np.asarray(shifts, np.int32), runs)
    start = 0
    for where, count in zip(trained, counts.tolist(), strict=True):
        depths = np.arange(where.start, where.stop, dtype=np.int32) if isinstance(where, slice) else where
        out[start : start + count] += depths.astype(np.int32, copy=False) - 1
        start += count
    return out


def _join_candidates(samples: Sequence[Sample]) -> Ragged | None:
    """The candidate sets of all loss terms, or None where the sampler cut nothing off."""
    sets = [s.candidates for s in samples]
    if all(c is None for c in sets):
        return None
    if any(c is None for c in sets):
        raise ValueError("samples with and without candidate sets meet in one row")
    sizes = np.concatenate([np.diff(c.offsets) for c in sets])
    values = np.concatenate([c.values[c.offsets[0] : c.offsets[-1]] for c in sets])
    return Ragged(values, np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes, dtype=np.int64)]))
