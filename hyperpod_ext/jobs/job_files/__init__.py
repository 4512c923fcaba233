"""JSON files of jobs on this machine, checked before use."""
