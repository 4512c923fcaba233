"""Messages between our processes, their connections and authentication, and translation between clocks of machines."""
