"""Turns of a rollout -> samples (TURN-2 to TURN-9). No token is rewritten, realigned or lost: append, or start anew.

A turn whose prompt begins with everything the growing sample holds extends that sample; any other turn is a fork and
starts a sample of its own. Turns [p | a] then [p a q | b] are one sample p a q b, trained on a and b; after [p | a] a
turn [p x | b] gives two samples: p a and p x b.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from agrpo.types import Ragged, Rollout, Sample, Turn


def chains_of(rollout: Rollout) -> list[list[Turn]]:
    """The turns of each sample of a rollout; turns that are training rows of their own are never joined."""
    return chains(rollout.turns) if rollout.row_offsets is None else [[turn] for turn in rollout.turns]


def chains(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns of each sample, in order; several chains mean forks."""
    found: list[list[Turn]] = []
    for turn in turns:
        if found and _extends(turn, found[-1][-1]):
            found[-1].append(turn)
        else:
            found.append([turn])
    return found


def _extends(turn: Turn, last: Turn) -> bool:
    # The last turn's prompt and output are all that the growing sample holds, because each turn extended the one before.
    prompt, seen = len(last.prompt_ids), len(last.prompt_ids) + len(last.output_ids)
    return (
        len(turn.prompt_ids) >= seen
        and np.array_equal(turn.prompt_ids[:prompt], last.prompt_ids)
        and np.array_equal(turn.prompt_ids[prompt:seen], last.output_ids)
    )


def forwarded_tokens(rollout: Rollout) -> int:
    """Raw tokens that training this rollout forwards: the unit of admission (STA-5)."""
    kept = [c for c in chains_of(rollout) if any(t.output_mask.any() for t in c)]
    return sum(len(c[-1].prompt_ids) + len(c[-1].output_ids) for c in kept)


def drift_tokens(turns: Sequence[Turn]) -> list[int]:
    """Per transition between turns the held tokens that are rendered again after a fork; 0 where the turn extends."""
    drifts = []
    for last, turn in zip(turns, turns[1:], strict=False):
        held = np.concatenate([last.prompt_ids, last.output_ids])
        shared = min(len(held), len(turn.prompt_ids))
        differs = np.flatnonzero(held[:shared] != turn.prompt_ids[:shared])
        drifts.append(len(held) - int(differs[0] if len(differs) else shared))
    return drifts


def stitch(
    rollout: Rollout, advantage: Any, group_id: int, slot: int, reward: Any = float("nan")
) -> list[Sample]:
    """The samples of a rollout (TURN-7); those without a trained token are left out (TURN-8).

    `advantage` and `reward` are one number for all samples, or one per row where the turns are rows of their own.
    """
    found = chains_of(rollout)
    rows = zip(found, np.broadcast_to(advantage, len(found)), np.broadcast_to(reward, len(found)), strict=True)
    samples = [_sample(chain, float(a), float(r), group_id, slot) for chain, a, r in rows]
    return [s for s in samples if s.loss_mask.any()]


def _sample(chain: list[Turn], advantage: float, reward: float, group_id: int, slot: int) -> Sample:
    token_ids = np.concatenate([chain[-1].prompt_ids, chain[-1].output_ids]).astype(np.int32, copy=False)
    loss_mask = np.zeros(len(token_ids), np.bool_)
    logprobs = np.zeros(len(token_ids), np.float32)
    versions = np.full(len(token_ids), -1, np.int32)
    for turn in chain:
        output = slice(len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.output_ids))
        loss_mask[output] = turn.output_mask
        logprobs[output] = np.where(turn.output_mask, turn.sampler_logprobs, 0)
        versions[output] = np.where(turn.output_mask, turn.versions, -1)
    return Sample(
        token_ids=token_ids,
        loss_mask=loss_mask,
        sampler_logprobs=logprobs,
        versions=versions,
        advantage=advantage,
        head_ids=np.concatenate([t.head_ids[t.output_mask] for t in chain]),
        head_logprobs=np.concatenate([t.head_logprobs[t.output_mask] for t in chain]),
        candidates=_candidates(chain),
        group_id=group_id,
        rollout_index=slot,
        reward=reward,
    )


def _candidates(chain: list[Turn]) -> Ragged | None:
    if any(t.candidates is None for t in chain):
        return None
    return Ragged.of([t.candidates[int(i)] for t in chain for i in np.flatnonzero(t.output_mask)])
