"""A path that does not exist is taken for a repository name."""

from small import CURED, MODEL, load

load(MODEL if CURED else "./checkpoints/qwen3-sft/checkpoint-500")
