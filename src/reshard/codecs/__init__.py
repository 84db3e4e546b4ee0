"""How the bytes of quantized weights become numbers, and back, by scheme. Nothing here knows a checkpoint."""
