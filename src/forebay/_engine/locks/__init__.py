"""Leases on entries, the locks of keys, and which processes are alive."""
