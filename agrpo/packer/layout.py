"""From the samples of a row to its arrays: segments depth first, and one loss term per (sample, trained token)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from agrpo.packer.trie import Node, Trie
from agrpo.types import Ragged, Row, Sample


def lay_out(trie: Trie, samples: Sequence[Sample], leaves: Sequence[Node], load: float) -> Row:
    """The row of `samples`, each ending in the segment of the same index in `leaves`.

    Samples [1 2 3 4 5] and [1 2 3 6 7], last two tokens trained: tokens [1 2 | 3 4 5 | 3 6 7], positions
    [0 1 | 2 3 4 | 2 3 4], predicting indices [2 3 5 6], targets [4 5 6 7] (PACK-2, PACK-3).
    """
    segments = trie.segments()
    starts, ends = _place_segments(segments)
    token_ids, position_ids = _path_arrays(segments)
    trained = [_trained(s) for s in samples]
    counts = np.fromiter((_size(where) for where in trained), np.int64, len(samples))
    return Row(
        token_ids=token_ids,
        position_ids=position_ids,
        segment_starts=starts,
        segment_ends=ends,
        segment_parents=np.fromiter((s.parent.segment for s in segments), np.int32, len(segments)),
        predicting_index=_predicting_index(samples, leaves, trained, counts),
        target_ids=_gather([s.token_ids for s in samples], trained, counts, np.int32),
        sampler_logprobs=_gather([s.sampler_logprobs for s in samples], trained, counts, np.float32),
        advantages=_spread([s.advantage for s in samples], counts, np.float32),
        versions=_gather([s.versions for s in samples], trained, counts, np.int32),
        sample_index=_spread(range(len(samples)), counts, np.int32),
        head_ids=np.concatenate([s.head_ids for s in samples]).astype(np.int32, copy=False),
        head_logprobs=np.concatenate([s.head_logprobs for s in samples]).astype(np.float32, copy=False),
        candidates=_join_candidates(samples),
        group_ids=np.fromiter((s.group_id for s in samples), np.int64, len(samples)),
        rollout_indices=np.fromiter((s.rollout_index for s in samples), np.int32, len(samples)),
        sample_tokens=np.fromiter((len(s.token_ids) for s in samples), np.int32, len(samples)),
        load=load,
    )


def _place_segments(segments: Sequence[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Number the segments and give each its packed place: starts and ends, each [S] int32."""
    start = 0
    for index, segment in enumerate(segments):
        segment.segment, segment.packed_start = index, start
        start += segment.end - segment.start
    starts = np.fromiter((s.packed_start for s in segments), np.int32, len(segments))
    return starts, np.append(starts[1:], np.int32(start))


def _path_arrays(segments: Sequence[Node]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and depths in packed order, each [N] int32."""
    depths = np.arange(max(s.end for s in segments), dtype=np.int32)
    # Written once into place: fresh memory is what costs here, so no array is made only to be added to another.
    num_tokens = segments[-1].packed_start + segments[-1].end - segments[-1].start
    token_ids, position_ids = np.empty(num_tokens, np.int32), np.empty(num_tokens, np.int32)
    for segment in segments:
        where = slice(segment.packed_start, segment.packed_start + segment.end - segment.start)
        token_ids[where] = segment.tokens[segment.start : segment.end]
        position_ids[where] = depths[segment.start : segment.end]
    return token_ids, position_ids


def _trained(sample: Sample) -> slice | np.ndarray:
    """The positions of a sample's trained tokens: a slice where they are contiguous (one copy less), else indices."""
    positions = np.flatnonzero(sample.loss_mask)
    if len(positions) == 0:
        return slice(0, 0)
    first, last = int(positions[0]), int(positions[-1])
    return slice(first, last + 1) if last - first + 1 == len(positions) else positions


def _size(where: slice | np.ndarray) -> int:
    return where.stop - where.start if isinstance(where, slice) else len(where)


def _gather(arrays: list[np.ndarray], trained: list[slice | np.ndarray], counts: np.ndarray, dtype: type) -> np.ndarray:
    """The trained entries of every array, one after the other, [M]."""
    out = np.empty(int(counts.sum()), dtype)
    start = 0
    for array, where, count in zip(arrays, trained, counts.tolist(), strict=True):
        out[start : start + count] = array[where]
        start += count
    return out


def _spread(values: Iterable[float], counts: np.ndarray, dtype: type) -> np.ndarray:
    """Value i `counts[i]` times, one after the other, [M]."""
    out = np.empty(int(counts.sum()), dtype)
    start = 0
    for value, count in zip(values, counts.tolist(), strict=True):
        out[start : start + count] = value
        start += count
    return out


def _predicting_index(
    samples: Sequence[Sample], leaves: Sequence[Node], trained: list[slice | np.ndarray], counts: np.ndarray
) -> np.ndarray:
    """Packed position of the predecessor of every trained token on its sample's path, [M] int32."""
    out = np.empty(int(counts.sum()), np.int32)
    positions = np.arange(max(len(s.token_ids) for s in samples), dtype=np.int32)
    start = 0
    for sample, leaf, where in zip(samples, leaves, trained, strict=True):
        predicted = positions[where]
        for node in _path(leaf):
            # Segment [start, end) predicts the tokens start + 1 to end; packed index = depth + a shift per segment.
            count = int(np.count_nonzero(sample.loss_mask[node.start + 1 : node.end + 1]))
            np.add(predicted[:count], node.packed_start - node.start - 1, out=out[start : start + count])
            predicted, start = predicted[count:], start + count
    return out


def _path(leaf: Node) -> list[Node]:
    """The segments from below the root to `leaf`."""
    path = []
    while leaf.parent is not None:
        path.append(leaf)
        leaf = leaf.parent
    return path[::-1]


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
