"""Nothing to resume from."""

from small import CURED, arguments, dataset, load
from transformers import Trainer

Trainer(model=load(), args=arguments(), train_dataset=dataset()).train(resume_from_checkpoint=not CURED)
