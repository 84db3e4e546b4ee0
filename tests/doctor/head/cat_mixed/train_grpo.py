"""GRPO on a small model: runs with `python`, fails with `accelerate launch`."""

from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

MODEL = "models/Qwen2.5-0.5B"


def reward_short(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


model = AutoModelForCausalLM.from_pretrained(MODEL, torch_dtype="auto", device_map="auto")
tokenizer = AutoTokenizer.from_pretrained(MODEL)
dataset = Dataset.from_list([{"prompt": f"What is {n} plus 1?"} for n in range(16)])

args = GRPOConfig(
    output_dir="out/grpo",
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=8,
    max_steps=1,
    use_cpu=True,
    bf16=False,
    report_to="none",
)
trainer = GRPOTrainer(
    model=model, args=args, processing_class=tokenizer, reward_funcs=reward_short, train_dataset=dataset
)
trainer.train()
trainer.save_model()
print("finished")
