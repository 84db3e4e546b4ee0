"""What a log says: its streams, tracebacks and other failures, and which of them came first."""
