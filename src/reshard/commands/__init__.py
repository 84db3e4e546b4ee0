"""What the commands do with checkpoints: convert, inspect, verify, prove, open."""
