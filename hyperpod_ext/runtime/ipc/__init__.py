"""Messages between our processes, the socket they come in by, and what one process's clock is at another's."""
