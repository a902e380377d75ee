"""From a packed row to what the loss needs: one forward of the row, and the head only where there is a loss term."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from agrpo.model.candidates import Kept
from agrpo.model.head import head_terms
from agrpo.model.head_torch import Scaling
from agrpo.model.moe import balance_of
from agrpo.model.plan import TreePlan, on_device
from agrpo.types import Row

METHOD = "forward_terms"  # the model's method that FSDP2 treats like `forward`


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """A Row on its device; the fields keep their names."""

    token_ids: torch.Tensor  # [N] int64
    position_ids: torch.Tensor  # [N] int64
    plan: TreePlan
    predicting_index: torch.Tensor  # [M] int64
    target_ids: torch.Tensor  # [M] int64
    sampler_logprobs: torch.Tensor  # [M] float32
    advantages: torch.Tensor  # [M] float32
    versions: torch.Tensor  # [M] int64
    sample_index: torch.Tensor  # [M] int64
    num_samples: int
    head_ids: torch.Tensor  # [M, K] int64
    head_logprobs: torch.Tensor  # [M, K] float32, -inf where the server listed fewer than K
    kept: Kept | None  # candidate sets
    candidate_counts: torch.Tensor | None  # [M] int64, sizes of the candidate sets

    @staticmethod
    def of(row: Row, device: torch.device | str) -> DeviceRow:
        """The row's arrays copied to `device`, and its attention plan."""

        def ids(array: np.ndarray) -> torch.Tensor:
            return on_device(np.ascontiguousarray(array, np.int64), torch.device(device))

        def reals(array: np.ndarray) -> torch.Tensor:
            return on_device(np.array(array, np.float32), torch.device(device))

        positions, kept, counts = ids(row.position_ids), None, None
        if row.candidates is not None:
            kept, counts = Kept.of(row.candidates, device), ids(np.diff(row.candidates.offsets))
        return DeviceRow(
            token_ids=ids(row.token_ids),
            position_ids=positions,
            plan=TreePlan.of(row.segment_starts, row.segment_ends, row.segment_parents, positions),
            predicting_index=ids(row.predicting_index),
            target_ids=ids(row.target_ids),
            sampler_logprobs=reals(row.sampler_logprobs),
            advantages=reals(row.advantages),
            versions=ids(row.versions),
            sample_index=ids(row.sample_index),
            num_samples=len(row.sample_tokens),
            head_ids=ids(row.head_ids),
            head_logprobs=reals(row.head_logprobs),
            kept=kept,
            candidate_counts=counts,
        )


@dataclass(frozen=True, slots=True)
class TokenTerms:
    """One entry per (sample, trained token): the input of every loss. Log-probs are at the sampling temperature."""

    trainer_logprobs: torch.Tensor  # [M] with gradient
    sampler_logprobs: torch.Tensor  # [M]
    advantages: torch.Tensor  # [M]
    head_ids: torch.Tensor  # [M, K]
    head_trainer_logprobs: torch.Tensor  # [M, K] with gradient; -inf outside the candidate set
    head_sampler_logprobs: torch.Tensor  # [M, K]; -inf = absent
    entropy: torch.Tensor  # [M] nats, full vocabulary, no gradient
    sample_index: torch.Tensor  # [M] index into the row's samples, all of whose trained tokens are here
    num_samples: int  # of the row
    versions: torch.Tensor  # [M]
    candidate_counts: torch.Tensor | None  # [M] size of the candidate set, None without truncation
    aux_loss: torch.Tensor | None = None  # scalar with gradient, before its coefficient; None without experts or gradient
    version: int = 0  # of the weights of this forward; the next one where they changed since the last sync
    proximal_logprobs: torch.Tensor | None = None  # [M] of the weights at the start of the step, where they differ


