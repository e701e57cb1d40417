"""The budget: what is used, what may go, and what a root is bound by."""
