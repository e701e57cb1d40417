"""Remote directories as local ones: lists of files, whole trees, private copies, uploads."""
