"""Option names of other systems: each is answered with what to type here, or with the reason why there is no such key."""

import importlib.util
import re
import shlex

import pytest

from agrpo.config import check, compose
from agrpo.config.hints import KEYS, REASONS, VALUES, answer, suggestion
from agrpo.errors import ConfigError
from tests.config.small import GPUS, SMALL, has, problems


@pytest.mark.parametrize(
    "name",
    "use_vllm vllm_mode per_device_train_batch_size beta use_liger_kernel deepspeed torch_compile "
    "remove_unused_columns ignore_data_skip repetition_penalty stop eval_steps label_smoothing_factor cp_size "
    "reward_weights".split(),
)
def test_options_without_a_key_are_answered_with_the_reason(name):
    for key in (name, f"sampler.{name}"):
        found = problems(f"{key}=1")
        assert len(found) == 1 and found[0].startswith(f"{key} has no key in agrpo: ")


def test_every_hint_leads_to_a_key_that_exists():
    trees = [compose([*SMALL, "server=external", "loss=grpo"])]
    trees += [compose([*SMALL, "server=vllm", f"loss={name}"]) for name in ("tis", "decoupled")]
    for name, here in KEYS.items():
        if here.startswith(("the group ", "loss=", "packer=")):
            continue
        assert any(has(tree, here.split(" ")[0]) for tree in trees), (name, here)
    assert answer("no_such_option") is None
    assert not {n for names, _ in REASONS for n in names.split()} & set(KEYS)
    assert set(VALUES) <= set(KEYS)


# What users of the other systems write, beside what the table of values names. Placeholders of an answer are filled in.
PLAUSIBLE = {
    "dtype": "bfloat16", "torch_dtype": "bfloat16", "optim": "adamw_torch", "optimizers": "sgd", "save_strategy": "epoch",
    "lr_scheduler_type": "cosine", "log_level": "info", "hub_strategy": "end", "fsdp": "full_shard auto_wrap",
    "attn_implementation": "flash_attention_2", "attn_impl": "kernels-community/vllm-flash-attn3",
    "vllm_server_base_url": "http://node7:8000", "vllm_server_host": "0.0.0.0", "vllm_server_port": 8001,
    "reward_funcs": ["agrpo.scorer.rewards.accuracy_reward"], "reward_fn": "agrpo.scorer.rewards.boxed_match",
    "resume_from_checkpoint": True, "dataset_name": "owner/some-data", "train_files": "owner/other-data", "report_to": "wandb",
    "trainer.logger": ["console", "tensorboard"], "epsilon_high": 0.28, "eps_clip_higher": 0.28, "clip_ratio_high": 0.28,
    "vllm_importance_sampling_clip_max": 3.0, "vllm_importance_sampling_clip_min": 0.1, "vllm_importance_sampling_cap": 3.0,
    "clip_ratio": 0.1, "clip_ratio_low": 0.1, "epsilon": 0.1, "eps_clip": 0.1, "min_p": 0, "top_p": 1.0, "top_k": -1,
    "temperature": 0.7, "adam_beta1": 0.8, "adam_beta2": 0.98, "beta1": 0.8, "beta2": 0.98, "lora_dropout": 0.05,
    "warmup_ratio": 0.1, "warmup_steps_proportion": 0.1, "hub_model_id": "owner/name", "gpu_memory_utilization": 0.6,
    "lora_target_modules": ["q_proj", "v_proj"], "target_modules": "all-linear", "tensor_model_parallel_size": 1,
    "callbacks": "agrpo.scorer.rewards.text_of", "nnodes": 1, "n_nodes": 1,
    "token_budget": 8192, "max_tokens_per_mb": 8192, "ppo_max_token_len_per_gpu": 8192, "num_processes": 1,
    "max_tree_tokens": 8192, "gconfig.max_tokens": 32768, "sglang.context_length": 32768, "vllm.max_model_len": 32768,
    "vllm.tensor_parallel_size": 1, "mem_fraction_static": 0.8, "max_num_seqs": 256, "max_running_requests": 256,
    "rejection_sampling.lower": 0.5, "rejection_sampling.upper": 5.0, "reward_norm.mean_level": "group",
    "adv_norm.mean_level": "batch", "adv_norm.std_level": "batch", "optimizer.eps": 1e-6, "reward_norm.eps": 1e-5,
    "model_revision": "main", "num_machines": 1, "main_process_ip": "10.0.0.1", "main_process_port": 29500,
    "transformer_layer_cls_to_wrap": "Qwen3DecoderLayer",
    "min_usable_group_size": 2, "loss_agg_mode": "seq-mean-token-mean", "overlong_penalty_factor": 0.5,
}  # fmt: skip
FILLED = {"HOST": "10.0.0.1", "OWNER/NAME": "owner/name", "NUMBER": "1000", "FOLDER": "/tmp/agrpo-test-never-made"}
NEEDS_MORE = {  # what the answer says to do is code, a file or a folder that this test has not
    "loop_cls", "workflow", "should_accept_fn", "environment_factory", "model_init_kwargs", "resume_mode", "trial", "tools",
    "rollout_func",
}  # fmt: skip


