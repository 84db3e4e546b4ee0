"""Messages of reinforcement learning with rollouts: batches, rewards, Ray, engines that sleep."""

from __future__ import annotations

import pytest

from tests.doctor.test_classes import assert_class, first, raised

MESSAGES = {
    "AssertionError: real_train_batch_size (20) must be divisible by minimal possible batch size (8)": (
        "rollout-batch-of-processes",
        "data.train_batch_size=8",
    ),
    "AssertionError: ppo_mini_batch_size 0 should be larger than 0 after normalization": (
        "rollout-mini-batch-empty",
        "actor_rollout_ref.actor.ppo_mini_batch_size=64",
    ),
    "AssertionError: normalized ppo_mini_batch_size 20 should be divisible by ppo_micro_batch_size_per_gpu 8": (
        "rollout-mini-batch-uneven",
        "use_dynamic_bsz=True",
    ),
    "AssertionError: max_token_len must be greater than the sequence length. Got max_token_len=4096 and "
    "max_seq_len=5120": ("rollout-tokens-below-sequence", "ppo_max_token_len_per_gpu=5120"),
    "ValueError: [actor] Please set at least one of 'actor.ppo_micro_batch_size' or "
    "'actor.ppo_micro_batch_size_per_gpu' if use_dynamic_bsz is not enabled.": (
        "rollout-micro-batch-not-given",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
    ),
    "AssertionError: rollout_batch_size 32 * n_samples_per_prompt 8 is not a multiple of global_batch_size 512": (
        "rollout-steps-of-batches",
        "--num-steps-per-rollout 1",
    ),
    "AssertionError: Train dataloader is empty!": ("rollout-data-empty", "data.max_prompt_length"),
    "ConnectionError: Could not find any running Ray instance. Please specify the one to connect to by setting "
    "`--address` flag or `RAY_ADDRESS` environment variable.": ("ray-not-running", "ray start --head"),
    "RuntimeError: Version mismatch: The cluster was started with:\n    Ray: 2.43.0\n    Python: 3.10.12\n"
    "This process on node 10.1.2.4 was started with:\n    Ray: 2.46.0\n    Python: 3.10.12": (
        "ray-releases-differ",
        "'ray[default]==2.43.0'",
    ),
    "ray.exceptions.RuntimeEnvSetupError: Failed to set up runtime environment.\nFailed to upload package /a to "
    "the Ray cluster: Package size (1283.41MiB) exceeds the maximum size of 512.00MiB.": (
        "ray-folder-too-large",
        '"excludes"',
    ),
    "TypeError: compute_score() got an unexpected keyword argument 'extra_info'": (
        "rollout-reward-signature",
        "extra_info=None, **kwargs",
    ),
    "TypeError: ServerArgs.__init__() got an unexpected keyword argument 'enable_weights_cpu_backup'": (
        "engine-arguments-of-other-release",
        "verl[sglang]",
    ),
    "RuntimeError: CUDA Error: out of memory at /workspace/csrc/cumem_allocator.cpp:62": (
        "engine-pool-out-of-memory",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.4",
    ),
    "RuntimeError: CUDA Error: invalid argument at /workspace/csrc/cumem_allocator.cpp:62": (
        "engine-pool-refused",
        "free_cache_engine=False",
    ),
    "Exception: Server process terminated unexpectedly.": ("engine-server-ended", "sglang.launch_server"),
    "requests.exceptions.ProxyError: HTTPConnectionPool(host='10.12.3.4', port=30000): Max retries exceeded with "
    "url: /health (Caused by ProxyError('Unable to connect to proxy', OSError('403 Forbidden')))": (
        "proxy-for-own-server",
        "no_proxy=localhost,127.0.0.1,10.12.3.4",
    ),
    "AssertionError: model context length should be greater than total sequence length": (
        "rollout-beyond-context",
        "data.max_response_length",
    ),
    "omegaconf.errors.ConfigAttributeError: Key 'agent' is not in struct\n    full_key: "
    "actor_rollout_ref.rollout.agent\n    object_type=dict": (
        "config-lacks-key",
        "+actor_rollout_ref.rollout.agent=VALUE",
    ),
    "ValueError: Resource pool global_pool: 8*2cannot be satisfied in this ray cluster": (
        "ray-pool-not-met",
        "--num-gpus 8",
    ),
    "TimeoutError: Failed to get register_center_actor X_register_center in [] for 300 seconds.": (
        "ray-first-worker-silent",
        "trainer.ray_wait_register_center_timeout=1200",
    ),
    "ValueError: Ray does not allocate any GPUs on the driver node. Consider adjusting the Ray placement group.": (
        "ray-driver-without-gpu",
        "--distributed-executor-backend mp",
    ),
    "RuntimeError: Request failed with status code 500: No available agent to submit job, please try again later.": (
        "ray-agent-missing",
        "--dashboard-host 0.0.0.0",
    ),
    "Exception: Request error for 5 times, returning None. Please check the API server.": (
        "reward-server-not-reached",
        "--remote_rm_url",
    ),
    "hydra.errors.OverrideParseException: LexerNoViableAltException: data.train_files=/data/my file(1).parquet": (
        "override-not-parsed",
        "Quote such a value twice",
    ),
    "hydra.errors.MissingConfigException: Cannot find primary config 'ppo_megatron_trainer'. Check that it's in "
    "your config search path.": ("config-not-found", "--config-name=ppo_megatron_trainer"),
    "omegaconf.errors.ConfigKeyError: Key 'lr_schedule' not in 'OptimConfig'\n    full_key: optim.lr_schedule": (
        "key-not-in-schema",
        "class OptimConfig",
    ),
    "hydra.errors.InstantiationException: Error in call to target 'verl.workers.config.rollout.RolloutConfig':\n"
    "TypeError(\"RolloutConfig.__init__() got an unexpected keyword argument 'chat_scheduler'\")": (
        "key-not-in-schema",
        "Take `chat_scheduler` out",
    ),
    "RuntimeError: Prompt length 1385 is longer than 1024.": (
        "rollout-prompt-too-long",
        "data.filter_overlong_prompts=True",
    ),
    "NotImplementedError: sequence_length=2113 is larger than max_length=2048": (
        "rollout-prompt-too-long",
        "data.max_length=2113",
    ),
    "NotImplementedError: Reward function is not implemented for data_source='my_math'": (
        "rollout-reward-unknown",
        "custom_reward_function.path",
    ),
    "AssertionError: Expandable segments are not compatible with memory pool. Please track "
    "https://github.com/pytorch/pytorch/issues/147851 for the latest updates.": (
        "engine-sleep-expandable-segments",
        "unset PYTORCH_CUDA_ALLOC_CONF",
    ),
    "ValueError: Please don't set ROCR_VISIBLE_DEVICES when HIP/CUDA_VISIBLE_DEVICES is set.": (
        "visible-devices-of-two-vendors",
        "unset ROCR_VISIBLE_DEVICES",
    ),
    "wandb.errors.errors.UsageError: api_key not configured (no-tty). call wandb.login(key=[your_api_key])": (
        "tracker-without-key",
        "export WANDB_API_KEY",
    ),
    "AssertionError: TorchMemorySaver observes invalid LD_PRELOAD. You can use configure_subprocess() utility": (
        "engine-memory-saver-not-loaded",
        "export LD_PRELOAD",
    ),
}


