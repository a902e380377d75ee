"""Builders of samples, and an independent account of what a row must hold: sets of prefixes instead of a trie."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from agrpo.types import Ragged, Row, Sample


def make_sample(
    token_ids, num_trained=None, *, mask=None, group_id=0, rollout_index=0, num_head=0, candidates=False
) -> Sample:
    """A sample whose last `num_trained` tokens (or those of `mask`) are trained; every value tells where it is from."""
    token_ids = np.asarray(token_ids, np.int32)
    length = len(token_ids)
    if mask is None:
        mask = np.arange(length) >= length - (length - 1 if num_trained is None else num_trained)
    mask = np.asarray(mask, bool)
    trained = np.flatnonzero(mask)
    tag = group_id * 100 + rollout_index
    heads = (tag * 1000 + trained[:, None] * 10 + np.arange(num_head)).astype(np.int32)
    return Sample(
        token_ids=token_ids,
        loss_mask=mask,
        sampler_logprobs=np.where(mask, -0.5 - np.arange(length) / 64 - tag, 0).astype(np.float32),
        versions=np.where(mask, tag + np.arange(length) % 3, -1).astype(np.int32),
        advantage=float(tag) - 7.5,
        head_ids=heads,
        head_logprobs=-(heads.astype(np.float32)) / 8,
        candidates=Ragged.of([list(range(tag, tag + int(t) % 4)) for t in trained]) if candidates else None,
        group_id=group_id,
        rollout_index=rollout_index,
    )


def unique_positions(samples) -> set[tuple]:
    """Every distinct position of the samples: its tokens so far and its next token (PACK-2)."""
    found = set()
    for sample in samples:
        tokens = tuple(sample.token_ids.tolist())
        found |= {(tokens[: i + 1], tokens[i + 1] if i + 1 < len(tokens) else None) for i in range(len(tokens))}
    return found


def attention_cost(samples) -> int:
    return sum(len(path) for path, _ in unique_positions(samples))


def paths(row: Row) -> list[list[int]]:
    """Packed indices from the root to the end of each segment, from the parents alone."""
    found: list[list[int]] = []
    for start, end, parent in zip(row.segment_starts, row.segment_ends, row.segment_parents, strict=True):
        found.append((found[parent] if parent >= 0 else []) + list(range(start, end)))
    return found


def identity(row_or_samples) -> list[tuple[int, int]]:
    """(group, slot) of every sample, in order."""
    if isinstance(row_or_samples, Row):
        return list(zip(row_or_samples.group_ids.tolist(), row_or_samples.rollout_indices.tolist(), strict=True))
    return [(s.group_id, s.rollout_index) for s in row_or_samples]


@st.composite
def sample_lists(draw, max_samples=23, candidates=False, num_head=0):
    """Samples over three tokens, so that prefixes, forks, identical samples and shared beginnings are common."""
    beginnings = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=5))
    num_samples = draw(st.integers(1, max_samples))
    samples, slots = [], {}
    for _ in range(num_samples):
        group_id = draw(st.integers(0, 4))
        tokens = [*draw(st.sampled_from(beginnings)), *draw(st.lists(st.integers(0, 2), max_size=7))]
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(tokens) - 1, max_size=len(tokens) - 1))]
        slots[group_id] = slots.get(group_id, -1) + 1
        options = {"num_head": num_head, "candidates": candidates}
        samples.append(make_sample(tokens, mask=mask, group_id=group_id, rollout_index=slots[group_id], **options))
    return samples
