"""What to say to a user of TRL's or AReaL's option names: the agrpo key, or why there is none (CLI-3, CFG 24.9)."""

from __future__ import annotations

from typing import Any

# option name -> agrpo key
KEYS = {
    "model": "model.path",
    "model_name_or_path": "model.path",
    "processing_class": "model.tokenizer_path",
    "model_init_kwargs": "model.init_kwargs",
    "dtype": "model.dtype",
    "torch_dtype": "model.dtype",
    "trust_remote_code": "model.trust_remote_code",
    "router_aux_loss_coef": "model.router_aux_loss_coef",
    "bf16": "model.precision=bf16",
    "fp16": "model.precision=fp16",
    "tf32": "model.tf32",
    "gradient_checkpointing": "model.gradient_checkpointing",
    "gradient_checkpointing_kwargs": "model.gradient_checkpointing_kwargs",
    "attn_implementation": "model.attention_backend",
    "fsdp": "model.fsdp.enabled",
    "fsdp_config": "model.fsdp.options",
    "peft_config": "model.lora (model.lora.enabled=true, model.lora.r, model.lora.alpha, ...)",
    "use_peft": "model.lora.enabled=true",
    "lora_r": "model.lora.r",
    "lora_alpha": "model.lora.alpha",
    "lora_dropout": "model.lora.dropout",
    "lora_target_modules": "model.lora.target_modules",
    "train_dataset": "data.path",
    "dataset_name": "data.path",
    "dataset_config": "data.name",
    "dataset_train_split": "data.split",
    "dataset_streaming": "data.streaming",
    "shuffle_dataset": "data.shuffle",
    "data_seed": "data.seed",
    "num_generations": "rollout.group_size",
    "n_samples": "rollout.group_size",
    "max_concurrent_rollouts": "rollout.max_concurrent_rollouts",
    "max_staleness": "rollout.max_staleness",
    "max_head_offpolicyness": "rollout.max_staleness",
    "rollout_worker_timeout": "rollout.worker_timeout",
    "loop_cls": "rollout.loop",
    "workflow": "rollout.workflow",
    "workflow_kwargs": "rollout.workflow_kwargs",
    "should_accept_fn": "rollout.accept_fn",
    "min_usable_group_size": "rollout.min_usable_group_size",
    "drop_incomplete_group": "rollout.drop_incomplete_group",
    "dump_to_file": "rollout.dump_to_file",
    "fileroot": "rollout.fileroot",
    "experiment_name": "rollout.experiment_name",
    "trial_name": "rollout.trial_name",
    "tokenizer_path": "model.tokenizer_path (or rollout.tokenizer_path for the dump)",
    "tools": "env.tools",
    "environment_factory": "env.factory",
    "max_tool_calling_iterations": "env.max_tool_calling_iterations",
    "max_completion_length": "sampler.max_completion_length",
    "max_new_tokens": "sampler.max_completion_length",
    "temperature": "sampler.temperature",
    "top_p": "sampler.top_p",
    "top_k": "sampler.top_k",
    "min_p": "sampler.min_p",
    "num_sampler_logprobs": "sampler.num_sampler_logprobs",
    "chat_template_kwargs": "sampler.chat_template_kwargs",
    "vllm_server_base_url": "server.base_url (with server=external)",
    "vllm_server_host": "server.base_url (with server=external)",
    "vllm_server_port": "server.base_url (with server=external)",
    "vllm_server_timeout": "server.timeout",
    "reward_funcs": "scorer.functions",
    "reward_fn": "scorer.functions",
    "score_queue_maxsize": "scorer.queue_size",
    "reward_normalization": "advantage.rollout_time_norm",
    "reward_norm": "advantage.mean_level and advantage.std_level",
    "adv_norm": "advantage.token_norm",
    "reward_bias": "advantage.reward_bias",
    "reward_scaling": "advantage.reward_scaling",
    "reward_clip": "advantage.reward_clip",
    "overlong_reward_penalty": "advantage.overlong.enabled",
    "overlong_tokens": "advantage.overlong.tokens",
    "overlong_penalty_factor": "advantage.overlong.factor",
    "token_budget": "packer.token_budget",
    "score_centering": "loss=score_centering (false: loss=grpo)",
    "epsilon": "loss.epsilon",
    "eps_clip": "loss.epsilon",
    "epsilon_high": "loss.epsilon_high",
    "vllm_importance_sampling_clip_min": "loss.clip_min",
    "vllm_importance_sampling_clip_max": "loss.clip_max",
    "weight_sync_steps": "sync.every_steps",
    "optim": "optimizer.name",
    "optimizers": "optimizer.name",
    "optim_args": "optimizer.options",
    "optim_target_modules": "optimizer.target_modules",
    "learning_rate": "optimizer.learning_rate",
    "lr": "optimizer.learning_rate",
    "lr_scheduler_type": "optimizer.lr_scheduler_type",
    "lr_scheduler_kwargs": "optimizer.lr_scheduler_kwargs",
    "warmup_steps": "optimizer.warmup_steps",
    "warmup_ratio": "optimizer.warmup_steps (a value below 1 is a share of run.max_steps)",
    "weight_decay": "optimizer.weight_decay",
    "adam_beta1": "optimizer.adam_beta1",
    "adam_beta2": "optimizer.adam_beta2",
    "adam_epsilon": "optimizer.adam_epsilon",
    "max_grad_norm": "optimizer.max_grad_norm",
    "gradient_clipping": "optimizer.max_grad_norm",
    "output_dir": "run.output_dir",
    "num_processes": "run.num_processes",
    "num_train_epochs": "run.num_train_epochs",
    "total_train_epochs": "run.num_train_epochs",
    "max_steps": "run.max_steps",
    "total_train_steps": "run.max_steps",
    "gradient_accumulation_steps": "run.gradient_accumulation_steps",
    "seed": "run.seed",
    "full_determinism": "run.full_determinism",
    "use_cpu": "run.use_cpu",
    "callbacks": "run.callbacks",
    "trial": "run.objective and agrpo train --multirun",
    "ddp_timeout": "run.collective_timeout",
    "resume_from_checkpoint": "run.resume",
    "save_strategy": "checkpoint.strategy",
    "save_steps": "checkpoint.save_steps",
    "save_total_limit": "checkpoint.save_total_limit",
    "save_only_model": "checkpoint.save_only_model",
    "push_to_hub": "checkpoint.hub.push",
    "hub_strategy": "checkpoint.hub.push",
    "hub_model_id": "checkpoint.hub.model_id",
    "hub_token": "checkpoint.hub.token",
    "hub_private_repo": "checkpoint.hub.private",
    "hub_revision": "checkpoint.hub.revision",
    "hub_always_push": "checkpoint.hub.always_push",
    "report_to": "the group logger (logger=wandb, logger=[console,tensorboard])",
    "logging_steps": "logger.logging_steps",
    "logging_first_step": "logger.logging_first_step",
    "log_completions": "logger.log_completions",
    "num_completions_to_print": "logger.num_completions_to_print",
    "run_name": "logger.run_name",
    "project": "logger.project",
    "log_level": "logger.level",
    "disable_tqdm": "logger.progress_bar",
    "trackio_space_id": "logger.options (with logger=trackio)",
    "trackio_bucket_id": "logger.options (with logger=trackio)",
    "trackio_static_space_id": "logger.options (with logger=trackio)",
}

