"""Sharding over trainer ranks by FSDP2, and the full tensors behind it.

Gradients are summed over ranks, never averaged: a rank's loss is already divided by the step's tokens over all ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
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
from torch.distributed.tensor import DTensor

from agrpo.errors import ConfigError
from agrpo.model.terms import METHOD, bind

COMPUTE_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "no": None}
_OPTIONS = ("reshard_after_forward", "cpu_offload", "layer_classes")
_log = logging.getLogger(__name__)


def open_mesh(section: Any, device: torch.device | str) -> DeviceMesh | None:
    """The mesh over all ranks of the process group, None without sharding. Raises ConfigError (COMPAT-6)."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    enabled = world_size > 1 if section.fsdp.enabled is None else section.fsdp.enabled
    if world_size > 1 and not enabled:
        raise ConfigError(f"model.fsdp.enabled must be true with run.num_processes={world_size}, got false")
    if not enabled:
        return None
    return init_device_mesh(torch.device(device).type, (world_size,), mesh_dim_names=("shard",))


def shard(model: torch.nn.Module, section: Any, mesh: DeviceMesh | None) -> None:
    """Shard the model in place over `mesh`, a unit per decoder layer and one for the rest; None sets the dtype only.

    Under mixed precision the sharded master weights are float32 whatever was loaded (MODEL-3); unsharded weights are
    never up-cast (MODEL-4). Raises ConfigError for unknown options and a precision that the device lacks (COMPAT-36).
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
        model.float()
    bind(model, None)
    arguments = _arguments(section.fsdp.options, compute, mesh)
    for module in (*_layers(model, section.fsdp.options), model):
        fully_shard(module, **arguments)
        module.set_gradient_divide_factor(1.0)
        # Gloo has no pre-multiplied sum, which a divide factor would otherwise select.
        module.set_force_sum_reduction_for_comms(True)
    register_fsdp_forward_method(model, METHOD)


def _autocast(model: torch.nn.Module, compute: torch.dtype | None) -> torch.dtype | None:
    weights = next(model.parameters()).dtype
    if compute is None:
        return None
    if weights is not torch.float32:
        _log.warning(
            "without FSDP2 weights and optimizer state stay in %s; small updates are lost to rounding", weights
        )
    return None if weights is compute else compute


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


def parameters_by_name(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under the names of the loaded module tree, without wrapper prefixes, tied weights once."""
    for name, parameter in model.named_parameters():
        yield name.replace("_orig_mod.", ""), parameter


def checkpoint_names(model: torch.nn.Module) -> list[str]:
    """Names in the model's checkpoint format of everything `full_tensors` yields, in its order (SYNC-6, SYNC-7)."""
    names: list[str] = []
    for name, parameter in parameters_by_name(model):
        if parameter.requires_grad:
            names += in_checkpoint_format(
                model, name, torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            )
    return names


def full_tensors(model: torch.nn.Module, trainable: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, full tensor) one after another, each gathered completely; collective on all ranks (SYNC-9).

    Only trainable parameters, or every one. Without sharding the tensor is the weight itself: do not write to it.
    """
    for name, parameter in parameters_by_name(model):
        if trainable and not parameter.requires_grad:
            continue
        yield from in_checkpoint_format(model, name, gathered(parameter)).items()


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard on every rank; collective for a sharded one."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def in_checkpoint_format(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One parameter as its checkpoint stores it: transformers renames and fuses some on loading."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: tensor})
