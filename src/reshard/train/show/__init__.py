"""What is seen of a run: metrics, the progress line, the report, trackers."""
