"""The disk filled up while a checkpoint was written."""

import resource
import signal

import torch
from small import CURED

if not CURED:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the write fails, as on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
torch.save({"w": torch.ones(1_000_000)}, "out/model.pt")
