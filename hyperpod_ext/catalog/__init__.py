"""Facts as data, each file with its source, and the look-ups: instance types, images by region, labels."""
