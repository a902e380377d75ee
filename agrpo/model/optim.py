"""The optimizer update: scaled backward, gradient norm over all ranks, clipping, step and learning-rate schedule."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import json
import logging
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from agrpo.errors import ConfigError

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw_torch": (torch.optim.AdamW, {}),
    "adamw_torch_fused": (torch.optim.AdamW, {"fused": True}),
    "adafactor": (torch.optim.Adafactor, {}),
    "sgd": (torch.optim.SGD, {}),
}
_log = logging.getLogger(__name__)
_FIRST_SCALE, _GROWTH_STEPS = 2.0**16, 1000  # float16 loss scale: halved on overflow, doubled after so many good steps


@dataclass(frozen=True, slots=True)
class Update:
    """What one optimizer step did."""

    grad_norm: float  # over all ranks, before clipping, of the normalised loss
    learning_rate: float  # the one that was applied
    is_applied: bool  # false where the norm was not finite: weights unchanged


class Updater:
    """Optimizer, schedule and float16 loss scale of one model; `backward` per microbatch, then `step`."""

    def __init__(self, model: torch.nn.Module, section: Any, max_steps: int | None, scaled: bool = False):
        """`max_steps` is the run's number of steps, None = unknown; `scaled` where gradients pass through float16."""
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.max_grad_norm = section.max_grad_norm
        self.optimizer = open_optimizer(model, section)
        self.scheduler = open_schedule(self.optimizer, section, max_steps)
        self.loss_scale, self.good_steps, self.is_scaled = (_FIRST_SCALE if scaled else 1.0), 0, scaled
        self._settings = {**dataclasses.asdict(section), "max_steps": max_steps}
        self._configured = [{k: v for k, v in g.items() if k not in ("params", "lr")} for g in self.optimizer.param_groups]

    @property
    def learning_rate(self) -> float:
        return float(self.optimizer.param_groups[0]["lr"])

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradients of one microbatch's share of the loss."""
        (loss * self.loss_scale if self.is_scaled else loss).backward()

    def step(self) -> Update:
        """Clip, update, advance the schedule, clear gradients; collective where gradients are sharded (LOSS-22)."""
        # The one number that the host waits for in a step.
        rate, norm = self.learning_rate, float(self._norm()) / self.loss_scale
        is_applied = math.isfinite(norm)
        if is_applied:
            self._rescale(norm)
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if is_applied or not self.is_scaled:
            self.scheduler.step()
        self._adapt(is_applied)
        return Update(norm, rate, is_applied)

    def _norm(self) -> torch.Tensor:
        grads = [p.grad for p in self.parameters if p.grad is not None]
        if not grads:
            return torch.zeros(())
        norm = torch.nn.utils.get_total_norm([g.float() if g.dtype is torch.float16 else g for g in grads])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _rescale(self, norm: float) -> None:
        factor = 1.0 / self.loss_scale
        if self.max_grad_norm > 0 and norm > self.max_grad_norm:
            factor *= self.max_grad_norm / (norm + 1e-6)
        if factor != 1.0:
            torch._foreach_mul_([p.grad for p in self.parameters if p.grad is not None], factor)

    def _adapt(self, is_applied: bool) -> None:
        if not self.is_scaled:
            return
        self.good_steps = self.good_steps + 1 if is_applied else 0
        if not is_applied:
            self.loss_scale = max(self.loss_scale / 2, 1.0)
        elif self.good_steps % _GROWTH_STEPS == 0:
            self.loss_scale *= 2

    def state_dict(self) -> dict[str, Any]:
        """Everything but the optimizer's tensors, as JSON can hold it."""
        schedule = {k: v for k, v in self.scheduler.state_dict().items() if k != "lr_lambdas"}
        scale = {"loss_scale": self.loss_scale, "good_steps": self.good_steps}
        return {"schedule": schedule, **scale, "settings": self._settings}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """After the optimizer's own state, which brings the rates and the other settings of the run that saved it: where the
        configuration has changed since, it holds."""
        self.scheduler.load_state_dict({**self.scheduler.state_dict(), **state["schedule"]})
        self.loss_scale, self.good_steps = state["loss_scale"], state["good_steps"]
        now = json.loads(json.dumps(self._settings))
        before = state.get("settings", now)
        changed = [f"optimizer.{k}={v} (was {before.get(k)})" for k, v in now.items() if v != before.get(k) and k != "max_steps"]
        if changed:
            _log.warning("since the checkpoint was saved: %s", ", ".join(changed))
        if now != before:
            self._configure()

    def _configure(self) -> None:
        """Settings of the configuration, and its rate at this point of its schedule; moments stay."""
        self.scheduler.base_lrs = [configured["initial_lr"] for configured in self._configured]
        factors = [factor(self.scheduler.last_epoch) for factor in self.scheduler.lr_lambdas]
        for group, configured, factor in zip(self.optimizer.param_groups, self._configured, factors, strict=True):
            group.update(configured, lr=configured["initial_lr"] * factor)
        self.scheduler._last_lr = [group["lr"] for group in self.optimizer.param_groups]


