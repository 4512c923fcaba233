"""Tables of torch's private names that the runtime uses, and of tested versions, with the code that checks them."""
