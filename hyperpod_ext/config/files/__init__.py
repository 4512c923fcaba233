"""Reads spec files into models, and reports every mistake with its line."""
