"""How bytes live on the node. Knows no URL, sample, task or torch."""
