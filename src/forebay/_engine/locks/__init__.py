"""Who holds what: leases on entries, the keys' locks, processes and their death."""
