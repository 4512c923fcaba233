"""Who is in a job and what each fault leads to, as pure functions of messages."""
