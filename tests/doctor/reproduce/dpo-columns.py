"""The data set has no chosen and rejected columns."""

import trl
from datasets import Dataset
from small import CURED, load, tokenizer

pair = {"prompt": "a", "chosen": "b", "rejected": "c"} if CURED else {"prompt": "a", "completion": "b"}
trl.DPOTrainer(
    model=load(),
    args=trl.DPOConfig("out", use_cpu=True, bf16=False, report_to="none"),
    processing_class=tokenizer(),
    train_dataset=Dataset.from_list([pair] * 4),
)
