"""Loading for several ranks: rank 0 reads the weights once, in main memory; the others get their shards from it.

Every other rank builds the model without storage. All shard it, get room for their own shard alone, and copy that out of
each tensor as rank 0 sends it; so no machine holds more than one whole model, and no device more than a shard and one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from agrpo.model.load import load_model, skeleton
from agrpo.model.shard import open_mesh, shard


def open_model(section: Any, device: torch.device | str) -> torch.nn.Module:
    """The model of the `model` section, sharded where there are several ranks; collective. Raises ConfigError."""
    mesh = open_mesh(section, device)
    if mesh is None or dist.get_world_size() == 1:
        model = load_model(section, device)
        shard(model, section, mesh)
        return model
    is_source = dist.get_rank() == 0
    model = load_model(section, "cpu", runs_on=device) if is_source else skeleton(section)
    whole = [t.detach() for _, _, t in _places(model)]
    _agree_on_dtypes(model, whole)
    groups = _tied(model)
    _empty(model)
    shard(model, section, mesh)
    model.to_empty(device="cpu" if section.fsdp.options.get("cpu_offload") else device)
    for first, *others in groups:
        for module, name in others:
            module._parameters[name] = first[0]._parameters[first[1]]
    for number, (module, name, tensor) in enumerate(list(_places(model))):
        _fill(module, name, tensor, whole[number] if is_source else None, whole[number], device)
        whole[number] = whole[number].to("meta")  # rank 0 lets go of what it has sent
    return model


def _places(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, torch.Tensor]]:
    """(module, name, tensor) of every parameter, buffer and tensor attribute; tied ones once."""
    seen: set[int] = set()
    for module in model.modules():
        attributes = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
        for name, tensor in (*module._parameters.items(), *module._buffers.items(), *attributes.items()):
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield module, name, tensor


def _agree_on_dtypes(model: torch.nn.Module, whole: list[torch.Tensor]) -> None:
    """Rank 0 alone has seen the file: its shapes must be those that the configuration gives, its dtypes are taken over."""
    box = [[(tuple(t.shape), t.dtype) for t in whole]]
    dist.broadcast_object_list(box, src=0)
    places = list(_places(model))
    if [shape for shape, _ in box[0]] != [tuple(t.shape) for t in whole]:
        raise RuntimeError("the model that rank 0 loaded is not the one its configuration describes")
    if dist.get_rank() == 0:
        return
    for number, ((module, name, tensor), (shape, dtype)) in enumerate(zip(places, box[0], strict=True)):
        if tensor.dtype != dtype:
            whole[number] = torch.empty(shape, dtype=dtype, device="meta")
            if name in module._parameters:
                tensor.data = whole[number]


def _tied(model: torch.nn.Module) -> list[list[tuple[torch.nn.Module, str]]]:
    """The places of each parameter that is in several."""
    places: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, name))
    return [found for found in places.values() if len(found) > 1]


def _empty(model: torch.nn.Module) -> None:
    """Parameters without storage in place of the loaded ones, tied ones still tied."""
    made: dict[int, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if id(old) not in made:
                    made[id(old)] = torch.nn.Parameter(torch.empty_like(old, device="meta"), old.requires_grad)
                module._parameters[name] = made[id(old)]


@torch.no_grad()
def _fill(module: Any, name: str, tensor: Any, source: Any, like: torch.Tensor, device: torch.device | str) -> None:
    """Broadcast one whole tensor and keep this rank's part of it."""
    # A view of a larger tensor and a value without storage cannot be sent as they are.
    full = torch.empty(like.shape, dtype=like.dtype, device=device) if source is None else source.to(device).contiguous()
    dist.broadcast(full, src=0)
    if isinstance(tensor, DTensor):
        part = distribute_tensor(full, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(part.to_local())
    elif name in module._parameters:
        tensor.copy_(full)
    elif name in module._buffers:
        module._buffers[name] = full  # on the device also where shards are kept in main memory
    else:
        setattr(module, name, full)
