"""Sharding over trainer ranks by FSDP2; with `replicate` copies of the sharded model, each on ranks of its own (HSDP).

Gradients are summed over ranks, never averaged: a rank's loss is already divided by the step's tokens over all ranks.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from agrpo.errors import ConfigError
from agrpo.model.terms import METHOD, bind

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}
_OPTIONS = ("reshard_after_forward", "cpu_offload", "layer_classes", "replicate", "prefetch")
_log = logging.getLogger(__name__)


def open_mesh(section: Any, device: torch.device | str) -> DeviceMesh | None:
    """The mesh over all ranks of the process group, None without sharding. Raises ConfigError (COMPAT-6)."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    enabled = world_size > 1 if section.fsdp.enabled is None else section.fsdp.enabled
    if world_size > 1 and not enabled:
        raise ConfigError(f"model.fsdp.enabled must be true with run.num_processes={world_size}, got false")
    if not enabled:
        return None
    copies = section.fsdp.options.get("replicate", 1)
    if not isinstance(copies, int) or copies < 1 or world_size % copies:
        raise ConfigError(f"model.fsdp.options.replicate must divide the number of ranks ({world_size}), got {copies}")
    kind = torch.device(device).type
    if copies == 1:
        return init_device_mesh(kind, (world_size,), mesh_dim_names=("shard",))
    # Neighbouring ranks share a copy: with whole nodes per copy, only gradients cross between nodes.
    return init_device_mesh(kind, (copies, world_size // copies), mesh_dim_names=("replicate", "shard"))


def shard(model: torch.nn.Module, section: Any, mesh: DeviceMesh | None) -> None:
    """Shard the model in place over `mesh`, a unit per decoder layer and one for the rest; None sets the dtype only.

    Under mixed precision the sharded master weights are float32 whatever was loaded, frozen ones stay as they are
    (MODEL-3); unsharded weights are never up-cast (MODEL-4). Raises ConfigError for unknown options and a precision that
    the device lacks (COMPAT-36).
    """
    compute = COMPUTE_DTYPES[section.precision]
    device = next(model.parameters()).device
    if compute is torch.bfloat16 and device.type == "cuda" and not torch.cuda.is_bf16_supported():
        raise ConfigError(
            f"model.precision must be fp16 or no: {torch.cuda.get_device_name(device)} has no bfloat16, got bf16"
        )
    if mesh is None:
        bind(model, _autocast(model, compute))
        return
    if compute is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    bind(model, None)
    arguments = _arguments(section.fsdp.options, compute, mesh)
    layers = _layers(model, section.fsdp.options)
    for module in (*layers, model):
        fully_shard(module, **arguments)
        module.set_gradient_divide_factor(1.0)
        # Gloo has no pre-multiplied sum, which a divide factor would otherwise select.
        module.set_force_sum_reduction_for_comms(True)
    _prefetch(layers, section.fsdp.options)
    register_fsdp_forward_method(model, METHOD)


def _prefetch(layers: list[torch.nn.Module], options: dict[str, Any]) -> None:
    """Layer i asks for the layers behind it before it computes; in backward FSDP2 does so by itself."""
    count = options.get("prefetch", 1)
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"model.fsdp.options.prefetch must be a number of layers >= 0, got {count}")
    if "layer_classes" in options:
        return  # nested modules have no order of their own
    for index, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(layers[index + 1 : index + 1 + count])


def _autocast(model: torch.nn.Module, compute: torch.dtype | None) -> torch.dtype | None:
    if compute is None:
        return None
    trained = {p.dtype for p in model.parameters() if p.requires_grad}
    if trained != {torch.float32}:
        _log.warning(
            "without FSDP2 weights and optimizer state stay in %s; small updates are lost to rounding",
            ", ".join(sorted(map(str, trained))),
        )
    return None if {p.dtype for p in model.parameters()} == {compute} else compute


def _arguments(options: dict[str, Any], compute: torch.dtype | None, mesh: DeviceMesh) -> dict[str, Any]:
    for key in options:
        if key not in _OPTIONS:
            raise ConfigError(f"model.fsdp.options.{key} is unknown, allowed: {', '.join(_OPTIONS)}")
    return {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=None if compute is None else torch.float32),
        "offload_policy": CPUOffloadPolicy() if options.get("cpu_offload") else OffloadPolicy(),
        **({"reshard_after_forward": options["reshard_after_forward"]} if "reshard_after_forward" in options else {}),
    }


def _layers(model: torch.nn.Module, options: dict[str, Any]) -> list[torch.nn.Module]:
    """The decoder layers, or the modules of the classes named by the option `layer_classes`; outermost last."""
    names = options.get("layer_classes")
    if names is None:
        return list(model.get_decoder().layers)
    found = [m for m in model.modules() if type(m).__name__ in names]
    if not found:
        raise ConfigError(
            f"model.fsdp.options.layer_classes: {type(model).__name__} has no module of {', '.join(names)}"
        )
    return found[::-1]
