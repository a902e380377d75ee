"""LoRA adapters by the PEFT library, injected into the loaded model: which modules, what is trained, what is merged.

The model keeps its class: an adapted linear layer `q_proj` becomes `q_proj.base_layer` with `q_proj.lora_A` and
`q_proj.lora_B` beside it. Outside this package everything has the names of the model without adapters, or PEFT's.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from agrpo.errors import ConfigError
from agrpo.model.tokenizer import first_line

NAME = "default"  # of the one adapter, inside the model only
PEFT_PREFIX = "base_model.model."
CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_STACKED = ("gate_up_proj", "down_proj")  # the tensors of experts
_EXPERT_NAMES = {"gate", "router", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}
_SAVED = f"modules_to_save.{NAME}."


def add_adapter(model: torch.nn.Module, section: Any) -> None:
    """Inject the adapter of `model.lora` in place; nothing else is trained (LORA-1). Raises ConfigError (COMPAT-9).

    Adapter weights are float32 whatever the base model's are. B starts at zero, so the policy is unchanged at first.
    """
    try:
        import peft
    except ImportError as error:
        raise ConfigError("model.lora.enabled=true needs the package peft; run: pip install peft") from error
    lora = section.lora
    outside = _linear_outside_text(model)
    options = {"exclude_modules": outside} if outside else {}
    try:
        config = peft.LoraConfig(
            task_type="CAUSAL_LM",
            r=lora.r,
            lora_alpha=lora.alpha,
            lora_dropout=lora.dropout,
            target_modules=_targets(model, lora.target_modules),
            base_model_name_or_path=section.path,
            **{**options, **lora.options},
        )
        peft.inject_adapter_in_model(config, model, NAME)
    except (TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"model.lora: {first_line(error)}") from error
    _refuse_targets(model, lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def has_adapter(model: torch.nn.Module) -> bool:
    return NAME in getattr(model, "peft_config", {})


def merged_only_reason(model: torch.nn.Module, lora: Any) -> str | None:
    """Why servers cannot load this adapter, so that it must be sent merged; None if they can (LORA-3)."""
    if lora.merged_only is not None:
        return lora.merged_only
    if any(isinstance(layer.base_layer, torch.nn.Embedding) for _, layer in _layers(model)):
        return "an embedding among model.lora.target_modules"
    return None


def plain_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter, Any]]:
    """(name in the model without adapters, parameter, its adapted layer or None), without the adapter's own."""
    layers = dict(_layers(model)) if has_adapter(model) else {}
    for name, parameter in model.named_parameters():
        name = name.replace("_orig_mod.", "")
        owner, _, rest = name.rpartition(".base_layer.")
        if owner:
            yield f"{owner}.{rest}", parameter, layers[owner]
        elif not layers or not (".lora_" in name or ".original_module." in name):
            yield name.replace(_SAVED, ""), parameter, None


def merged(layer: Any, gather: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layer's weights with the adapter folded in, by name; the layer itself is not touched (SYNC-8).

    `gather` gives the full tensor of a shard, on all ranks. In the wider dtype of base and adapter.
    """
    exact = torch.promote_types(layer.base_layer.weight.dtype, torch.float32)
    replaced = {}
    for parameter in layer.parameters():
        full = gather(parameter)
        replaced[id(parameter)] = torch.nn.Parameter(full.to(exact, copy=True), requires_grad=False)
    twin = copy.deepcopy(layer, replaced)
    with torch.no_grad():
        twin.merge()
    return {name: parameter.detach() for name, parameter in twin.base_layer.named_parameters()}


def adapter_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """What an adapter file holds, under PEFT's names (LORA-18)."""
    from peft import get_peft_model_state_dict

    trained = {n.replace("_orig_mod.", ""): p for n, p in model.named_parameters() if p.requires_grad}
    found = get_peft_model_state_dict(model, trained, NAME, save_embedding_layers=False)
    for name, parameter in found.items():
        yield PEFT_PREFIX + name, parameter


def adapter_config(model: torch.nn.Module) -> dict[str, Any]:
    """The contents of `adapter_config.json`."""
    config = {**model.peft_config[NAME].to_dict(), "inference_mode": True}
    for key in ("target_modules", "exclude_modules"):
        if isinstance(config.get(key), set):
            config[key] = sorted(config[key])
    return config


def write_adapter(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    """The two files of an adapter in PEFT's format, into an existing folder."""
    from safetensors.torch import save_file

    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2, default=str) + "\n")
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _layers(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            yield name.replace("_orig_mod.", ""), module


def _targets(model: torch.nn.Module, wanted: str | list[str]) -> str | list[str]:
    """`all-linear` on a mixture of experts: the projections beside the experts, whose weights are stacked in one tensor.

    PEFT takes the names of expert projections for those tensors, so layers that share the names get no adapter either.
    """
    decoder = model.get_decoder()
    is_mixture = any(name.endswith(_STACKED) and p.ndim == 3 for name, p in decoder.named_parameters())
    if wanted != "all-linear" or not is_mixture:
        return wanted
    linear = {n.rpartition(".")[2] for n, m in decoder.named_modules() if isinstance(m, torch.nn.Linear)}
    return sorted(linear - _EXPERT_NAMES)


def _linear_outside_text(model: torch.nn.Module) -> list[str]:
    """Linear layers of image and audio parts, which are never trained (MODEL-7); the head is judged by itself."""
    inside = {id(m) for m in model.get_decoder().modules()} | {id(model.get_output_embeddings())}
    return [n for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and id(m) not in inside]


def _refuse_targets(model: torch.nn.Module, lora: Any) -> None:
    """The chunked head reads base weights, so neither the head nor what it shares weights with may be adapted."""
    from peft.tuners.lora import ParamWrapper
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if any(isinstance(layer, ParamWrapper) for _, layer in _layers(model)):
        raise ConfigError(
            "model.lora.target_modules must leave experts and routers alone, whose weights are stacked in one tensor: name "
            "attention projections, [q_proj,k_proj,v_proj,o_proj], or give all-linear, which leaves them out"
        )
    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if isinstance(head, kinds):
        raise ConfigError("model.lora must leave the output head alone, whose base weights are read; remove lm_head")
    if isinstance(embedding, kinds) and model.config.get_text_config().tie_word_embeddings:
        raise ConfigError(
            "model.lora must leave the embeddings alone: this model's head shares their weights; remove the embedding "
            "from model.lora.target_modules and model.lora.options"
        )
    if not any(True for _ in _layers(model)):
        raise ConfigError(f"model.lora.target_modules: {lora.target_modules} names no module of {type(model).__name__}")
