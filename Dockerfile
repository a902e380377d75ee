# agrpo on NVIDIA GPUs: the trainer in one virtual environment, vLLM in another, so that neither pins the other's torch.
#
#   docker build -t agrpo .
#   docker run --gpus all --ipc=host -v "$PWD/runs:/work/runs" -v "$HOME/.cache/huggingface:/root/.cache/huggingface" \
#       agrpo train +recipe=deepmath server.python=/opt/vllm/bin/python
#
# The devel image brings the compiler that attention kernels are built with at first use.
FROM nvidia/cuda:12.8.1-devel-ubuntu24.04

RUN apt-get update \
    && apt-get install --yes --no-install-recommends python3 python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*

RUN python3 -m venv /opt/vllm && /opt/vllm/bin/pip install --no-cache-dir "vllm>=0.32"

COPY pyproject.toml README.md /src/
COPY agrpo /src/agrpo
COPY conf /src/conf
COPY recipes /src/recipes
# The server's environment needs nothing of ours: the receiver for sync=gloo is a folder on its PYTHONPATH.
RUN python3 -m venv /opt/agrpo \
    && /opt/agrpo/bin/pip install --no-cache-dir "/src[gpu,hub,math,gym,tensorboard,wandb]"

ENV PATH=/opt/agrpo/bin:$PATH
WORKDIR /work
ENTRYPOINT ["agrpo"]
CMD ["--help"]
