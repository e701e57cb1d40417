"""The files of a root: their paths, their formats, and how they are written."""
