"""Fronts that speak as other libraries do. Each is imported by its own name, and needs nothing but what it adapts to."""
