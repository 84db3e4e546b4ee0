"""Data-parallel training as one writes it oneself: `torchrun --nproc-per-node 2 loop.py`."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="model")
parser.add_argument("--output", type=Path, default=Path("out"))
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--save-every", type=int, default=10)
parser.add_argument("--lr", type=float, default=1e-3)
args = parser.parse_args()


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(rank)
    model = AutoModelForCausalLM.from_pretrained(args.model)
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=args.lr)
    for step in range(1, args.steps + 1):
        tokens = torch.randint(5, 200, (2, 32))
        loss = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
        if step % args.save_every == 0:
            save(model, optimizer, step)
    dist.destroy_process_group()


def save(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if dist.get_rank() == 0:
        args.output.mkdir(parents=True, exist_ok=True)
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, args.output / f"step_{step}.pt")
    dist.barrier()


if __name__ == "__main__":
    main()
