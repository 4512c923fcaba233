"""Tables of torch's private parts that the runtime uses, and of tried versions, with their checks."""
