"""Files of a root: where they lie, what they look like, how they are written."""
