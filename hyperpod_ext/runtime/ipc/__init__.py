"""Messages between our processes, their connections and authentication, and time translation between machines."""
