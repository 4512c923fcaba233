"""The members of a job and the consequences of each fault, as pure functions of incoming messages."""
