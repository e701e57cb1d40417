"""How a prefetcher works: loads, the threads that bring them, the one that keeps them."""
