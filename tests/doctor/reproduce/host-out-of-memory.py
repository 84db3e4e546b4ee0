"""The host's memory is used up."""

import torch

torch.zeros(10**13)