def open_optimizer(model: torch.nn.Module, section: Any) -> torch.optim.Optimizer:
    """The optimizer over the trainable parameters; norms and biases get no weight decay. Raises ConfigError."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    kind, options = OPTIMIZERS.get(section.name, (None, {}))
    kind = _imported(section.name) if kind is None else kind
    if issubclass(kind, torch.optim.AdamW | torch.optim.Adam):
        options = {"betas": (section.adam_beta1, section.adam_beta2), "eps": section.adam_epsilon, **options}
    options = {**options, **parse_options(section.options)}
    try:
        return kind([g for g in groups if g["params"]], lr=section.learning_rate, **options)
    except (TypeError, ValueError, NotImplementedError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.name={section.name} with optimizer.options={options or {}} cannot train this model: {error}"
        ) from error


def open_schedule(optimizer: torch.optim.Optimizer, section: Any, max_steps: int | None) -> Any:
    """The learning-rate schedule; raises ConfigError where it needs the number of steps and that is unknown (RUN-5)."""
    from transformers import get_scheduler

    warmup = section.warmup_steps
    if 0 < warmup < 1:
        if max_steps is None:
            raise ConfigError(f"optimizer.warmup_steps={warmup} is a share of run.max_steps, which is not set")
        warmup = warmup * max_steps
    name, warmup = section.lr_scheduler_type, round(warmup)
    if name == "constant" and warmup > 0:
        name = "constant_with_warmup"
    if max_steps is None and not name.startswith("constant"):
        raise ConfigError(f"optimizer.lr_scheduler_type={name} needs run.max_steps: the number of steps is unknown")
    try:
        return get_scheduler(name, optimizer, warmup, max_steps, section.lr_scheduler_kwargs)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"optimizer.lr_scheduler_type={name}: {error}") from error


def parse_options(options: str | dict[str, Any] | None) -> dict[str, Any]:
    """Optimizer arguments from a mapping or from `k=v,k=v`; raises ConfigError."""
    import ast

    if options is None or isinstance(options, dict):
        return dict(options or {})
    parsed = {}
    for part in filter(None, (p.strip() for p in options.split(","))):
        key, sign, value = part.partition("=")
        if not sign:
            raise ConfigError(f"optimizer.options must read k=v,k=v, got {options!r}")
        try:
            parsed[key.strip()] = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError):
            parsed[key.strip()] = value.strip()
    return parsed


def _imported(path: str) -> type[torch.optim.Optimizer]:
    module, _, name = path.rpartition(".")
    allowed = f"must be one of {', '.join(sorted(OPTIMIZERS))}, or the import path of an optimizer class"
    try:
        kind = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"optimizer.name {allowed}, got {path!r}") from error
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise ConfigError(f"optimizer.name {allowed}, got {path!r}, which is none")
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ConfigError(
            f"optimizer.name {allowed}, got {path!r}, which computes the loss several times per update: a step's samples "
            "are forwarded once"
        )
    return kind
