"""Pydantic models of the specs that users write. The command line and the job's containers use the same models."""
