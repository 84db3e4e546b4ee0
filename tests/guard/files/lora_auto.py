"""LoRA fine-tuning as a notebook has it, with device_map="auto"."""

from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer, TrlParser


def main() -> None:
    (args,) = TrlParser(SFTConfig).parse_args_and_config()
    model = AutoModelForCausalLM.from_pretrained("model", device_map="auto")
    trainer = SFTTrainer(
        model=model,
        args=args,
        train_dataset=load_dataset("json", data_files="data.jsonl", split="train"),
        processing_class=AutoTokenizer.from_pretrained("model"),
        peft_config=LoraConfig(
            r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        ),
    )
    trainer.train()
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
