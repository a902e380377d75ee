"""The fixed sections of the configuration: run, checkpoint, rollout, model, optimizer, logger (CFG 24.1-3, 24.6, 24.8).

A field is a key: its type, default, meaning and allowed range are declared here and nowhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from agrpo.schema import setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    output_dir: str = setting(doc="folder that holds every file of the run")
    num_processes: int | None = setting(
        None, "trainer ranks on this node; null = one per trainer device, 1 on CPU", ge=1
    )
    num_nodes: int = setting(1, "machines with trainer ranks, as many on each; the others join by torchrun", ge=1)
    master: str | None = setting(None, "HOST:PORT of this machine at which the nodes meet; needed with more than one")
    devices: dict[str, list[int]] | None = setting(None, "device split {trainer: [..], server: [..]}; null = planned")
    num_train_epochs: float = setting(3.0, "passes over the prompts; ignored when max_steps is set", gt=0)
    max_steps: int | None = setting(
        None, "optimizer steps; null = as many as the epochs need (-1 and 0 read as null)", ge=1
    )
    gradient_accumulation_steps: int = setting(1, "microbatches per step", ge=1)
    seed: int = setting(42, "seed of everything random in the run", ge=0, le=2**32 - 1)
    full_determinism: bool = setting(False, "deterministic kernels; slower")
    use_cpu: bool = setting(False, "train on CPU even where a GPU is present")
    resume: str | None = setting(
        None, "null = fresh run, auto = newest checkpoint in output_dir, or a checkpoint's path"
    )
    allow_dataset_change: bool = setting(False, "on resume, accept other data and start them from the first prompt")
    callbacks: list[str] = setting(doc="import paths of callbacks: classes with methods such as on_step_end, or functions", factory=list)
    objective: str | None = setting(None, "metric whose last value a sweeper receives")
    collective_timeout: float = setting(1800.0, "seconds a trainer rank may go without progress", gt=0)
    parity_warn: float | None = setting(
        0.1, "nats per token by which trainer and server may disagree at age 0 before a warning; null = never", gt=0
    )
    parity_stop: float | None = setting(0.5, "the same, before the run is ended and saved; null = never", gt=0)

    @property
    def num_ranks(self) -> int:
        """Trainer ranks on all nodes; one per node where their number is not planned yet."""
        return (self.num_processes or 1) * self.num_nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    push: str = setting("no", "when to upload", choices=("no", "end", "every_save"))
    model_id: str | None = setting(None, "owner/name of the repository")
    token: str | None = setting(None, "access token; null = the host's login; never written to disk")
    private: bool | None = setting(None, "make a new repository private; null = the owner's default")
    revision: str | None = setting(None, "branch to push to; null = main")
    commit_message: str = setting("End of training", "message of the commit")
    blocking: bool = setting(True, "wait for the upload; false uploads in the background")
    always_push: bool = setting(False, "push even if the previous push is unfinished")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    strategy: str = setting("steps", "when to save during the run", choices=("steps", "epoch", "no"))
    save_steps: int = setting(500, "steps between two checkpoints", ge=1)
    save_total_limit: int | None = setting(None, "newest checkpoints to keep; null = all", ge=1)
    save_only_model: bool = setting(False, "leave out optimizer and cursor; such a checkpoint cannot be resumed")
    save_final: bool = setting(True, "save at the end of the run")
    save_ready_groups: bool = setting(True, "save finished groups that were not trained yet, so that resume uses them")
    hub: Hub = setting(doc="upload of checkpoints", factory=Hub)


@dataclass(frozen=True, slots=True, kw_only=True)
class Concurrency:
    poll_interval: float = setting(5.0, "seconds between two looks at the server's metrics", gt=0)
    raise_only_when_reached: bool = setting(True, "raise the cap only when rollouts reached it; false = always")


@dataclass(frozen=True, slots=True, kw_only=True)
class Agent:
    export_style: str = setting(
        "concat",
        "concat: the answers of a conversation are one sample; individual: a sample per answer",
        choices=("concat", "individual"),
    )
    turn_discount: float = setting(1.0, "factor per answer by which later rewards count for earlier answers", ge=0, le=1)
    time_limit: float | None = setting(
        600.0, "seconds one rollout of an agent, a workflow or a loop's generate_one may take; null = no limit", gt=0
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    group_size: int = setting(8, "rollouts per prompt", ge=1)
    max_concurrent_rollouts: int = setting(512, "upper bound of rollouts in flight", ge=1)
    max_staleness: int = setting(4, "oldest policy, in versions, whose samples are still trained", ge=0)
    allowance_window_steps: int = setting(4, "steps over which the tokens per step are averaged for admission", ge=1)
    staleness_stamp: str = setting(
        "token", "what dates a sample: its oldest token or its group", choices=("token", "group")
    )
    worker_timeout: float = setting(300.0, "seconds the rollout process may go without a sign of life", gt=0)
    progress_timeout: float | None = setting(
        1800.0, "seconds without a finished turn, group or sample; null = off", gt=0
    )
    on_error: str = setting("unusable", "a failed rollout is set aside or ends the run", choices=("unusable", "abort"))
    on_long_prompt: str = setting(
        "skip", "a prompt longer than the context is skipped or ends the run", choices=("skip", "abort")
    )
    max_failure_frac: float = setting(0.5, "share of failed rollouts that ends the run", gt=0, le=1)
    failure_window: int = setting(256, "rollouts over which that share is taken", ge=1)
    concurrency: Concurrency = setting(doc="the concurrency controller", factory=Concurrency)
    loop: str | None = setting(None, "import path of a RolloutLoop subclass")
    loop_config: dict[str, Any] = setting(doc="free settings for that loop", factory=dict)
    workflow: str | None = setting(None, "import path of a workflow or agent")
    workflow_kwargs: dict[str, Any] | None = setting(None, "arguments of the workflow class")
    agent: Agent = setting(doc="how an agent's rollouts are run and exported", factory=Agent)
    accept_fn: str | None = setting(None, "import path of a function that accepts or drops a finished group")
    min_usable_group_size: int | None = setting(None, "usable rollouts a group needs; null = derived", ge=1)
    drop_incomplete_group: bool = setting(False, "drop a group with any unusable rollout")
    check_format: int = setting(16, "number of first episodes whose result is checked", ge=0)
    dump_to_file: bool = setting(False, "write every finished group to a JSONL file under fileroot")
    dump_keep_versions: int | None = setting(None, "version folders of the dump to keep, the newest; null = all", ge=1)
    fileroot: str | None = setting(None, "folder of the dump")
    experiment_name: str | None = setting(None, "first folder of the dump; null = the recipe's name, else default")
    trial_name: str | None = setting(None, "second folder of the dump; null = the run's name")
    tokenizer_path: str | None = setting(None, "tokenizer that decodes the dump; null = the model's")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fsdp:
    enabled: bool | None = setting(None, "FSDP2; null = on with more than one trainer process")
    options: dict[str, Any] = setting(doc="FSDP2: layer_classes, reshard_after_forward, cpu_offload, replicate (copies of the sharded model), prefetch (layers)", factory=dict)


# PEFT's arguments that leave the base weights as they are; others change them, or the model around the adapter.
LORA_OPTIONS = (
    "use_rslora", "use_dora", "bias", "modules_to_save", "rank_pattern", "alpha_pattern", "layers_to_transform",
    "layers_pattern", "exclude_modules", "init_lora_weights",
)  # fmt: skip
LORA_STARTS = (True, "gaussian", "orthogonal")  # values of init_lora_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Lora:
    enabled: bool = setting(False, "train an adapter instead of the whole model")
    r: int = setting(32, "rank of the adapter", ge=1, le=512)
    alpha: float = setting(64.0, "scale of the adapter", gt=0)
    target_modules: str | list[str] = setting("all-linear", "modules that get an adapter; never the head")
    dropout: float = setting(0.0, "dropout on the adapter's input", ge=0, lt=1)
    options: dict[str, Any] = setting(doc="other PEFT arguments", factory=dict)

    @property
    def merged_only(self) -> str | None:
        """The option that makes an adapter which servers cannot load, so that weights are sent merged (LORA-3)."""
        options = self.options
        if options.get("use_dora"):
            return "model.lora.options.use_dora"
        if options.get("bias", "none") != "none":
            return "model.lora.options.bias"
        return next(
            (f"model.lora.options.{k}" for k in ("modules_to_save", "rank_pattern", "alpha_pattern") if options.get(k)),
            None,
        )


ATTENTION_BACKENDS = ("auto", "varlen", "flex", "sdpa", "torch", "fa3", "fa4", "aiter")


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    path: str = setting(doc="Hub id, or a folder written by save_pretrained")
    tokenizer_path: str | None = setting(None, "tokenizer; null = the model's own")
    init_kwargs: dict[str, Any] = setting(doc="keyword arguments of the loader", factory=dict)
    dtype: str = setting(
        "float32", "precision of the loaded weights", choices=("auto", "bfloat16", "float16", "float32")
    )
    trust_remote_code: bool = setting(False, "run Python code that ships with the model")
    router_aux_loss_coef: float | None = setting(
        None, "weight of the mixture-of-experts loss; 0 = off, null = model's", ge=0
    )
    precision: str = setting(
        "bf16", "precision of forward and backward; no = that of the weights", choices=("bf16", "fp16", "no")
    )
    tf32: bool | None = setting(None, "TF32 matrix products on NVIDIA GPUs; null = PyTorch's default")
    gradient_checkpointing: bool = setting(True, "recompute activations in the backward pass to save memory")
    gradient_checkpointing_kwargs: dict[str, Any] | None = setting(None, "arguments of gradient checkpointing")
    attention_backend: str = setting(
        "auto", "attention kernel; auto = by GPU, precision and model, logged with its reason", choices=ATTENTION_BACKENDS
    )
    fsdp: Fsdp = setting(doc="sharding over trainer processes", factory=Fsdp)
    lora: Lora = setting(doc="adapter training", factory=Lora)


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    name: str = setting("adamw_torch_fused", "optimizer by name, or the import path of its class")
    options: str | dict[str, Any] | None = setting(None, "further arguments, as a mapping or as k=v,k=v")
    target_modules: str | list[str] | None = setting(None, "modules that an optimizer with module rules applies to")
    learning_rate: float = setting(1e-6, "peak learning rate", ge=0)
    lr_scheduler_type: str = setting("constant", "schedule: constant, constant_with_warmup, linear or cosine; counts optimizer updates")
    lr_scheduler_kwargs: dict[str, Any] | None = setting(None, "arguments of the schedule")
    warmup_steps: float = setting(0.0, "optimizer updates (of which a step may hold several) of warm-up; below 1 = share of the run's", ge=0)
    weight_decay: float = setting(0.0, "decoupled weight decay; never on norms and biases", ge=0)
    adam_beta1: float = setting(0.9, "decay of the gradient average", ge=0, lt=1)
    adam_beta2: float = setting(0.999, "decay of the squared-gradient average", ge=0, lt=1)
    adam_epsilon: float = setting(1e-8, "term added to the denominator", gt=0)
    max_grad_norm: float = setting(1.0, "gradient norm above which gradients are scaled down; 0 = no clipping", ge=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Logger:
    sinks: dict[str, bool] = setting(doc="where records go besides metrics.jsonl: sink name -> on or off", factory=dict)
    logging_steps: int = setting(1, "steps per record", ge=1)
    logging_first_step: bool = setting(False, "also write a record for the first step")
    log_completions: bool = setting(False, "write completions.jsonl and show prompts, answers and rewards after each record")
    num_completions_to_print: int | None = setting(None, "rollouts shown after each record; null = all of its window", ge=1)
    run_name: str | None = setting(None, "name of the run; null = its folder's name")
    project: str = setting("agrpo", "project that the run belongs to")
    options: dict[str, Any] = setting(doc="arguments of the logger; of several, one mapping for each under its name", factory=dict)
    level: str = setting(
        "info", "log level of rank 0; other ranks log warnings only", choices=("debug", "info", "warning", "error")
    )
    progress_bar: bool | None = setting(None, "live table; null = on for a terminal")
