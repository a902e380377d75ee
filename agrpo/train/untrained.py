"""The groups whose samples have arrived and are not trained yet."""

from __future__ import annotations

import dataclasses

from agrpo import wire
from agrpo.types import ReadyGroup, Sample


class Untrained:
    """Groups by id, each as long as one of its samples is left. The feeder's lock guards it."""

    def __init__(self) -> None:
        self._groups: dict[int, ReadyGroup] = {}
        self._samples: dict[int, list[Sample]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def group_ids(self) -> list[int]:
        return list(self._groups)

    @property
    def num_samples(self) -> int:
        return sum(map(len, self._samples.values()))

    @property
    def num_tokens(self) -> int:
        """Tokens to train in all of them."""
        return sum(s.num_trained_tokens for samples in self._samples.values() for s in samples)

    def group(self, group_id: int) -> ReadyGroup:
        """As it arrived, with all its samples."""
        return self._groups[group_id]

    def add(self, group: ReadyGroup) -> None:
        self._groups[group.group_id] = group
        self._samples[group.group_id] = list(group.samples)

    def forget(self, sample: Sample) -> None:
        """The sample is trained or dropped; with its last one the group leaves."""
        rest = [s for s in self._samples[sample.group_id] if s is not sample]
        if rest:
            self._samples[sample.group_id] = rest
        else:
            del self._samples[sample.group_id], self._groups[sample.group_id]

    def frames(self) -> bytes:
        """Every group with the samples that are left, for a checkpoint."""
        left = (dataclasses.replace(self._groups[g], samples=tuple(s)) for g, s in self._samples.items())
        return b"".join(wire.frame(group) for group in left)
