"""The ranks build models of different sizes."""
# processes: 2

from small import CURED
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
rows = 8 if CURED else 8 + distributed.get_rank()
DistributedDataParallel(nn.Embedding(rows, 4))
distributed.destroy_process_group()
