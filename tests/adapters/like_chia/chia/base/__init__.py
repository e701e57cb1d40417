"""Stands where CHIA does in tests: its modules find each other as CHIA's do, by names that they import when they are called."""
