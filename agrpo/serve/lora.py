"""LoRA adapters in PEFT's folder format, applied per request: x W^T + s (x A^T) B^T for the tokens of that request."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file

_TENSOR = re.compile(r"^base_model\.model\.(?P<module>.+)\.lora_(?P<side>[AB])(\.default)?\.weight$")


@dataclass(frozen=True, slots=True)
class Adapter:
    name: str
    path: str
    rank: int
    pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]  # module -> A^T [in, r], scaled B^T [r, out]


def load_adapter(name: str, path: str, model: torch.nn.Module, max_rank: int) -> Adapter:
    """Read one adapter; ValueError with what is wrong and where."""
    folder = Path(path)
    for needed in ("adapter_config.json", "adapter_model.safetensors"):
        if not (folder / needed).is_file():
            raise ValueError(f"no {needed} in {path}; the folder must be readable by the server")
    config = json.loads((folder / "adapter_config.json").read_text())
    _check(config, max_rank, path)
    sides: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in load_file(folder / "adapter_model.safetensors").items():
        match = _TENSOR.match(key)
        if match is None:
            raise ValueError(f"unsupported tensor {key} in {path}: only LoRA of linear layers can be served")
        sides.setdefault(match["module"], {})[match["side"]] = tensor
    modules = dict(model.named_modules())
    pairs = {m: _pair(m, pair, modules.get(m), _scale(config, m), path) for m, pair in sides.items()}
    return Adapter(name, path, config["r"], pairs)


def _check(config: dict, max_rank: int, path: str) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise ValueError(f"adapter type {config['peft_type']} in {path} cannot be served; only LORA")
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    if max(ranks) > max_rank:
        raise ValueError(f"LoRA rank {max(ranks)} is greater than max_lora_rank {max_rank}")
    if config.get("use_dora") or config.get("modules_to_save") or config.get("bias", "none") != "none":
        raise ValueError(f"adapter in {path} uses DoRA, trained bias or modules_to_save, which cannot be served")


def _scale(config: dict, module: str) -> float:
    """alpha / r, or alpha / sqrt(r) for rank-stabilised LoRA, with PEFT's per-module patterns."""

    def of(pattern: dict | None, default: float) -> float:
        for key, value in (pattern or {}).items():
            if re.match(rf"(.*\.)?({key})$", module):
                return value
        return default

    rank, alpha = of(config.get("rank_pattern"), config["r"]), of(config.get("alpha_pattern"), config["lora_alpha"])
    return alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _pair(
    module: str, pair: dict[str, torch.Tensor], layer: torch.nn.Module | None, scale: float, path: str
) -> tuple[torch.Tensor, torch.Tensor]:
    if ".linear_attn." in module:
        raise ValueError(f"adapter in {path} targets {module}, and the embedded server runs no adapter there")
    if not isinstance(layer, torch.nn.Linear):
        raise ValueError(f"adapter in {path} targets {module}, which is not a linear layer of the model")
    if set(pair) != {"A", "B"}:
        raise ValueError(f"adapter in {path} lacks lora_{'B' if 'A' in pair else 'A'} of {module}")
    a, b = pair["A"], pair["B"]
    if a.shape[1] != layer.in_features or b.shape[0] != layer.out_features or a.shape[0] != b.shape[1]:
        raise ValueError(
            f"adapter in {path}: {module} has A {tuple(a.shape)} and B {tuple(b.shape)}, "
            f"the layer maps {layer.in_features} to {layer.out_features}"
        )
    place = {"dtype": layer.weight.dtype, "device": layer.weight.device}
    return a.to(**place).T.contiguous(), (b.to(**place) * scale).T.contiguous()


class AdapterLayer:
    """Adds the low-rank terms of a step's adapters to the model's linear layers, through forward hooks."""

    def __init__(self, model: torch.nn.Module):
        self._modules = {n: m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
        self._hooks: dict[str, torch.utils.hooks.RemovableHandle] = {}
        self._step: list[tuple[Adapter, torch.Tensor | slice]] = []

    def select(self, spans: list[tuple[int, int, Adapter | None]], num_tokens: int) -> None:
        """Say which tokens of the coming forward belong to which adapter."""
        tokens: dict[int, tuple[Adapter, list[int]]] = {}
        for start, end, adapter in spans:
            if adapter is not None:
                tokens.setdefault(id(adapter), (adapter, []))[1].extend(range(start, end))
        self._step = []
        for adapter, indices in tokens.values():
            self._hook(adapter)
            device = next(iter(adapter.pairs.values()))[0].device
            where = slice(None) if len(indices) == num_tokens else torch.tensor(indices, device=device)
            self._step.append((adapter, where))

    def _hook(self, adapter: Adapter) -> None:
        for name in adapter.pairs:
            if name not in self._hooks:
                self._hooks[name] = self._modules[name].register_forward_hook(self._adder(name))

    def _adder(self, name: str):
        def add(module: torch.nn.Module, inputs: tuple, output: torch.Tensor) -> torch.Tensor:
            for adapter, where in self._step:
                pair = adapter.pairs.get(name)
                if pair is not None:
                    output[:, where] += (inputs[0][:, where] @ pair[0]) @ pair[1]
            return output

        return add
