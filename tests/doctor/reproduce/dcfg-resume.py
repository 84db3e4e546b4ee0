"""A model sharded at load time cannot resume its optimizer."""

# processes: 2

from small import arguments, dataset, load
from transformers import Trainer
from transformers.distributed import DistributedConfig

for resume in (False, True):
    Trainer(
        model=load(distributed_config=DistributedConfig(fsdp_size=2)),
        args=arguments(save_strategy="steps", save_steps=1),
        train_dataset=dataset(),
    ).train(resume_from_checkpoint=resume)