@pytest.fixture(scope="module")
def defaults():
    """The default of every key, as the value that a user of another system may give."""
    return [compose([*SMALL, "server=external", "loss=grpo"])]


def _values_of(name: str, here: str, tree: dict) -> list:
    flags = {"true": True, "false": False}
    listed = [flags.get(v, v) for v in VALUES.get(name, {}) if v != "*"]
    if name in PLAUSIBLE:
        return [*listed, PLAUSIBLE[name]]
    if not listed and re.fullmatch(r"[\w.]+", here) and has(tree, here):
        for part in here.split("."):
            tree = tree[part]
        return [3 if tree is None and name.startswith(("max", "num", "save", "total", "overlong")) else tree]
    return listed or [3]


def test_what_a_hint_says_to_type_is_accepted(defaults):
    alone, together = [], [{}]
    for name, here in KEYS.items():
        for value in [] if name in NEEDS_MORE else _values_of(name, here, defaults[0]):
            said = suggestion(name, value)
            if said == here or value is None or ("fa3" in said and not importlib.util.find_spec("kernels")):
                continue
            for placeholder, filled in FILLED.items():
                said = said.replace(placeholder, filled)
            words = dict(word.split("=", 1) for word in shlex.split(said))
            if all("." in key for key in words):
                # Composing takes time: answers to different keys are typed on one command line.
                batch = next((b for b in together if not set(b) & set(words)), None)
                together += [batch := {}] if batch is None else []
                batch.update(words)
            else:
                alone.append(words)
    assert len(alone) > 25 and sum(map(len, together)) > 80
    for words in [*together, *{tuple(w.items()): w for w in alone}.values()]:
        typed = [f"{key}={value}" for key, value in words.items()]
        try:
            check(compose([*SMALL, "run.max_steps=1000", "packer.token_budget=8192", *typed]), GPUS)
        except ConfigError as error:
            raise AssertionError(f"{' '.join(typed)}: {error.problems}") from None


@pytest.mark.parametrize(
    ("typed", "line"),
    [
        ("actor.eps_clip=0.1", "actor.eps_clip is not a key of agrpo; use loss.epsilon=0.1"),
        ("actor.optimizer.lr=1e-5", "actor.optimizer.lr is not a key of agrpo; use optimizer.learning_rate=1e-05"),
        ("gconfig.n_samples=4", "gconfig.n_samples is not a key of agrpo; use rollout.group_size=4"),
        ("actor.adv_norm.mean_level=batch", "actor.adv_norm is not a key of agrpo; use advantage.token_norm (batch, group"),
        ("actor.path=owner/model", "actor.path is not a key of agrpo; use model.path=owner/model"),
        ("rollout.consumer_batch_size=32", "rollout.consumer_batch_size has no key in agrpo: it has no effect under a token"),
        ("allocation_mode=vllm:d4+fsdp:d4", "allocation_mode has no key in agrpo: every visible GPU is used"),
        ("critic.path=x", "critic has no key in agrpo: there is no critic"),
        ("delta=3", "delta is not a key of agrpo; use loss=grpo loss.dual_clip=3"),
        ("top_entropy_quantile=0.2", "top_entropy_quantile has no key in agrpo: "),
        ("disable_tqdm=true", "disable_tqdm is not a key of agrpo; use logger.progress_bar=false"),
        ("report_to=all", "report_to is not a key of agrpo; use 'logger=[console,tensorboard]'"),
        ("bf16=false", "bf16 is not a key of agrpo; use model.precision=no"),
        ("use_peft=false", "use_peft is not a key of agrpo; use model.lora.enabled=false"),
        ("dataset_name=a/b", "dataset_name is not a key of agrpo; use data=hub data.path=a/b"),
        ("dataset_name=x.jsonl", "dataset_name is not a key of agrpo; use data=jsonl data.path=x.jsonl"),
        ("reward_funcs=accuracy", "reward_funcs is not a key of agrpo; use 'scorer.functions=[MODULE.accuracy]'"),
        ("actor_rollout_ref.rollout.n=5", "actor_rollout_ref.rollout.n is not a key of agrpo; use rollout.group_size=5"),
        ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator has no key in agrpo: advantages are those of a group"),
        ("trainer.n_gpus_per_node=8", "trainer.n_gpus_per_node has no key in agrpo: every visible GPU is used"),
        ("actor.some_knob=1 actor.lr=1e-5", "actor.some_knob is not a key of agrpo; agrpo train --cfg job lists every key"),
    ],
)
def test_options_of_other_systems_are_answered_wherever_they_stood(typed, line):
    found = problems(*typed.split())
    assert found[0].startswith(line) and len(found) == len(typed.split()), found


