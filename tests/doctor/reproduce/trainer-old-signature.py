"""A method of a Trainer subclass lacks an argument that newer versions pass."""

from small import CURED, arguments, dataset, load
from transformers import Trainer


class Old(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(**inputs).loss


class New(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, **_):
        return model(**inputs).loss


(New if CURED else Old)(model=load(), args=arguments(), train_dataset=dataset()).train()
