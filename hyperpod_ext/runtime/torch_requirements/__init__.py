"""Tables of torch's private names that the runtime uses and of tested versions, with the checks of both tables."""
