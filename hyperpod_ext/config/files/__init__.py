"""From text to model: files are read, and every mistake is told with its line."""
