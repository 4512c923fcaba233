"""What groups of gloo are made of: their sockets, the threads that wait in them, and lost wake-ups."""
