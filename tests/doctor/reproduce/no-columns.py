"""No column of the data set is an argument of the model."""

from datasets import Dataset
from small import CURED, arguments, dataset, load
from transformers import Trainer

data = dataset() if CURED else Dataset.from_list([{"text": "hello", "id": 1}] * 8)
Trainer(model=load(), args=arguments(), train_dataset=data).train()
