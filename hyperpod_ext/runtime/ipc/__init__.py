"""Messages between the processes of a job: connections, authentication, and translation of times between machines."""
