"""Keyword arguments that transformers 5.23 and TRL 1.16 do not take any more, and what took their place."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

from reshard.doctor.finding import Text
from reshard.doctor.words import words

_ARGUMENTS = {
    **dict.fromkeys(
        (
            *("adafactor", "fp16_backend", "fp16_opt_level", "fsdp_min_num_params", "group_by_length"),
            *("fsdp_transformer_layer_cls_to_wrap", "half_precision_backend", "include_inputs_for_metrics"),
            *("include_tokens_per_second", "jit_mode_eval", "logging_dir", "mp_parameters", "past_index"),
            *(
                "overwrite_output_dir",
                "push_to_hub_organization",
                "ray_scope",
                "save_safetensors",
                "torchdynamo",
            ),
            *("tp_size", "tpu_metrics_debug", "tpu_num_cores", "use_ipex", "use_legacy_prediction_loop"),
            *("use_mps_device", "dispatch_batches", "split_batches"),
        ),
        "",
    ),
    "evaluation_strategy": "eval_strategy",
    "no_cuda": "use_cpu",
    "per_gpu_eval_batch_size": "per_device_eval_batch_size",
    "per_gpu_train_batch_size": "per_device_train_batch_size",
    "push_to_hub_model_id": "hub_model_id",
    "push_to_hub_token": "hub_token",
    "warmup_ratio": "warmup_steps",
}
"""Of TrainingArguments. A ratio is taken as warmup_steps below 1."""
_PREFERENCES = dict.fromkeys(
    (
        *("generate_during_eval", "label_pad_token_id", "max_completion_length", "max_prompt_length"),
        *("padding_value", "ref_model_init_kwargs"),
    ),
    "",
)
_TRAINER = {"tokenizer": "processing_class"}
_SFT_OLD = (
    "packing",
    "dataset_text_field",
    "num_of_sequences",
    "dataset_kwargs",
    "dataset_num_proc",
    "neftune_noise_alpha",
)

REMOVED: dict[str, dict[str, str]] = {
    "TrainingArguments": _ARGUMENTS,
    "Seq2SeqTrainingArguments": _ARGUMENTS,
    "SFTConfig": {
        **_ARGUMENTS,
        "max_seq_length": "max_length",
        **dict.fromkeys(("chars_per_token", "dataset_batch_size", "num_of_sequences"), ""),
        "use_liger": "use_liger_kernel",
    },
    "DPOConfig": {
        **_ARGUMENTS,
        **_PREFERENCES,
        **dict.fromkeys(
            (
                *("force_use_ref_model", "model_adapter_name", "ref_adapter_name", "reference_free"),
                *("rpo_alpha", "tools", "use_logits_to_keep", "max_target_length"),
            ),
            "",
        ),
    },
    "KTOConfig": {
        **_ARGUMENTS,
        **_PREFERENCES,
        **dict.fromkeys(("base_model_attribute_name", "is_encoder_decoder", "truncation_mode"), ""),
        "use_liger_loss": "use_liger_kernel",
    },
    "RewardConfig": _ARGUMENTS,
    "GRPOConfig": {
        **_ARGUMENTS,
        **dict.fromkeys(
            (
                *("max_prompt_length", "vllm_device", "vllm_dtype", "vllm_enable_prefix_caching"),
                *("vllm_guided_decoding_regex", "wandb_log_unique_prompts"),
            ),
            "",
        ),
        "use_liger_loss": "use_liger_kernel",
        "vllm_max_model_len": "vllm_max_model_length",
    },
    "RLOOConfig": {
        **_ARGUMENTS,
        **dict.fromkeys(
            (
                *("exp_name", "local_rollout_forward_batch_size", "missing_eos_penalty", "normalize_reward"),
                *(
                    "num_mini_batches",
                    "num_ppo_epochs",
                    "response_length",
                    "reward_model_path",
                    "sft_model_path",
                ),
                *("stop_token", "stop_token_id", "token_level_kl", "total_episodes", "whiten_rewards"),
            ),
            "",
        ),
        "cliprange": "epsilon",
        "kl_coef": "beta",
        "normalize_advantage": "normalize_advantages",
        "rloo_k": "num_generations",
    },
    "Trainer": _TRAINER,
    "Seq2SeqTrainer": _TRAINER,
    "SFTTrainer": {**_TRAINER, "max_seq_length": "", **dict.fromkeys(_SFT_OLD, "")},
    "DPOTrainer": {**_TRAINER, "beta": "", "max_length": "", "max_prompt_length": "", "model_init": ""},
    "KTOTrainer": {**_TRAINER, "model_adapter_name": "", "model_init": "", "ref_adapter_name": ""},
    "RewardTrainer": {**_TRAINER, "max_length": "", "model_init": ""},
    "GRPOTrainer": _TRAINER,
    "RLOOTrainer": {
        **_TRAINER,
        "config": "args",
        "policy": "model",
        "reward_model": "reward_funcs",
        "ref_policy": "",
    },
}
"""By class: the old name, and the new one; "" for what is gone."""

SINCE = {"transformers": "5.0", "trl": "1.0"}
"""Versions that take none of REMOVED; some are gone for longer."""


def certainty(name: str) -> tuple[str, Text]:
    """How sure it is that a class does not take an old name here, and what that rests on: the installed versions."""
    package = (
        "transformers" if name in ("TrainingArguments", "Seq2SeqTrainingArguments", "Trainer") else "trl"
    )
    try:
        installed = version(package)
    except PackageNotFoundError:
        return "likely", words("holds-from", name=package, version=SINCE[package])
    is_new = Version(installed) >= Version(SINCE[package])
    return "sure" if is_new else "possible", words("installed-here", name=package, version=installed)


def wording(name: str, old: str, new: str) -> dict[str, object]:
    """What the rule says of an old name: renamed, or gone."""
    return {
        "name": name,
        "old": old,
        "became": words("name-became" if new else "name-gone", old=old, new=new),
        "cure": words("write-new" if new else "delete-old", old=old, new=new),
    }
