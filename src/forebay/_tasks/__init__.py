"""The rooms of `Tasks`: what a call is called, what is kept of it, when it is replayed."""
