"""Jinja templates, a folder for each target. They hold shape; decisions are made in Python."""
