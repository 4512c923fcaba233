"""Jobs of 16 to 16,384 nodes through months of faults, decided by the code that decides in a real job. No torch."""
