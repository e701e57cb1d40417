"""The rooms below `forebay.codecs`: what all codecs share, and those that need nothing of the others."""
