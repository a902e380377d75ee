"""A model's weights under the names of its checkpoint format: gathered from shards, the adapter folded in or alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import DTensor

from agrpo.model.adapter import adapter_parameters, has_adapter, merged, plain_parameters


def parameters_by_name(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under the names of the loaded module tree, without wrapper prefixes, tied weights once."""
    for name, parameter in model.named_parameters():
        yield name.replace("_orig_mod.", ""), parameter


def checkpoint_names(model: torch.nn.Module) -> list[str]:
    """Names in the model's checkpoint format of everything `full_tensors` yields, in its order (SYNC-6, SYNC-7)."""
    names: list[str] = []
    is_sent = _sent(model)
    for name, parameter, _ in plain_parameters(model):
        if id(parameter) in is_sent:
            shape = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            names += in_checkpoint_format(model, name, shape)
    return names


def full_tensors(model: torch.nn.Module, trainable: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, full tensor) one after another, each gathered completely; collective on all ranks (SYNC-9).

    Only what training changes, or every weight. Without sharding the tensor is the weight itself: do not write to it.
    """
    for name, tensor in plain_tensors(model, _sent(model) if trainable else None):
        yield from in_checkpoint_format(model, name, tensor).items()


def plain_tensors(model: torch.nn.Module, chosen: set[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in the model without adapters, full tensor), adapters folded in, base weights untouched; collective.

    `chosen` holds the `id` of each parameter that is wanted, None = all.
    """
    layer_now, folded = None, {}
    for name, parameter, layer in plain_parameters(model):
        if chosen is not None and id(parameter) not in chosen:
            continue
        if layer is None:
            yield name, gathered(parameter)
            continue
        if layer is not layer_now:
            layer_now, folded = layer, merged(layer, gathered)
        yield name, folded[name.rpartition(".")[2]]


def adapter_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(PEFT name, full tensor) of the adapter alone; collective (LORA-16)."""
    for name, parameter in adapter_parameters(model):
        yield name, gathered(parameter)


def gathered(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a shard on every rank; collective for a sharded one."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def text_parameters(model: torch.nn.Module) -> set[int]:
    """The `id` of each parameter of the text model and its head; image and audio parts are never trained (MODEL-7)."""
    return {id(p) for module in (model.get_decoder(), model.get_output_embeddings()) for p in module.parameters()}


def in_checkpoint_format(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """One parameter as its checkpoint stores it: transformers renames and fuses some on loading."""
    from transformers.core_model_loading import revert_weight_conversion

    return revert_weight_conversion(model, {name: tensor})


def _sent(model: torch.nn.Module) -> set[int]:
    """Parameters of a full sync: the trained ones (SYNC-7). A merged adapter changes nearly all, so the text model whole:
    then a server that another run has used is repaired too (SYNC-2)."""
    if has_adapter(model):
        return text_parameters(model)
    return {id(p) for p in model.parameters() if p.requires_grad}
