"""Carries out what the membership decides, and hears all agents."""
