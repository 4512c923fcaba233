"""The `@resilient` loop: each rank joins a generation, restores its state and trains; after a fault it starts over."""
