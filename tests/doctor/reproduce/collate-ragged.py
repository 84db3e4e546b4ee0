"""Samples of different lengths cannot be made one tensor."""

from datasets import Dataset
from small import CURED, arguments, load, tokenizer
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer

samples = [list(range(5, 21 + i)) for i in range(8)]
Trainer(
    model=load(),
    args=arguments(),
    train_dataset=Dataset.from_list([{"input_ids": each, "labels": each} for each in samples]),
    data_collator=(DataCollatorForSeq2Seq if CURED else DataCollatorWithPadding)(tokenizer()),
).train()
