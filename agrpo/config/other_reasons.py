"""Option names of TRL, AReaL and verl that have no key, and why (CFG 24.9)."""

REASONS = (
    (
        "use_vllm vllm_mode colocate vllm_gpu_memory_utilization vllm_tensor_parallel_size vllm_enable_sleep_mode "
        "vllm_model_impl vllm_max_model_length enable_offload use_transformers_paged cache_implementation",
        "generation always runs on a separate server; choose it with server=vllm, server=external or "
        "server=embedded (settings of a managed vLLM are server.*)",
    ),
    (
        "generation_batch_size steps_per_generation num_iterations mu ppo_epochs rollout_batch_size",
        "generation runs continuously beside training; its lead is bounded by rollout.max_staleness, and a step's "
        "size is set by packer.token_budget and run.gradient_accumulation_steps",
    ),
    (
        "per_device_train_batch_size auto_find_batch_size batch_size dynamic_bs train_batch_size gen_batch_size consumer_batch_size n_mbs "
        "ppo_mini_batch_size ppo_micro_batch_size ppo_micro_batch_size_per_gpu log_prob_micro_batch_size_per_gpu "
        "log_prob_max_token_len_per_gpu use_dynamic_bsz",
        "it has no effect under a token budget: use packer.token_budget and run.gradient_accumulation_steps",
    ),
    (
        "beta kl_coef kl_ctl ref_model sync_ref_model ref_model_mixup_alpha ref_model_sync_steps use_kl_loss kl_estimator "
        "kl_loss_coef kl_loss_type use_kl_in_reward kl_penalty kl_ctrl use_bias_correction_kl ref ref.path",
        "there is no KL term and no reference model: the policy is held near the sampler by the masked, clipped "
        "ratio of the loss",
    ),
    (
        "reward_model reward_models reward_model_name_or_path reward_processing_classes",
        "reward models are not loaded here: serve the model elsewhere and call it from a function in scorer.functions",
    ),
    (
        "reward_weights multi_objective_aggregation",
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
        "mask_truncated_completions mask_no_eos_with_zero",
        "truncated completions are trained like others; penalise length with advantage.overlong",
    ),
    (
        "max_prompt_length train_dataset.max_length",
        "prompts are never cut; one longer than the server's context is handled by rollout.on_long_prompt",
    ),
    (
        "repetition_penalty presence_penalty frequency_penalty logit_bias bad_words bad_words_ids min_tokens "
        "min_new_tokens stop_token_ids ignore_eos greedy do_sample use_beam_search forced_bos_token_id forced_eos_token_id guided_decoding guided_decoding_regex "
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
        "torch_compile torch_compile_backend torch_compile_mode torchdynamo enable_compile",
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
        "num_generations_eval dataset_test_split test_freq val_before_train val_files val_batch_size valid_dataset valid_dataset.path "
        "evaluator evaluator.freq_epochs evaluator.freq_steps evaluator.freq_secs val_kwargs",
        "evaluations are named entries of the group eval",
    ),
    (
        "load_best_model_at_end metric_for_best_model greater_is_better",
        "keep every checkpoint and choose by the eval results in metrics.jsonl",
    ),
    (
        "save_on_each_node save_safetensors enable_jit_checkpoint restore_callback_states_from_checkpoint",
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
        "deepspeed ds3_gather_for_generation parallelism_config accelerator_config actor.strategy actor.backend megatron archon",
        "sharding is FSDP2 only, without context or sequence parallelism: see model.fsdp and run.num_processes",
    ),
    (
        "cp_size sp_size context_parallel_size sequence_parallel_size tp_size ulysses_sequence_parallel_size",
        "context and sequence parallelism are not supported: rows hold whole samples; scale with run.num_processes",
    ),
    (
        "ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend",
        "sharding is FSDP2 only; its time limit is run.collective_timeout",
    ),
    (
        "dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order train_dataset.pin_memory "
        "train_dataset.num_workers train_dataset.drop_last valid_dataset.pin_memory valid_dataset.num_workers dataset_num_proc",
        "there is no data loader: rows come from the sample queue",
    ),
    (
        "label_names train_sampling_strategy length_column_name group_by_length",
        "prompts follow data.shuffle",
    ),
    (
        "debug skip_memory_metrics local_rank machine_rank ray_scope use_mps_device include_tokens_per_second logging_dir",
        "the launcher and the loggers decide this",
    ),
    (
        "allocation_mode n_gpus_per_node",
        "every visible GPU is used; run.devices={server: [..], trainer: [..]} splits them, run.num_processes is the number of "
        "trainer ranks, and servers elsewhere are server=external",
    ),
    (
        "async_training",
        "training is always asynchronous; how old a trained sample may be is rollout.max_staleness",
    ),
    (
        "adv_estimator",
        "advantages are those of a group; leave-one-out is advantage.leave_one_out=true, no divisor is "
        "advantage.std_level=null, and there is no critic",
    ),
    (
        "critic is_critic gae_lambda discount gamma lam value_loss_coef cliprange_value",
        "there is no critic and no discount over tokens: rewards of answers become group advantages",
    ),
    (
        "entropy_coeff entropy_coef",
        "there is no entropy term in the loss; the entropy is a metric",
    ),
    (
        "top_entropy_quantile",
        "every trained token counts, whatever its entropy",
    ),
    (
        "vllm_importance_sampling_correction vllm_importance_sampling_mode off_policy_mask_threshold behave_imp_weight_mode "
        "rollout_is rollout_is_threshold calculate_log_probs",
        "the ratio to the sampler's recorded log-probs is always in the loss; its bounds are loss.clip_min and loss.clip_max, "
        "and other forms are loss=tis and loss=decoupled",
    ),
    (
        "load_in_4bit load_in_8bit use_bitsandbytes quantization_config bnb_4bit_quant_type bnb_4bit_compute_dtype use_bnb_nested_quant",
        "quantised weights are not trained; use model.dtype=bfloat16 and model=lora to save memory",
    ),
    (
        "use_remove_padding pad_to_maximum pad_to_multiple_of",
        "rows are always packed without padding: packer=tree shares prefixes, packer=sequence does not",
    ),
    (
        "queue_maxsize rollout.queue_size pause_grace_period",
        "what waits between generation and training is bounded in tokens, by rollout.max_staleness",
    ),
    (
        "fork_threshold_tokens",
        "a turn goes on from the sampled tokens where it can and is a sample of its own elsewhere; no sampled token is given up",
    ),
    (
        "rollout_worker weight_transfer vllm_group_port",
        "the run starts its own rollout process and chooses its own ports; the ways to send weights are sync=nccl, sync=gloo, "
        "sync=disk",
    ),
    (
        "cast_lm_head_to_fp32 grad_reduce_dtype",
        "log-probs, their gradient and the sum of gradients over ranks are always computed in float32",
    ),
    (
        "disable_dropout",
        "it is always off: the server has none, so log-probs would differ",
    ),
    (
        "init_from_scratch memory_efficient_load",
        "weights are read from model.path, by rank 0 alone, which sends the others their shards",
    ),
    (
        "overwrite_output_dir",
        "a folder that holds a run is never written over: continue it with run.resume=auto, or choose another run.output_dir",
    ),
    (
        "chat_template_path",
        "the template is that of the tokenizer: save a tokenizer with the template you want and name its folder in "
        "model.tokenizer_path",
    ),
    (
        "min_lr_ratio",
        "schedules are constant, constant_with_warmup, linear and cosine, and the last two end at 0",
    ),
    (
        "rejection_sampling.level rejection_sampling.action rejection_sampling.metric rejection_sampling.agg",
        "loss=decoupled masks tokens outside loss.clip_min and loss.clip_max; loss=tis clamps or masks by token or by answer",
    ),
    (
        "use_sapo_loss sapo_tau_pos sapo_tau_neg sapo_temperature_pos sapo_temperature_neg use_m2po_loss m2_threshold "
        "vespo_k_pos vespo_k_neg vespo_lambda_pos vespo_lambda_neg",
        "that objective is not there; a loss of your own is a class, see docs/losses.md",
    ),
    (
        "peft_type lora_task_type lora_target_parameters model_adapter_name ref_adapter_name lora_name",
        "the only adapters are LoRA on linear layers, named by version; their settings are model.lora",
    ),
    (
        "reward_normalization_use_std",
        "advantage.rollout_time_norm divides by the standard deviation; to subtract the mean alone leave it false and set "
        "advantage.std_level=null",
    ),
    (
        "mb_spec.granularity mb_spec.packing_algorithm mb_spec.n_mbs_divisor packing_algorithm",
        "rows are planned for the whole step and balanced over ranks: packer=tree or packer=sequence",
    ),
    (
        "saver.freq_secs recover.freq_secs recover.retries saver.mode",
        "checkpoints are counted in steps, checkpoint.save_steps, and hold all that a resume needs; run.resume=auto continues",
    ),
    (
        "scheduler scheduler.type scheduling_spec scheduling_strategy launcher name_resolve ray slurm",
        "agrpo train starts its processes itself; several machines are run.num_nodes and server=external, and Slurm is "
        "hydra/launcher=submitit_slurm",
    ),
    (
        "agent.mode openai.mode schedule_policy",
        "agents run in the rollout process, and a request goes to the server with the fewest in flight",
    ),
    (
        "sglang.model_path sglang.dtype sglang.random_seed vllm.model vllm.seed skip_tokenizer_init skip_special_tokens rollout.backend",
        "the server is vLLM and serves model.path in the trainer's precision: server=vllm, more with server.arguments",
    ),
    (
        "enable_rollout_tracing perf_tracer perf_tracer.enabled session_tracer session_tracer.enabled log_agent_stats",
        "it is always on: metrics.jsonl, ledger.jsonl and timeline/ in the run's folder, shown by agrpo report",
    ),
    (
        "swanlab swanlab.mode",
        "the loggers are console, wandb, tensorboard and trackio; metrics.jsonl is always written",
    ),
    (
        "total_train_n_seqs",
        "a run's length is run.max_steps or run.num_train_epochs",
    ),
    (
        "max_tool_response_length max_episode_length",
        "results of tools are not cut: cut them in the tool; a conversation ends at the server's context",
    ),
    (
        "rollout.name rollout.mode enforce_eager free_cache_engine",
        "generation always runs on a separate server: server=vllm with server.arguments, server=external or server=embedded",
    ),
)
