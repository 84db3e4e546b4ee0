"""A data loader holds more tensors than the process may open files."""

import resource

import torch
from small import CURED
from torch.utils.data import DataLoader

torch.multiprocessing.set_sharing_strategy("file_system" if CURED else "file_descriptor")
resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
kept = list(DataLoader([torch.ones(1)] * 128, num_workers=1, batch_size=1))
