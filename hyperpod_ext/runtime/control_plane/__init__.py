"""A worker's interface to its launcher (our agent, hyperpodrun or torchrun), which begins and ends generations."""
