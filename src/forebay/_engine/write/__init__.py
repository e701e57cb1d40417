"""From bytes to entries, in one transaction."""
