"""What processes share in mapped memory: when entries were used, counters, the clock; and what this one has mapped."""
