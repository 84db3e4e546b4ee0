"""Megatron-Core on a CPU for what the oracle does not do: TransformerEngine's modules, training, saving."""
