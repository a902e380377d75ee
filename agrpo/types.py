"""What flows between the stations: frozen carriers of numpy arrays, made once and never mutated.

Every array is token aligned: value i belongs to token i. Only the packer shifts by one. Tokens change form three times:
Turn -> Sample -> Row -> device; Rollout, Group, ReadyGroup, Microbatch and Step only hold the others.

Shape letters: T tokens of one turn, L tokens of one sample, N unique tokens of one row, M loss terms of one row,
K head entries per token, G rollouts per group, P trainer processes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Ragged:
    """A list of integer lists as one buffer: list i is `values[offsets[i]:offsets[i + 1]]`.

    [[5, 9], [], [7]] is values [5, 9, 7] with offsets [0, 2, 2, 3].
    """

    values: np.ndarray  # [sum of lengths] int32
    offsets: np.ndarray  # [n + 1] int64

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.values[self.offsets[index] : self.offsets[index + 1]]

    def take(self, indices: np.ndarray) -> Ragged:
        """The lists at `indices`, in that order."""
        lists = [self[int(i)] for i in indices]
        return Ragged.of(lists)

    @staticmethod
    def of(lists: list) -> Ragged:
        lengths = np.fromiter((len(x) for x in lists), np.int64, len(lists))
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
        values = np.concatenate([np.asarray(x, np.int32) for x in lists]) if len(lists) else np.zeros(0, np.int32)
        return Ragged(values.astype(np.int32, copy=False), offsets)


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the model is asked, and what scoring needs (DATA-1, DATA-4)."""

    row_index: int  # row in the data set
    epoch: int  # complete passes over the data before this one
    messages: list[dict[str, Any]]  # chat messages: role and content
    columns: dict[str, Any]  # every other column of the row


@dataclass(frozen=True, slots=True)
class Turn:
    """One sampling request and its answer, exactly the tokens seen and given (GEN-3)."""

    prompt_ids: np.ndarray  # [p] int32
    output_ids: np.ndarray  # [T] int32
    sampler_logprobs: np.ndarray  # [T] float32, processed log-probability of each output token when it was sampled
    output_mask: np.ndarray  # [T] bool, true = trained
    versions: np.ndarray  # [T] int32, weight version that produced the token
    head_ids: np.ndarray  # [T, K] int32, the sampler's K most likely tokens (GEN-9); K = 0 without centering
    head_logprobs: np.ndarray  # [T, K] float32; -inf where the server listed fewer than K
    candidates: Ragged | None  # candidate set per token under top-k, top-p or min-p (SAMP-1)
    finish_reason: str  # "stop", "length" or "abort"
    is_labelled: bool = False  # the server named the versions itself, else they are those known when it was asked


@dataclass(frozen=True, slots=True)
class Rollout:
    """One play of a prompt. `failure` is None for a usable rollout, else the typed reason (GEN-13)."""

    turns: tuple[Turn, ...]
    completion: list[dict[str, Any]]  # messages after the prompt
    rewards: dict[str, float | None] = field(default_factory=dict)  # source name -> value; None = not scored by it
    failure: str | None = None
    failure_text: str = ""  # the error as the user should read it
    tool_call_count: int = 0
    tool_failure_count: int = 0
    duration_s: float = 0.0
    truncated: bool = False  # the last turn did not end in an EOS token (GEN-10)
    prompt: list[dict[str, Any]] | None = None  # messages it began with, where an environment changed the prompt's
    measured: tuple[tuple[str, float, float], ...] = ()  # metric events of its play: name, value, weight
    # Set where every turn is a training row of its own, never joined with another (AREAL-WF-8): [turns] float64, the
    # reward of each row minus the rollout's own reward. Rows of 0.81, 0.9, 1 in a rollout of reward 1: -0.19, -0.1, 0.
    row_offsets: np.ndarray | None = None
    has_reference: bool = False  # that own reward was stated explicitly, not taken from equal rows (AREAL-WF-51)
    extras: dict[str, Any] = field(default_factory=dict)  # what the player's owner needs later: filters, the dump

    @property
    def generated_counts(self) -> list[int]:
        """Generated tokens of each training row; a turn that is a row of its own may hold context among its output."""
        if self.row_offsets is None:
            return [sum(len(t.output_ids) for t in self.turns)]
        return [int(np.count_nonzero(t.output_mask)) for t in self.turns]

    @property
    def reward(self) -> float:
        """Sum of all sources that gave a number; NaN if none did (REW-7, REW-8)."""
        values = [v for v in self.rewards.values() if v is not None]
        return float(sum(values)) if values else float("nan")


