"""The receiver inside vLLM: weight-transfer backend `gloo`, and a repair of tied embeddings on vLLM's CPU build.

vLLM finds `register` by its entry point, in every process it starts: either this folder is an entry of PYTHONPATH (the
managed server, `agrpo serve`), or agrpo is installed beside vLLM. The folder holds this file and the entry point and
nothing else, so a server in an environment of its own sees no package of the trainer's. It needs vLLM and torch only;
the wire is the sender's own file, loaded by its path beside this folder, so that both ends run the same bytes of code.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

BACKEND = "gloo"
# `0` leaves the packed copies of tied embeddings as they are, for the test that the proof of arrival notices it.
REPAIR = "AGRPO_REPAIR_TIED_EMBEDDINGS"


def register() -> None:
    """Make the backend known and install the repair; may be called any number of times."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.platforms import current_platform

    # Installed beside vLLM and on PYTHONPATH too: the first one stays.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooEngine)
    if current_platform.is_cpu() and os.environ.get(REPAIR) != "0":
        _repair_reload()


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Body of /init_weight_transfer_engine, as the sender makes it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float = 1800.0


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Body of /update_weights: exactly the tensors that follow."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    pieces: list[list[int]]


class GlooEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Loads what arrives layer by layer, through vLLM's own reloading.

    The model is touched only when a whole bucket is here, and a broken update puts the layers it left open back to
    their old weights: so a server whose update failed still has a complete model.
    """

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    _receiver: Any = None
    _is_loading = False

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.shutdown()
        parallel = self.parallel_config
        worker_rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
        wire = _wire()
        self._receiver = wire.CollectiveReceiver(asdict(init_info), wire.gloo_group, "cpu", worker_rank)

    def start_weight_update(self) -> None:
        self._abandon()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        try:
            self.receive_weights(self.parse_update_info(update_info))
        except BaseException:
            self._abandon()
            raise
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._receiver is None:
            raise RuntimeError("update_weights before init_weight_transfer_engine")
        tensors = [(name, tensor.to(self.device)) for name, tensor in self._receiver.receive(asdict(update_info))]
        if not self._is_loading:
            initialize_layerwise_reload(self.model)
            self._is_loading = True
        self.model.load_weights(iter(tensors))

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self._is_loading:
            finalize_layerwise_reload(self.model, self.model_config)
            self._is_loading = False
            repack_tied(self.model)

    def shutdown(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _abandon(self) -> None:
        """Give every layer that still waits for tensors its old ones back."""
        from vllm.model_executor.model_loader.reload import layerwise

        self._is_loading = False
        for layer in self.model.modules():
            info = layerwise.get_layerwise_info(layer)
            if info.can_load() and info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
                info.reset()


def repack_tied(model: torch.nn.Module) -> None:
    """Pack weights that several layers share anew.

    On CPU vLLM multiplies with a packed copy of each weight, made after loading. A reload packs again only the layers
    whose names were loaded, and a checkpoint of tied embeddings has no name for the head: its copy stays the old one.
    """
    if os.environ.get(REPAIR) == "0":
        return
    packed = [
        layer
        for layer in model.modules()
        if hasattr(layer, "cpu_linear") and getattr(layer, "quant_method", None) is not None and layer.weight.numel()
    ]
    users = Counter(layer.weight.data_ptr() for layer in packed)
    for layer in packed:
        if users[layer.weight.data_ptr()] > 1:
            layer.quant_method.process_weights_after_loading(layer)


def _repair_reload() -> None:
    """The same after vLLM's `reload_weights`, which loads a folder and has the same gap."""
    from vllm.model_executor.model_loader.reload import inplace

    finalize = inplace.finalize_layerwise_reload
    if getattr(finalize, "repacks", False):
        return

    def finalize_and_repack(model: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        finalize(model, *args, **kwargs)
        repack_tied(model)

    finalize_and_repack.repacks = True
    inplace.finalize_layerwise_reload = finalize_and_repack


def _wire() -> Any:
    """The sender's file `collective.py`, which imports the standard library and torch only."""
    name = "agrpo_sync_collective"
    if name not in sys.modules:
        path = Path(__file__).resolve().parents[1] / "collective.py"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