# The names in the example configurations of AReaL, and in the arguments of TRL's trainers and scripts: none may be answered
# with "is not a key" alone.
AREAL = """enable_offload total_train_epochs total_train_steps total_train_n_seqs cluster.n_nodes cluster.n_gpus_per_node
allocation_mode scheduler.type experiment_name trial_name rollout.queue_size rollout.consumer_batch_size rollout.backend
rollout.max_head_offpolicyness rollout.enable_rollout_tracing rollout.scheduling_spec rollout.check_trajectory_format
rollout.request_timeout rollout.request_retries rollout.setup_timeout rollout.pause_grace_period rollout.schedule_policy
rollout.openai.mode rollout.openai.turn_discount rollout.openai.export_style rollout.agent.mode gconfig.n_samples
gconfig.min_new_tokens gconfig.max_new_tokens gconfig.max_tokens gconfig.greedy gconfig.stop_token_ids gconfig.ignore_eos
gconfig.skip_special_tokens gconfig.frequency_penalty gconfig.use_beam_search gconfig.lora_name gconfig.reward_normalization
gconfig.reward_normalization_use_std gconfig.drop_incomplete_group actor.path actor.init_from_scratch actor.disable_dropout
actor.gradient_checkpointing actor.attn_impl actor.mb_spec.max_tokens_per_mb actor.mb_spec.n_mbs actor.mb_spec.granularity
actor.mb_spec.packing_algorithm actor.optimizer.type actor.optimizer.lr actor.optimizer.weight_decay actor.optimizer.beta1
actor.optimizer.eps actor.optimizer.lr_scheduler_type actor.optimizer.min_lr_ratio actor.optimizer.gradient_clipping
actor.optimizer.warmup_steps_proportion actor.optimizer.offload actor.fsdp.offload_params actor.fsdp.memory_efficient_load
actor.fsdp.wrap_policy.transformer_layer_cls_to_wrap actor.grad_reduce_dtype actor.eps_clip actor.eps_clip_higher
actor.c_clip actor.reward_scaling actor.reward_bias actor.reward_clip actor.overlong_reward_penalty actor.kl_ctl
actor.kl_estimator actor.mask_no_eos_with_zero actor.ppo_n_minibatches actor.recompute_logprob actor.use_decoupled_loss
actor.behav_imp_weight_cap actor.rejection_sampling.upper actor.rejection_sampling.level actor.prox_logp_method
actor.importance_sampling_level actor.use_sapo_loss actor.use_cispo_loss actor.dynamic_sampling actor.weight_update_mode
actor.reward_norm.mean_level actor.reward_norm.std_level actor.reward_norm.group_size actor.reward_norm.mean_leave1out
actor.reward_norm.std_unbiased actor.reward_norm.eps actor.adv_norm.std_level actor.use_lora actor.lora_rank actor.peft_type
actor.entropy_coeff actor.backend actor.enable_tree_training actor.max_tree_tokens ref.path sglang.context_length
sglang.mem_fraction_static sglang.max_running_requests vllm.max_model_len vllm.gpu_memory_utilization vllm.max_num_seqs
vllm.enforce_eager train_dataset.path train_dataset.batch_size train_dataset.shuffle train_dataset.num_workers
train_dataset.max_length valid_dataset.path saver.freq_steps saver.freq_epochs saver.freq_secs recover.mode recover.freq_steps
recover.retries evaluator.freq_steps stats_logger.wandb.mode stats_logger.wandb.name stats_logger.tensorboard.path
stats_logger.swanlab.mode perf_tracer.enabled dynamic_bs"""
TRL = """num_generations max_completion_length vllm_server_base_url vllm_server_timeout epsilon_high score_centering
num_sampler_logprobs token_budget max_inflight_tasks heartbeat_stale_after_s queue_maxsize fork_threshold_tokens
request_timeout chat_template_path cast_lm_head_to_fp32 generation_batch_size disable_dropout num_iterations beta delta
reward_weights scale_rewards loss_type mask_truncated_completions sync_ref_model top_entropy_quantile max_prompt_length
ds3_gather_for_generation vllm_mode vllm_group_port use_transformers_paged generation_kwargs rollout_func rollout_worker
reward_funcs train_dataset eval_dataset processing_class peft_config quantization_config model_revision dataset_test_split
dataset_num_proc reward_model_name_or_path load_in_4bit bnb_4bit_quant_type lora_target_parameters lora_task_type
overwrite_output_dir per_device_train_batch_size save_safetensors group_by_length logging_dir torch_compile deepspeed
multi_objective_aggregation num_machines main_process_ip main_process_port machine_rank"""


@pytest.mark.parametrize("names", [AREAL, TRL], ids=["AReaL", "TRL"])
def test_every_name_of_their_examples_is_answered(names):
    assert [name for name in names.split() if answer(name) is None] == []
