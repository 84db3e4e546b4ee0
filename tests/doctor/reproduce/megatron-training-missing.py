"""What needs Megatron-LM is run where only megatron-core is installed."""

from megatron.training import get_args

get_args()
