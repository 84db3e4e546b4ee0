"""torch.save files, read and written without torch."""
