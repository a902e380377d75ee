"""One served model: engine, tokenizer and adapters, opened from a component's settings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from agrpo.serve.engine import Engine
from agrpo.serve.lora import Adapter, load_adapter
from agrpo.serve.parse import Limits, Parsed, RefusedRequest
from agrpo.serve.request import Request
from agrpo.serve.runner import Runner, load_model, load_tokenizer, max_length, stop_ids
from agrpo.serve.weights import Weights

if TYPE_CHECKING:
    from agrpo.serve.embedded import Embedded

log = logging.getLogger(__name__)

MAX_LORAS, MAX_LORA_RANK = 8, 64  # of a server that is not part of a run


class Service:
    """What the HTTP handlers act on."""

    def __init__(self, engine: Engine, tokenizer, limits: Limits, settings: Embedded, name: str, root: str):
        self.engine, self.tokenizer, self.limits, self.settings = engine, tokenizer, limits, settings
        self.name, self.root = name, root
        self.adapters: dict[str, Adapter] = {}
        self.created = int(time.time())

    @property
    def dtype(self) -> torch.dtype:
        return self.engine.runner.dtype

    def adapter_of(self, model: str | None) -> Adapter | None:
        """The adapter that a request's `model` names; None for the base model."""
        if model in (None, "", self.name, self.root):
            return None
        if model not in self.adapters:
            raise RefusedRequest(
                404, f"The model `{model}` does not exist; served: {', '.join([self.name, *self.adapters])}"
            )
        return self.adapters[model]

    def request(self, parsed: Parsed, model: str | None, on_done: Callable[[Request], None]) -> Request:
        fields = {f: getattr(parsed, f) for f in Parsed.__slots__}
        return Request(**fields, on_done=on_done, adapter=self.adapter_of(model))

    def load_adapter(self, name: str, path: str, in_place: bool) -> None:
        """Register an adapter (LORA-9); requests in flight keep the one they began with."""
        if not name or name == self.name:
            raise RefusedRequest(400, f"lora_name {name!r} cannot be used")
        if name in self.adapters and not in_place:
            raise RefusedRequest(400, f"The lora adapter '{name}' has already been loaded.")
        if name not in self.adapters and len(self.adapters) >= self.settings.max_loras:
            raise RefusedRequest(
                400,
                f"{len(self.adapters)} adapters are loaded and server.max_loras is {self.settings.max_loras}; unload one",
            )
        try:
            adapter = load_adapter(name, path, self.engine.runner.model, self.settings.max_lora_rank)
        except (ValueError, OSError) as error:
            raise RefusedRequest(400, str(error)) from error
        self.adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        if self.adapters.pop(name, None) is None:
            raise RefusedRequest(404, f"The lora adapter '{name}' cannot be found.")

    def models(self) -> list[dict[str, Any]]:
        """The base model first (SRV-10)."""
        common = {
            "object": "model",
            "created": self.created,
            "owned_by": "agrpo",
            "max_model_len": self.limits.max_model_len,
        }
        base = {"id": self.name, "root": self.root, "parent": None, **common}
        return [base, *({"id": a.name, "root": a.path, "parent": self.name, **common} for a in self.adapters.values())]


def open_service(
    model_path: str,
    settings: Embedded,
    receiver: str | None = None,
    beat: Callable[[str], None] = lambda phase: None,
    **load: object,
) -> Service:
    """Load the model and build its engine (not started). `load` goes to transformers: revision, trust_remote_code."""
    torch.set_num_threads(settings.threads)
    settings = replace(
        settings,
        max_loras=MAX_LORAS if settings.max_loras is None else settings.max_loras,
        max_lora_rank=settings.max_lora_rank or MAX_LORA_RANK,
    )
    device = torch.device(settings.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    beat("loading model")
    model = load_model(model_path, settings.dtype, device, **load)
    tokenizer = load_tokenizer(model_path, **load)
    length = max_length(model, settings.max_model_len)
    runner = Runner(model, length, settings.max_num_seqs, settings.kv_cache_tokens)
    engine = Engine(runner, Weights(model, receiver), settings.max_num_seqs, beat)
    limits = Limits(length, settings.max_logprobs, model.config.get_text_config().vocab_size, stop_ids(model, tokenizer))
    log.info(
        "serving %s in %s on %s: context %d, %d cache tokens",
        model_path,
        model.dtype,
        device,
        length,
        runner.cache.num_tokens,
    )
    return Service(engine, tokenizer, limits, settings, settings.model_name or model_path, model_path)
