"""DeepSpeed finds no CUDA toolkit."""

# needs: deepspeed
# environment: DS_ACCELERATOR=cuda TORCH_CUDA_ARCH_LIST=8.0

from deepspeed.ops.op_builder import FusedAdamBuilder

FusedAdamBuilder().load()
