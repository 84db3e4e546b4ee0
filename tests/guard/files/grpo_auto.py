"""GRPO of a model that is loaded with device_map="auto": `accelerate launch --config_file fsdp2.yaml grpo_auto.py`."""

import os

from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, TrlParser

if os.environ.get("ACCELERATE_USE_FSDP"):
    import fsdp_on_cpu  # noqa: F401  without a GPU accelerate leaves FSDP out


def reward(completions, **_):
    return [float(len(set(completion[0]["content"]))) for completion in completions]


def main() -> None:
    (args,) = TrlParser(GRPOConfig).parse_args_and_config()
    model = AutoModelForCausalLM.from_pretrained("model", torch_dtype="auto", device_map="auto")
    prompts = load_dataset("json", data_files="data.jsonl", split="train")
    prompts = prompts.map(lambda row: {"prompt": row["messages"][:1]}, remove_columns=prompts.column_names)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=prompts,
        processing_class=AutoTokenizer.from_pretrained("model"),
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