# option names -> why there is no key
REASONS = (
    (
        "use_vllm vllm_mode colocate vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode "
        "vllm_model_impl vllm_max_model_length",
        "generation always runs on a separate server; choose it with server=vllm, server=external or "
        "server=embedded (settings of a managed vLLM are server.*)",
    ),
    (
        "generation_batch_size steps_per_generation num_iterations mu",
        "generation runs continuously beside training; its lead is bounded by rollout.max_staleness, and a step's "
        "size is set by packer.token_budget and run.gradient_accumulation_steps",
    ),
    (
        "per_device_train_batch_size auto_find_batch_size batch_size train_batch_size",
        "it has no effect under a token budget: use packer.token_budget and run.gradient_accumulation_steps",
    ),
    (
        "beta kl_coef kl_ctl ref_model sync_ref_model ref_model_mixup_alpha ref_model_sync_steps use_kl_loss",
        "there is no KL term and no reference model: the policy is held near the sampler by the masked, clipped "
        "ratio of the loss",
    ),
    (
        "reward_model reward_models reward_processing_classes",
        "reward models are not loaded here: serve the model elsewhere and call it from a function in scorer.functions",
    ),
    (
        "reward_weights",
        "rewards are summed as they are: scale inside the function, or give it as {_target_: ..., <args>} in "
        "scorer.functions",
    ),
    (
        "scale_rewards",
        "use advantage.std_level (group, batch or null)",
    ),
    (
        "loss_type importance_sampling_level",
        "the objective is the group loss: loss=score_centering, loss=grpo, ...",
    ),
    (
        "mask_truncated_completions",
        "truncated completions are trained like others; penalise length with advantage.overlong",
    ),
    (
        "max_prompt_length",
        "prompts are never cut; one longer than the server's context is handled by rollout.on_long_prompt",
    ),
    (
        "repetition_penalty presence_penalty frequency_penalty logit_bias bad_words bad_words_ids min_tokens "
        "min_new_tokens forced_bos_token_id forced_eos_token_id guided_decoding guided_decoding_regex "
        "vllm_guided_decoding_regex structured_outputs stop stop_strings generation_kwargs",
        "it changes what is sampled in a way the trainer cannot reproduce, so recorded and trained distributions "
        "would differ",
    ),
    (
        "average_tokens_across_devices",
        "it is always on; see loss.normalization",
    ),
    (
        "label_smoothing_factor neftune_noise_alpha",
        "it would break the ratio of trainer and sampler log-probabilities",
    ),
    (
        "torch_compile torch_compile_backend torch_compile_mode",
        "it is not supported with packed rows of changing length",
    ),
    (
        "use_liger_kernel liger_kernel_config use_liger_loss",
        "Liger kernels are not supported: the fused head already avoids the logits",
    ),
    (
        "use_cache",
        "it is always off in training",
    ),
    (
        "torch_empty_cache_steps",
        "it is not supported",
    ),
    (
        "logging_strategy log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level_replica",
        "records follow logger.logging_steps, NaN values are logged as they are, and tokens are in the metric "
        "num_tokens",
    ),
    (
        "eval_strategy eval_steps eval_delay eval_on_start eval_do_concat_batches eval_use_gather_object "
        "eval_accumulation_steps per_device_eval_batch_size prediction_loss_only batch_eval_metrics "
        "include_for_metrics bf16_full_eval fp16_full_eval do_eval do_predict do_train eval_dataset "
        "num_generations_eval",
        "evaluations are named entries of the group eval",
    ),
    (
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "keep every checkpoint and choose by the eval results in metrics.jsonl",
    ),
    (
        "save_on_each_node enable_jit_checkpoint restore_callback_states_from_checkpoint",
        "rank 0 saves, a signal always saves, and callback states are always restored",
    ),
    (
        "ignore_data_skip",
        "it is fixed to true: a live queue cannot skip and replay batches",
    ),
    (
        "remove_unused_columns",
        "it is fixed to false: rewards and environments need every column",
    ),
    (
        "deepspeed parallelism_config accelerator_config",
        "sharding is FSDP2 only, without context or sequence parallelism: see model.fsdp and run.num_processes",
    ),
    (
        "cp_size sp_size context_parallel_size sequence_parallel_size tp_size",
        "context and sequence parallelism are not supported: rows hold whole samples; scale with run.num_processes",
    ),
    (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend",
        "sharding is FSDP2 only; its time limit is run.collective_timeout",
    ),
    (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order",
        "there is no data loader: rows come from the sample queue",
    ),
    (
        "label_names train_sampling_strategy length_column_name",
        "prompts follow data.shuffle",
    ),
    (
        "debug skip_memory_metrics local_rank",
        "the launcher and the loggers decide this",
    ),
)
_REASON_OF = {name: reason for names, reason in REASONS for name in names.split()}


def answer(key: str, value: Any = None) -> str | None:
    """The line for an option of another system, or None for any other unknown key.

    `answer("num_generations", 8)` is `num_generations is not a key of agrpo; use rollout.group_size=8`.
    """
    leaf = key.rsplit(".", 1)[-1]
    if leaf in KEYS and key != KEYS[leaf]:
        here = KEYS[leaf]
        plain = here.replace(".", "").replace("_", "").isalnum()
        shown = f"{here}={_spell(value)}" if plain and isinstance(value, str | int | float) else here
        return f"{key} is not a key of agrpo; use {shown}"
    if leaf in _REASON_OF:
        return f"{key} has no key in agrpo: {_REASON_OF[leaf]}"
    return None


def _spell(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
