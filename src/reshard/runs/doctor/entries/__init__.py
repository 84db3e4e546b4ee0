"""The catalogue of failures, and which of them a log or a description shows."""
