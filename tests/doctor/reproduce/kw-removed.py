"""A keyword argument that newer TRL or transformers have removed."""

import trl
from small import CURED, dataset, load, tokenizer

trl.SFTTrainer(
    model=load(),
    args=trl.SFTConfig("out", use_cpu=True, bf16=False),
    train_dataset=dataset(),
    **{"processing_class" if CURED else "tokenizer": tokenizer()},
)
