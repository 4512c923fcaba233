"""Models of a job's spec. The job's containers read only `RuntimeConfig`, which is a small part of the spec."""
