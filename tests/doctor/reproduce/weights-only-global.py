"""torch.load refuses a class inside the checkpoint."""

import argparse

import torch
from small import CURED

torch.save({"args": argparse.Namespace(tp=2), "model": {"w": torch.ones(2)}}, "out/model_optim_rng.pt")
torch.load("out/model_optim_rng.pt", weights_only=not CURED)
