"""New weights into the running model: from a transfer by a receiver, or from a folder of safetensors.

A transfer is start, update (any number), finish. What failed on the way is never taken for finished: after a failed
update, only a start followed by updates that cover every parameter may be finished (SYNC-11).
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open


class WeightError(ValueError):
    """A request about weights that cannot be met; the text is for the caller."""


class Weights:
    """The parameters by checkpoint name, and how far a transfer has come."""

    def __init__(self, model: torch.nn.Module, receiver: str | None):
        self._tensors = checkpoint_tensors(model)
        self._device = model.device
        self._receiver_path, self._receiver = receiver, None
        self._phase = "idle"  # idle, started, received, failed
        self.is_partial = False  # a failed update may have changed some parameters
        self._covered: set[int] = set()  # addresses of the tensors received since the start; tied ones share one
        self._has_changed = False  # a tensor was written since the last finish
        self.num_written = 0  # tensors, ever
        self.num_updates = 0

    def connect(self, init_info: dict) -> None:
        """Join the group of the sender; blocks until it is there."""
        if self._receiver_path is None:
            raise WeightError(
                "this server was started without a weight receiver; set sync to one that transfers tensors"
            )
        module, _, name = self._receiver_path.rpartition(".")
        self.disconnect()
        self._receiver = getattr(importlib.import_module(module), name)(init_info, self._device)

    def disconnect(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def start(self) -> None:
        self._phase, self._covered = "started", set()

    def update(self, update_info: dict, progress: Callable[[], None]) -> int:
        """Receive and load tensors; the number loaded. On any failure the weights count as partial."""
        if self._phase not in ("started", "received"):
            raise WeightError("update_weights without start_weight_update")
        if self._receiver is None:
            raise WeightError("update_weights before init_weight_transfer_engine")
        try:
            self._check_announced(update_info)
            count = self._load(self._receiver.receive(update_info), progress)
        except BaseException:
            self._phase, self.is_partial = "failed", self._has_changed
            raise
        self._phase = "received"
        return count

    def finish(self) -> None:
        if self._phase == "failed":
            raise WeightError(
                "finish_weight_update after a failed update: the weights are partial; start a full update"
            )
        if self._phase != "received":
            raise WeightError("finish_weight_update without a completed update_weights")
        if self.is_partial:
            missing = self._missing(self._covered)
            if missing:
                raise WeightError(
                    f"the weights are partial since a failed update, and this one did not cover {missing[0]} "
                    f"and {len(missing) - 1} more; send every parameter"
                )
        self._phase, self.is_partial, self._has_changed = "idle", False, False
        self.num_updates += 1

    def reload(self, folder: str, progress: Callable[[], None]) -> int:
        """Load every parameter from a folder; nothing is changed unless names and shapes all fit."""
        files = _tensor_files(folder)
        shapes = {n: s for f in files for n, s in _shapes(f)}
        self._check_manifest(shapes.items())
        missing = self._missing({self._tensors[n].data_ptr() for n in shapes})
        if missing:
            raise WeightError(f"{folder} lacks {missing[0]} and {len(missing) - 1} more parameters")
        self.is_partial = True
        count = self._load((pair for f in files for pair in _read(f)), progress)
        self._phase, self.is_partial, self._has_changed = "idle", False, False
        self.num_updates += 1
        return count

    def _check_announced(self, update_info: dict) -> None:
        names, shapes = update_info.get("names", []), update_info.get("shapes", [])
        if len(names) != len(shapes):
            raise WeightError(f"update_info has {len(names)} names but {len(shapes)} shapes")
        self._check_manifest(zip(names, shapes, strict=True))

    def _check_manifest(self, shapes: Iterable[tuple[str, list[int]]]) -> None:
        for name, shape in shapes:
            if name not in self._tensors:
                raise WeightError(f"unknown weight {name}: the model has no parameter of that name")
            expected = list(self._tensors[name].shape)
            if list(shape) != expected:
                raise WeightError(f"weight {name} has shape {list(shape)}, the model expects {expected}")

    def _missing(self, covered: set[int]) -> list[str]:
        return [n for n, t in self._tensors.items() if t.data_ptr() not in covered]

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]], progress: Callable[[], None]) -> int:
        count = 0
        with torch.no_grad():
            for name, tensor in tensors:
                self._check_manifest([(name, list(tensor.shape))])
                target = self._tensors[name]
                self._has_changed = True
                self.num_written += 1
                target.copy_(tensor)
                self._covered.add(target.data_ptr())
                count += 1
                progress()
        return count


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The model's memory under the names of its checkpoint: writing to a tensor changes the model.

    transformers fuses some tensors on loading, the experts of a mixture for one; each of those is a view of the whole.
    """
    from transformers.core_model_loading import revert_weight_conversion

    found = {}
    # Tied parameters appear under each of their names; persistent buffers belong to a checkpoint too.
    for name, tensor in model.state_dict(keep_vars=True).items():
        meta = torch.empty(tensor.shape, device="meta")
        if list(revert_weight_conversion(model, {name: meta})) == [name]:
            found[name] = tensor
            continue
        flat = torch.arange(tensor.numel())
        for own, part in revert_weight_conversion(model, {name: flat.view(tensor.shape).clone()}).items():
            found[own] = _view(tensor.detach(), flat, part, own)
    return found


def _view(tensor: torch.Tensor, flat: torch.Tensor, places: torch.Tensor, name: str) -> torch.Tensor:
    """The view of a contiguous tensor whose elements lie at these `places` of `flat`, its elements' numbers."""
    first = places[(0,) * places.ndim]
    steps = [
        int(places.select(dim, 1)[(0,) * (places.ndim - 1)] - first) if n > 1 else 0
        for dim, n in enumerate(places.shape)
    ]
    if not torch.equal(flat.as_strided(places.shape, steps, int(first)), places):
        raise WeightError(f"the embedded server cannot receive {name}: its memory is not a view; use server=vllm")
    return tensor.as_strided(places.shape, steps, int(first))


def _tensor_files(folder: str) -> list[Path]:
    root = Path(folder)
    index = root / "model.safetensors.index.json"
    if index.is_file():
        return [root / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    if (root / "model.safetensors").is_file():
        return [root / "model.safetensors"]
    raise WeightError(f"no model.safetensors and no model.safetensors.index.json in {folder}")


def _shapes(path: Path) -> Iterator[tuple[str, list[int]]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_slice(name).get_shape()


def _read(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            yield name, file.get_tensor(name)
