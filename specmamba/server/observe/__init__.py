"""What is recorded of calls: metrics, log lines, traces."""
