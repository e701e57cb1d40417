"""Stands in for a torchvision that does not load, as one that was built for CUDA beside a torch for the CPU.

Streaming imports torchvision for its image datasets only, and nothing of it is called by the tests and benchmarks that put this
directory's parent in front of the path.
"""
