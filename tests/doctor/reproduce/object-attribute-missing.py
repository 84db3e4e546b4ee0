"""An attribute that no version of the class has."""

from small import CURED
from transformers import TrainingArguments

getattr(TrainingArguments(output_dir="x"), "output_dir" if CURED else "frobnicate")
