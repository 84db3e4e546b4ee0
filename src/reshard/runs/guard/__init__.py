"""The guard around a training command. `reshard.guard` is its public face."""
