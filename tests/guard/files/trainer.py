"""Continued pretraining with the Trainer of transformers: `torchrun --nproc-per-node 2 trainer.py`."""

from datasets import load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    HfArgumentParser,
    Trainer,
    TrainingArguments,
)


def main() -> None:
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    tokenizer = AutoTokenizer.from_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model")
    texts = load_dataset("json", data_files="data.jsonl", split="train")

    def tokens(row):
        return tokenizer(" ".join(message["content"] for message in row["messages"]))

    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=texts.map(tokens, remove_columns=texts.column_names),
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
