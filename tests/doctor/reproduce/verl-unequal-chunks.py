"""A batch of two samples is to be divided over four workers."""

# needs: verl

import torch
from small import CURED
from verl import DataProto

DataProto.from_dict({"responses": torch.zeros(4 if CURED else 2, 1)}).chunk(4)
