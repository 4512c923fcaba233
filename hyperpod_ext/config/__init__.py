"""What the user wants, as strict frozen pydantic models shared by laptop and container."""
