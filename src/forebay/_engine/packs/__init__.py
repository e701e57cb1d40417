"""Arrays of samples: many values in few files."""
