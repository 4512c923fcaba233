"""Specs of users as strict, frozen pydantic models, shared by laptop and container."""
