"""Process 1: prompts in, scored samples out. asyncio and numpy; no GPU.

A loop of the user's own is written with the names below.
"""

from agrpo.rollout.hooks import Rollout, RolloutGroup, RolloutLoop, TrainingSequence, TurnRecord

__all__ = ["Rollout", "RolloutGroup", "RolloutLoop", "TrainingSequence", "TurnRecord"]
