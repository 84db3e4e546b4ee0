"""FSDP asked for with a single process."""

from small import CURED, arguments, dataset, load
from transformers import Trainer

Trainer(model=load(), args=arguments(fsdp=not CURED), train_dataset=dataset())
