"""Who tells a worker which generation it is in: our agent, hyperpodrun or torchrun."""
