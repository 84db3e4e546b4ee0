"""FSDP was asked for on CPUs and plain DDP runs."""

# processes: 2

from accelerate.utils import DistributedType
from small import arguments, dataset, load
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

trainer = Trainer(
    model=load(), args=arguments(fsdp=True, fsdp_config={"version": 2}), train_dataset=dataset()
)
trainer.train()
assert trainer.accelerator.distributed_type == DistributedType.MULTI_CPU
assert isinstance(trainer.model_wrapped, DistributedDataParallel)
