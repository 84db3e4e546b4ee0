"""TRL builds the reference model under FSDP without device_map=None."""

# processes: 2

import fsdp_on_cpu  # noqa: F401
import torch
import trl
from small import load, no_reward, prompts, tokenizer
from trl.trainer import grpo_trainer

create = grpo_trainer.create_model_from_path
asked = []


def noted(*args, **options):
    asked.append(options)
    return create(*args, **options)


grpo_trainer.create_model_from_path = noted
args = trl.GRPOConfig(
    "out",
    beta=0.1,
    use_cpu=True,
    bf16=False,
    report_to="none",
    num_generations=2,
    per_device_train_batch_size=2,
    fsdp=True,
    fsdp_config={"version": 2},
)
trl.GRPOTrainer(
    model=load(dtype=torch.bfloat16),
    args=args,
    processing_class=tokenizer(),
    reward_funcs=no_reward,
    train_dataset=prompts(),
)
(of_the_reference,) = asked
assert "device_map" not in of_the_reference
