"""The names that Streaming imports."""
