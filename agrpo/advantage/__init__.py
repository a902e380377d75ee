"""Group reward -> advantage."""

from agrpo.advantage.grouped import Grouped, Overlong, Scores
from agrpo.advantage.statistics import checked, normalise, over_tokens

__all__ = ["Grouped", "Overlong", "Scores", "checked", "normalise", "over_tokens"]
