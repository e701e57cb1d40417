"""The command line: `main` wires the verbs, one file each; `render` and `bars` alone know how things look."""
