"""The auxiliary loss of mixtures of experts: it keeps their routers from sending all tokens to a few experts (LOSS-21)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from agrpo.errors import ConfigError

_ATTRIBUTE = "expert_balance"


@dataclass(frozen=True, slots=True)
class Balance:
    """What a model's auxiliary loss needs besides the routers' logits."""

    coefficient: float
    num_chosen: int  # experts per token

    def of(self, router_logits: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """[N, E] logits per layer to the loss of Switch Transformers (arXiv 2101.03961, equations 4 to 6), a scalar.

        E * sum over experts of (choices per token) * (mean probability), over the tokens of all layers together: tokens
        spread evenly give `num_chosen`. The choices have no gradient.
        """
        num_experts = router_logits[0].shape[-1]
        choices = mass = 0
        for logits in router_logits:
            probabilities = logits.float().softmax(-1)
            chosen = probabilities.detach().topk(self.num_chosen, -1).indices
            choices = choices + torch.zeros_like(probabilities).scatter_(-1, chosen, 1.0).sum(0)
            mass = mass + probabilities.sum(0)
        count = sum(len(logits) for logits in router_logits)
        return num_experts * (choices * mass).sum() / count**2


def attach(model: torch.nn.Module, section: Any) -> None:
    """Let `token_terms` compute the auxiliary loss, with the coefficient of the section or else of the model (MODEL-8).

    Raises ConfigError for a coefficient where the model has no such loss, and for checkpointing that would lose it.
    """
    text, wanted = model.config.get_text_config(), section.router_aux_loss_coef
    recorded = getattr(model.get_decoder(), "_can_record_outputs", None) or {}
    has_loss = hasattr(text, "router_aux_loss_coef") and "router_logits" in recorded
    if wanted is not None and not has_loss:
        raise ConfigError(
            f"model.router_aux_loss_coef is for mixtures of experts with an auxiliary loss, and {type(model).__name__} "
            "has none: leave it null"
        )
    coefficient = wanted if wanted is not None else getattr(text, "router_aux_loss_coef", None)
    if not has_loss or not coefficient:
        return
    arguments = section.gradient_checkpointing_kwargs or {}
    if section.gradient_checkpointing and arguments.get("use_reentrant"):
        raise ConfigError(
            "model.gradient_checkpointing_kwargs.use_reentrant must be false with an auxiliary loss, whose gradient it would "
            "lose; or set model.router_aux_loss_coef=0"
        )
    setattr(model, _ATTRIBUTE, Balance(coefficient, text.num_experts_per_tok))


def balance_of(model: torch.nn.Module) -> Balance | None:
    """None for dense models, and where the coefficient is 0."""
    return getattr(model, _ATTRIBUTE, None)
