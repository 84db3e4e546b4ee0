"""A CPU build of torch is asked for CUDA."""

from small import CURED, load

load().to("cpu" if CURED else "cuda")
