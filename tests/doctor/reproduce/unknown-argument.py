"""An argument that the parser does not know."""

from small import CURED
from transformers import HfArgumentParser, TrainingArguments

given = [] if CURED else ["--overlap_com", "1"]
HfArgumentParser(TrainingArguments).parse_args_into_dataclasses(["--output_dir", "x", *given])
