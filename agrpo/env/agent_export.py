"""From the answers an agent got to the training rows of its rollout (`rollout.agent.export_style`).

    concat       one row per conversation: answers that go on from each other are one token sequence, every answer trained
    individual   one row per answer, with the conversation before it as context

The reward of an answer counts for the earlier ones too, times `rollout.agent.turn_discount` per answer between. A row has
the reward of its last answer; the reward of the rollout, which rollouts are compared by, is that of its last answer
(AREAL-WF-53).
"""

from __future__ import annotations

import numpy as np

from agrpo.env.joined import joined
from agrpo.env.proxy import Interaction
from agrpo.env.stitch import chains
from agrpo.types import Turn


def exported(given: list[Interaction], style: str, discount: float) -> tuple[tuple[Turn, ...], np.ndarray | None]:
    """(turns, `Rollout.row_offsets`) of the answers in the order they were asked for."""
    reference = given[-1].reward or 0.0
    offset = dict(zip(given, np.subtract(discounted([i.reward for i in given], discount), reference), strict=True))
    if style == "individual":
        return tuple(i.turn for i in given), np.array([offset[i] for i in given], np.float64)
    ordered = in_conversations(given)
    rows = chains([i.turn for i in ordered])
    ends = np.cumsum([len(row) for row in rows]) - 1
    offsets = np.array([offset[ordered[end]] for end in ends], np.float64)
    if not offsets.any():
        return tuple(i.turn for i in ordered), None
    return tuple(joined(row) for row in rows), offsets


def discounted(rewards: list[float | None], discount: float) -> list[float]:
    """Each reward with the discounted ones after it: None, None, 1 with 0.9 gives 0.81, 0.9, 1."""
    found, after = [], 0.0
    for reward in reversed(rewards):
        after = after * discount + (reward or 0.0)
        found.append(after)
    return found[::-1]


def in_conversations(given: list[Interaction]) -> list[Interaction]:
    """The interactions with each answer right after the one it goes on from; of several that do, the first.

    Requests of conversations that alternate, a1 b1 a2 b2, become a1 a2 b1 b2, so that each is one sample.
    """
    next_of: dict[Interaction, Interaction] = {}
    for interaction in given:
        if interaction.parent in given:
            next_of.setdefault(interaction.parent, interaction)
    ordered, continuing = [], set(next_of.values())
    for interaction in given:
        if interaction not in continuing:
            following: Interaction | None = interaction
            while following is not None:
                ordered.append(following)
                following = next_of.get(following)
    return ordered