@pytest.mark.parametrize("said", MESSAGES)
def test_message_has_one_meaning(said):
    assert_class(raised(said), *MESSAGES[said])


@pytest.mark.parametrize(
    ("line", "code", "cure"),
    [
        (
            "(autoscaler +1m12s) Warning: The following resource request cannot be scheduled right now: "
            "{'CPU': 1.0, 'GPU': 1.0}. This is likely due to all cluster resources being claimed by actors.",
            "ray-lacks-resources",
            "ray status",
        ),
        (
            "mismatched input '=' expecting <EOF>",
            "override-not-parsed",
            "bash -x SCRIPT.sh",
        ),
        (
            "[2025-02-20 15:42:42,123 E 40123 40123] core_worker.cc:201: Failed to register worker to Raylet: "
            "IOError: [RayletClient] Unable to register worker with raylet. Failed to read data from the socket",
            "ray-worker-not-registered",
            "--num-cpus 16",
        ),
    ],
)
def test_what_ray_logs(line, code, cure):
    found = first(f"{line}\n")
    assert found.code == code
    assert cure in found.remedy.en


@pytest.mark.parametrize(
    ("key", "code", "cure"),
    [
        ("reward_model", "rollout-data-lacks", '"ground_truth": ANSWER'),
        ("raw_prompt", "rollout-chat-not-kept", "data.return_raw_chat=True"),
    ],
)
def test_columns_of_prompts(key, code, cure):
    found = first(raised(f"KeyError: '{key}'", f'row["{key}"]', "/home/user/verl/verl/utils/x.py"))
    assert found.code == code
    assert cure in found.remedy.en


def test_an_override_of_a_key_that_no_config_has():
    said = "omegaconf.errors.ConfigAttributeError: Key 'agent' is not in struct\n    full_key: rollout.agent"
    log = f"{raised(said)}\n\nhydra.errors.ConfigCompositionException: Could not override 'rollout.agent'.\n"
    assert first(log).code == "unknown-key"


def test_cache_that_a_model_reads_as_tuples():
    code = "past_length = past_key_values[0][0].shape[2]"
    found = first(
        raised("TypeError: 'NoneType' object is not subscriptable", code, "/m/modeling_internlm2.py")
    )
    assert found.code == "cache-of-tuples"
    assert "use_cache=False" in found.remedy.en


def test_names_of_adapters_in_an_engine():
    said = "KeyError: 'layers.0.self_attn.qkv_proj.base_layer.weight'"
    found = first(raised(said, "param = params_dict[name]", "/vllm/model_executor/models/qwen2.py"))
    assert found.code != "rollout-adapter-names"
    loads = raised(said, "self.model.load_weights(weights)", "/verl/workers/sharding_manager/fsdp_vllm.py")
    found = first(loads)
    assert found.code == "rollout-adapter-names"
    assert "load_format=safetensors" in found.remedy.en
