"""A weight receiver that reads safetensors: the contract of a transfer without a second process."""

from pathlib import Path

from safetensors.torch import load_file


class FolderReceiver:
    """`update_info["fail_after"]` breaks the transfer after that many tensors."""

    def __init__(self, init_info, device):
        self._tensors = {}
        for file in sorted(Path(init_info["folder"]).glob("*.safetensors")):
            self._tensors |= load_file(file, device=str(device))

    def receive(self, update_info):
        for count, name in enumerate(update_info["names"]):
            if count == update_info.get("fail_after"):
                raise ConnectionResetError("the sender went away")
            yield name, self._tensors[name]

    def close(self):
        self._tensors = {}
