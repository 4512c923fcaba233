"""Seeded schedules of faults over real memory servers, and an oracle of its own for what must come back."""
