"""What all targets share: what one can do, the handle and status of its jobs, and rendered files."""
