"""Private parts of torch that the runtime uses: one table of them, and the check that this torch has them."""
