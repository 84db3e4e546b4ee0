"""What a guard sees in a run: progress, processes, stalls, memory."""
