"""Predicts a job's state size, save intervals, goodput and cost. Pure arithmetic without torch."""