def token_terms(model: torch.nn.Module, row: DeviceRow, temperature: float, want_head: bool) -> TokenTerms:
    """The loss terms of one row by one forward; a row without terms gives empty ones that join the graph (LOSS-20)."""
    width = row.head_ids.shape[1] if want_head else 0
    head_ids, head_sampler_logprobs = row.head_ids[:, :width], row.head_logprobs[:, :width]
    forward = getattr(model, METHOD, None)
    if forward is None:
        bind(model, None)
        forward = getattr(model, METHOD)
    (trainer_logprobs, head_trainer_logprobs, entropy), aux_loss = forward(row, head_ids, temperature)
    return TokenTerms(
        trainer_logprobs=trainer_logprobs,
        sampler_logprobs=row.sampler_logprobs,
        advantages=row.advantages,
        head_ids=head_ids,
        head_trainer_logprobs=head_trainer_logprobs,
        head_sampler_logprobs=head_sampler_logprobs,
        entropy=entropy,
        sample_index=row.sample_index,
        num_samples=row.num_samples,
        versions=row.versions,
        candidate_counts=row.candidate_counts,
        aux_loss=aux_loss,
    )


def token_logprobs(
    model: torch.nn.Module, token_ids: np.ndarray, temperature: float, device: torch.device | str
) -> np.ndarray:
    """[L] tokens to the [L - 1] float32 log-probs of tokens 1..L-1, without gradient; collective under FSDP2."""
    with torch.no_grad():
        terms = token_terms(model, DeviceRow.of(sequence_row(token_ids), device), temperature, want_head=False)
    return terms.trainer_logprobs.float().cpu().numpy()


def sequence_row(token_ids: np.ndarray) -> Row:
    """One plain sequence as a row: [7 8 9] predicts 8 and 9 at positions 0 and 1."""
    tokens = np.asarray(token_ids, np.int32)
    length, terms = len(tokens), len(tokens) - 1
    return Row(
        token_ids=tokens,
        position_ids=np.arange(length, dtype=np.int32),
        segment_starts=np.zeros(1, np.int32),
        segment_ends=np.full(1, length, np.int32),
        segment_parents=np.full(1, -1, np.int32),
        predicting_index=np.arange(terms, dtype=np.int32),
        target_ids=tokens[1:],
        sampler_logprobs=np.zeros(terms, np.float32),
        advantages=np.ones(terms, np.float32),
        versions=np.zeros(terms, np.int32),
        sample_index=np.zeros(terms, np.int32),
        head_ids=np.zeros((terms, 0), np.int32),
        head_logprobs=np.zeros((terms, 0), np.float32),
        candidates=None,
        group_ids=np.zeros(1, np.int64),
        rollout_indices=np.zeros(1, np.int32),
        sample_tokens=np.full(1, length, np.int32),
        load=0.0,
    )


def bind(model: torch.nn.Module, autocast: torch.dtype | None) -> None:
    """Give the model its method `forward_terms`; `autocast` is the compute dtype where FSDP2 sets none (MODEL-4)."""

    def forward_terms(row: DeviceRow, head_ids: torch.Tensor, temperature: float):
        balance = balance_of(model) if torch.is_grad_enabled() else None
        routed = {} if balance is None else {"output_router_logits": True}
        with torch.autocast(row.token_ids.device.type, dtype=autocast, enabled=autocast is not None):
            outputs = model.get_decoder()(
                input_ids=row.token_ids[None],
                position_ids=row.position_ids[None],
                use_cache=False,
                tree_plan=row.plan,
                **routed,
            )
        aux_loss = None if balance is None else balance.of(outputs.router_logits)
        states, head = outputs.last_hidden_state[0], model.get_output_embeddings()
        hidden = states.index_select(0, row.predicting_index)
        dtype = autocast or head.weight.dtype
        bias = None if head.bias is None else head.bias.to(dtype)
        scaling = Scaling.of(model, temperature)
        terms = head_terms(hidden.to(dtype), head.weight.to(dtype), bias, row.target_ids, head_ids, scaling, row.kept)
        return terms, aux_loss

    setattr(model, METHOD, forward_terms)
