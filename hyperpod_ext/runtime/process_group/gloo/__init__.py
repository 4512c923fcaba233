"""What groups of gloo are made of: their sockets, the threads that wait in them, and who is told that nothing comes."""
