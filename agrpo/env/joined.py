"""Turns of one conversation as a single turn: for rows with a reward of their own, and for records of what was played."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np

from agrpo.env.stitch import chains_of
from agrpo.types import Ragged, Rollout, Turn


def rows(rollout: Rollout) -> list[Turn]:
    """The training rows of a rollout, each as one turn, in order."""
    return [joined(chain) for chain in chains_of(rollout)]


def joined(chain: list[Turn]) -> Turn:
    """A chain of turns as one: the first prompt, then everything after it, of which only the answers are trained."""
    if len(chain) == 1:
        return chain[0]
    first, last = chain[0], chain[-1]
    start = len(first.prompt_ids)
    token_ids = np.concatenate([last.prompt_ids, last.output_ids])
    places = [slice(len(t.prompt_ids) - start, len(t.prompt_ids) - start + len(t.output_ids)) for t in chain]

    def spread(name: str, fill: float) -> np.ndarray:
        """The values of each answer at its place, `fill` at what stands between them."""
        values = [getattr(t, name) for t in chain]
        whole = np.full((len(token_ids) - start, *values[0].shape[1:]), fill, values[0].dtype)
        for place, value in zip(places, values, strict=True):
            whole[place] = value
        return whole

    return dataclasses.replace(
        last,
        prompt_ids=first.prompt_ids,
        output_ids=token_ids[start:].astype(np.int32),
        sampler_logprobs=spread("sampler_logprobs", 0.0),
        output_mask=spread("output_mask", False),
        versions=spread("versions", -1),
        head_ids=spread("head_ids", 0),
        head_logprobs=spread("head_logprobs", -np.inf),
        candidates=_candidates(chain, places, len(token_ids) - start),
    )


def _candidates(chain: list[Turn], places: Iterable[slice], num_tokens: int) -> Ragged | None:
    if any(t.candidates is None for t in chain):
        return None
    lists: list[np.ndarray] = [np.zeros(0, np.int32)] * num_tokens
    for turn, place in zip(chain, places, strict=True):
        lists[place] = [turn.candidates[i] for i in range(len(turn.output_ids))]
    return Ragged.of(lists)
