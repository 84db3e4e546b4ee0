"""Megatron's parallel groups were made twice."""

from mcore import start
from megatron.core import parallel_state
from small import CURED

start()
if CURED:
    parallel_state.destroy_model_parallel()
parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
