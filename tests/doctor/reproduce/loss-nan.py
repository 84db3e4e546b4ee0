"""The loss is 0 and the gradient norm nan."""

from small import CURED, arguments, dataset, load
from transformers import Trainer

model = load()
if not CURED:
    model.lm_head.weight.data.fill_(float("nan"))
Trainer(model=model, args=arguments(), train_dataset=dataset()).train()
