"""Claims, in rooms: the launchers and the job, what a claim records, its members, and the registry of the node."""
