"""What users see of a run: metrics, progress line, report, trackers."""