@dataclass(frozen=True, slots=True)
class Group:
    """One prompt with its G rollouts in slot order; compared with each other, never split (GEN-1)."""

    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]  # [G], unusable ones included
    version: int  # version at the start of the first rollout (GEN-19)
    queued_at: float = 0.0  # time.monotonic() when it entered the score queue

    @property
    def usable(self) -> list[Rollout]:
        return [r for r in self.rollouts if r.failure is None]

    @property
    def row_counts(self) -> np.ndarray:
        """[usable rollouts] int64, training rows with a reward of their own; 1 for an ordinary rollout."""
        return np.array([1 if r.row_offsets is None else len(r.row_offsets) for r in self.usable], np.int64)


@dataclass(frozen=True, slots=True)
class Sample:
    """One trainable token sequence of one rollout (TURN-2)."""

    token_ids: np.ndarray  # [L] int32
    loss_mask: np.ndarray  # [L] bool, true = this token is trained
    sampler_logprobs: np.ndarray  # [L] float32, 0 where not trained
    versions: np.ndarray  # [L] int32, -1 where not trained
    advantage: float
    head_ids: np.ndarray  # [n, K] int32, rows in order of the n trained tokens
    head_logprobs: np.ndarray  # [n, K] float32
    candidates: Ragged | None  # [n] lists, or None
    group_id: int
    rollout_index: int  # slot of the rollout in its group
    reward: float = float("nan")  # of its row, as advantages are computed from it; NaN = unscorable

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def oldest_version(self) -> int:
        """Oldest weight version among the trained tokens (STA-2)."""
        return int(self.versions[self.loss_mask].min())


@dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A scored group on its way to the trainer: its samples and the figures the feeder's metrics need."""

    group_id: int
    row_index: int
    epoch: int
    samples: tuple[Sample, ...]
    rewards: np.ndarray  # [usable rollouts] float64, NaN = unscorable
    source_rewards: dict[str, np.ndarray]  # source name -> [usable rollouts] float64, NaN = not scored by it
    rollout_indices: np.ndarray  # [usable rollouts] int32, slot of each entry of `rewards`
    version: int  # at the start of the group's first rollout (GEN-19)
    ready_at: float  # time.time() when it was sent
    references: np.ndarray = field(default_factory=lambda: np.zeros(0))  # [usable rollouts] float64, as Sample.reward

    @property
    def raw_tokens(self) -> int:
        """Forwarded tokens before sharing, the unit of admission (STA-5)."""
        return sum(len(s.token_ids) for s in self.samples)

    @property
    def num_trained_tokens(self) -> int:
        return sum(s.num_trained_tokens for s in self.samples)


@dataclass(frozen=True, slots=True)
class Row:
    """What one process forwards in one microbatch: a prefix tree laid out depth first (PACK-1 to PACK-5).

    p1 p2 p3 with completions a1 a2 and b1 b2 is tokens [p1 p2 p3 a1 a2 p3 b1 b2], positions [0 1 2 3 4 2 3 4] and
    segments (0, 2, -1), (2, 5, 0), (5, 8, 0): half-open bounds and the index of the parent segment.
    """

    token_ids: np.ndarray  # [N] int32
    position_ids: np.ndarray  # [N] int32, depth of the token on its path
    segment_starts: np.ndarray  # [S] int32
    segment_ends: np.ndarray  # [S] int32
    segment_parents: np.ndarray  # [S] int32, -1 = root; a parent precedes its children
    predicting_index: np.ndarray  # [M] int32, packed position whose output predicts the target
    target_ids: np.ndarray  # [M] int32
    sampler_logprobs: np.ndarray  # [M] float32
    advantages: np.ndarray  # [M] float32
    versions: np.ndarray  # [M] int32
    sample_index: np.ndarray  # [M] int32, index into this row's samples
    head_ids: np.ndarray  # [M, K] int32
    head_logprobs: np.ndarray  # [M, K] float32
    candidates: Ragged | None  # [M] lists, or None
    group_ids: np.ndarray  # [samples of the row] int64
    rollout_indices: np.ndarray  # [samples of the row] int32
    sample_tokens: np.ndarray  # [samples of the row] int32, raw length of each sample
    load: float  # estimated compute, in the planner's cost unit

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained_tokens(self) -> int:
        return len(self.target_ids)


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One non-empty row per trainer process (ARCH-15)."""

    rows: tuple[Row, ...]  # [P]

    @property
    def num_trained_tokens(self) -> int:
        return sum(r.num_trained_tokens for r in self.rows)


@dataclass(frozen=True, slots=True)
class Step:
    """The microbatches of one optimizer update, planned whole so that its denominators are exact."""

    index: int  # 1 for the first step of a run
    microbatches: tuple[Microbatch, ...]

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens over all processes and microbatches: the loss denominator (LOSS-17)."""
        return sum(m.num_trained_tokens for m in self.microbatches)
