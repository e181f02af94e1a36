"""The engine: requests, their scheduling, and the step."""
