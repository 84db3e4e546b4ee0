"""A model spread by device_map over several devices is trained in a distributed launch."""

# processes: 2

from small import CURED, SPLIT, arguments, dataset, load, rank
from transformers import Trainer

placed = {} if CURED else {"device_map": SPLIT, "offload_folder": f"out/offloaded{rank}"}
Trainer(model=load(**placed), args=arguments(), train_dataset=dataset()).train()
